"""Seconds of evaluating fused scores, by part, and recall of the nearest training points by the memory's index.

    python -m benchmarks.fused RAW [--points 586165] [--test 62265] [--folder FOLDER] [--quick]

RAW is a folder of data sets; each data set is a folder with trn.json.gz, tst.json.gz and lbl.json.gz of the XC
repository. The data sets are joined, and their labels are numbered consecutively. Copies of rows without one random
word are added until the requested number of rows is reached. `decoupled` is trained for an epoch with D = 256, then
`extremis fuse` and `extremis evaluate` run. Each part has wall seconds and processor seconds; some parts contain other
parts.

FOLDER keeps the data and the run, and existing output is not made again. Only the fusion is made again; its linear
ranker is kept. `--scores-only` keeps the whole fusion; `--limit` evaluates only the first queries.
"""

import argparse
import contextlib
import gzip
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.report import Bar, report
from extremis.evaluation import evaluate
from extremis.supervisor import train
from pipelines.shard import ShardOptions, shard
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import is_published
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from scoring import fitting, fusion, memory
from scoring.fitting import open_fusion
from scoring.linear import LinearRanker
from scoring.options import EvaluateOptions
from trainer.evaluation import ranking
from trainer.model import Model, find_checkpoint, load_model
from trainer.settings.resolve import resolve
from trainer.stream import open_queries

ROOT = Path(__file__).parents[1]
CHANGES = ("encoder.dimension=256", "train.epochs=1", "data.holdout=0.02")
SECONDS = 60
COMPARED = 1024  # queries with an additional exact search for neighbours


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", type=Path, nargs="?", default=ROOT / "examples")
    parser.add_argument("--points", type=int, default=586_165)
    parser.add_argument("--test", type=int, default=62_265)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--limit", type=int, help="queries to evaluate. Default: all")
    parser.add_argument("--linear", type=int, default=1 << 30, help="bytes of the linear ranker's rows")
    parser.add_argument("--scores-only", action="store_true", help="keep the fusion that FOLDER has")
    parser.add_argument("--quick", action="store_true", help="20,000 points and 2,000 queries")
    arguments = parser.parse_args()
    points, test = (20_000, 2_000) if arguments.quick else (arguments.points, arguments.test)
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as scratch:
        folder = arguments.folder or Path(scratch)
        data, run = str(folder / "data"), str(folder / "run")
        if not is_published(data):
            join(arguments.raw, folder / "raw", points, test)
            shard(str(folder / "raw"), data, ShardOptions())
        if not storage.exists(RunLayout(run).finished):
            train(data, run, resolve("decoupled", CHANGES, data).recipe)
        figures: dict[str, Any] = {}
        if not arguments.scores_only:
            with timed() as parts:
                fitting.fit_fusion(data, run, ranker_budget=arguments.linear, ranker=stored_ranker(data, run))
            figures["fuse"] = parts
        with timed() as parts:
            scores = evaluate(data, run, EvaluateOptions(scores="fused", limit=arguments.limit))
        figures["evaluate"] = {**parts, "P@1": scores["metrics"]["P@1"]}
        figures |= compare(data, run)
    ratios = {"seconds": figures["evaluate"]["all"][0] * test / (arguments.limit or test)}
    bars: dict[str, Bar] = {"seconds": f"<{SECONDS}"}
    if "recall" in figures["memory"]:
        ratios["recall"], bars["recall"] = figures["memory"]["recall"], 0.95
    claim = "fused scores of 62,265 queries with a memory of 586,165 points take less than a minute of two cores"
    report(claim, figures, ratios, bars, points=points, test=test, limit=arguments.limit)


def join(raw: Path, out: Path, points: int, test: int) -> None:
    """Write the data sets in folders of `raw` as one data set with `points` points and `test` test queries."""
    out.mkdir(parents=True, exist_ok=True)
    draw, rows = random.Random(0), defaultdict[str, list[dict[str, Any]]](list)
    labels: list[dict[str, Any]] = []
    for folder in sorted(place.parent for place in raw.glob("*/trn.json.gz")):
        for name in ("trn", "tst"):
            for record in read(folder / f"{name}.json.gz"):
                targets = [len(labels) + label for label in record["target_ind"]]
                rows[name].append({**record, "uid": f"{folder.name}-{record['uid']}", "target_ind": targets})
        labels += [{**record, "uid": f"{folder.name}-{record['uid']}"} for record in read(folder / "lbl.json.gz")]
    if not labels:
        raise SystemExit(f"{raw}: no folder with trn.json.gz, tst.json.gz and lbl.json.gz. Name a folder of data sets.")
    for name, count in (("trn", points), ("tst", test)):
        some = draw.sample(rows[name], count) if count < len(rows[name]) else rows[name]
        more = [shortened(draw.choice(some), number, draw) for number in range(count - len(some))]
        write(out / f"{name}.json.gz", [*some, *more])
    write(out / "lbl.json.gz", labels)


def shortened(record: dict[str, Any], number: int, draw: random.Random) -> dict[str, Any]:
    """Return the row without one of its words."""
    words = f"{record['title']} {record.get('content', '')}".split()
    if len(words) > 1:
        del words[draw.randrange(len(words))]
    return {**record, "uid": f"{record['uid']}-{number}", "title": " ".join(words), "content": ""}


def read(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def write(path: Path, records: list[dict[str, Any]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


PARTS = {
    "embedding": (Model, "embed_table"),
    "classifier": (ranking, "filtered_top_k"),
    "classifier, to fit": (fitting, "filtered_top_k"),
    "memory": (memory.Memory, "votes"),
    "memory, made": (memory.Memory, "build"),
    "linear ranker": (LinearRanker, "votes"),
    "linear ranker, fitted": (LinearRanker, "of"),
    "texts and classifier of pairs": (ranking.LabelRows, "score"),
    "texts of labels": (fitting, "embed_label_texts"),
    "weights": (fusion.FusionWeights, "fit"),
    "fused": (fusion.Reranker, "rank"),
}


@contextlib.contextmanager
def timed() -> Iterator[dict[str, Any]]:
    """Yield (seconds, processor seconds) of the block and of calls in it, by part; parts may be nested."""
    spent: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(2))

    def now() -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()])

    def clocked(name: str, call: Any) -> Any:
        def run(*arguments: Any, **named: Any) -> Any:
            began = now()
            try:
                return call(*arguments, **named)
            finally:
                spent[name] += now() - began

        return run

    originals = {name: vars(owner)[attribute] for name, (owner, attribute) in PARTS.items()}
    for name, (owner, attribute) in PARTS.items():
        call = originals[name]
        wrapped = classmethod(clocked(name, call.__func__)) if isinstance(call, classmethod) else clocked(name, call)
        setattr(owner, attribute, wrapped)
    parts: dict[str, Any] = {}
    began = now()
    try:
        yield parts
    finally:
        for name, (owner, attribute) in PARTS.items():
            setattr(owner, attribute, originals[name])
        spent["all"] = now() - began
        parts |= {name: value.round(2).tolist() for name, value in spent.items()}
        sys.stderr.write(f"{parts}\n")


def stored_ranker(data: str, run: str) -> LinearRanker | None:
    """Return the linear ranker of an existing fusion, because fitting one takes minutes."""
    try:
        _, checkpoint = find_checkpoint(DataLayout(data), RunLayout(run), "newest")
        return open_fusion(data, run, checkpoint).ranker("holdout")
    except InputError:
        return None


def compare(data: str, run: str) -> dict[str, Any]:
    """Return facts of the fusion, and the memory's figures for test queries: recall, and votes with exact search.

    `P@1 of votes`: precision of the label with the most votes.
    """
    layout = DataLayout(data)
    _, model, checkpoint = load_model(layout, RunLayout(run), "newest")
    opened = open_fusion(data, run, checkpoint)
    held = opened.memory()
    if held is None:
        return {"memory": {}, "fusion": dict(opened.table.parameters)}
    rows = next(open_queries(layout, "test").batches([*model.columns, "label_ids"])).slice(0, COMPARED)
    x, relevant = model.embed_table(rows), list_column(rows, "label_ids")
    figures: dict[str, Any] = {}
    found = {"index": held, "exact": replace(held, index=None)}
    for name, by in found.items():
        began = time.process_time()
        votes = by.votes(x)
        figures[f"{name}: processor milliseconds a query"] = 1000 * (time.process_time() - began) / len(x)
        figures[f"{name}: P@1 of votes"] = 100 * float(relevant.contains(votes.best(1)[1]).mean())
    nearest = {name: by.nearest(x)[1] for name, by in found.items()}
    figures["recall"] = float(Ragged.from_matrix(np.sort(nearest["index"], 1)).contains(nearest["exact"]).mean())
    began = time.process_time()
    for row in range(100):
        held.votes(x[row : row + 1])
    figures["index, one at a time: processor milliseconds"] = 10 * (time.process_time() - began)
    return {"memory": figures, "fusion": dict(opened.table.parameters)}


if __name__ == "__main__":
    main()
