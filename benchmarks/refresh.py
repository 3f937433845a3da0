"""A run that continues an earlier run against a run from scratch: EUR-Lex by year, or any data in random parts.

Documents up to the first year are the first version. Each later year adds a version: its documents, and the labels that
occur first in these documents. In each year a run continues the run of the previous year (`extremis run --from`), and
another run starts from scratch, with the same recipe. Both runs are scored on the test documents of that year and on
all test documents up to that year; labels that are new in that year are also scored separately. With `--parts N`,
points are divided into N random parts instead of years.

    python -m benchmarks.refresh RAW [--first 2004] [--last 2014] [--recipe astra] [--set KEY=VALUE]... [--quick]
    python -m benchmarks.refresh RAW --parts 5 [--label-sample 8]

RAW contains trn.json.gz, tst.json.gz and lbl.json.gz of `eurlex57k` (the CELEX number in `uid` gives the year) or of
`wordnet`. Filter files are left out.
"""

import argparse
import gzip
import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from benchmarks.common.contributions import contributions, gains, mean
from benchmarks.common.report import report
from extremis.evaluation import evaluate
from extremis.supervisor import train
from pipelines.shard import ShardOptions, shard
from scoring.fitting import carry_fusion, fit_fusion
from scoring.options import EvaluateOptions, FitOptions
from trainer.recipe_files import read_recipe
from trainer.settings.resolve import resolve

Point = dict[str, Any]
_HELD_OUT = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("raw")
    parser.add_argument("--first", type=int, default=2004)
    parser.add_argument("--last", type=int, default=2014)
    parser.add_argument("--parts", type=int, default=0, help="random parts in place of years; as many versions")
    parser.add_argument("--recipe", default="astra")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--refresh-set", dest="more", action="append", default=[], help="of the refreshed runs alone")
    parser.add_argument("--sample", type=int, default=1, help="every so many documents of the training file alone")
    parser.add_argument("--label-sample", type=int, default=1, help="every so many labels, and documents with any")
    parser.add_argument("--memory", action="store_true", help="score with a memory of the training points, fused")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--out", help="keep data and runs here")
    parser.add_argument("--quick", action="store_true", help="one year, two epochs, 64 dimensions")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.last = arguments.first + 1
        arguments.overrides += ["train.epochs=2", "encoder.dimension=64", "encoder.hidden=128"]
    if arguments.memory:
        arguments.overrides.append("validation.split=")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(arguments.out or scratch)
        out.mkdir(parents=True, exist_ok=True)
        # With --set a refresh would keep the number of epochs, so the epochs are in a separate recipe.
        recipe = out / "recipe.toml"
        recipe.write_text(tomli_w.dumps(read_recipe(arguments.recipe, arguments.overrides)))
        years = list(measure(out, str(recipe), arguments))
    below = [year["retrained"]["all"]["P@5"] - year["refreshed"]["all"]["P@5"] for year in years]
    all_years = sum(below) / len(below)
    share = [year["refreshed"]["cpu_seconds"] / year["retrained"]["cpu_seconds"] for year in years]
    report(
        "a refreshed run is within 0.5 P@5 of one from nothing at a fifth of the time, every year",
        {**vars(arguments), "years": years},
        {"P@5 below": all_years, "most P@5 below": max(below), "most of its processor seconds": max(share)},
        {"P@5 below": "<0.2", "most P@5 below": "<0.5", "most of its processor seconds": "<0.2"},
    )


def measure(out: Path, recipe: str, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Make, train and score the versions one after the other; yield the figures of each year after the first."""
    raw = Path(arguments.raw)
    labels = read(raw / "lbl.json.gz")
    names, texts = [label["uid"] for label in labels], [text_of(label) for label in labels]
    first, last = (1, arguments.parts) if arguments.parts else (arguments.first, arguments.last)
    named, before, runs = set[int](), "", list[str]()
    memory, seeds = arguments.memory, range(arguments.seeds)
    points = parted(raw, arguments)
    for year in range(first, last + 1):
        of_year = {split: years[year] for split, years in points.items()}
        new = sorted({label for some in of_year.values() for p in some for label in p["target_ind"]} - named)
        named |= set(new)
        write(out / f"raw-{year}", of_year, {names[label]: texts[label] for label in new}, names)
        data = str(out / f"data-{year}")
        start = time.perf_counter()
        if not before:
            held_out = _HELD_OUT if memory else 0.0  # rows of a part for the weights of the scores
            options = ShardOptions(propensity_a=0.55, propensity_b=1.5, part=str(year), validation_share=held_out)
        else:
            options = ShardOptions(onto=before, part=str(year), labels="new" if new else None)
        shard(str(out / f"raw-{year}"), data, options)
        sharding = time.perf_counter() - start
        scratch = [
            timed_run(data, str(out / f"retrained-{year}-{seed}"), recipe, (f"train.seed={seed}",), str(year), memory)
            for seed in seeds
        ]
        if not before:
            runs = [str(out / f"retrained-{year}-{seed}") for seed in seeds]
        else:
            targets = [str(out / f"refreshed-{year}-{seed}") for seed in seeds]
            refreshed = [
                timed_run(data, target, recipe, [*arguments.more, *from_run(run, seed)], str(year), memory)
                for seed, run, target in zip(seeds, runs, targets, strict=True)
            ]
            texts = scratch[0]["queries"][1]
            after, anew = (mean([run.pop("queries")[0] for run in some]) for some in (refreshed, scratch))
            yield {
                "year": year,
                "train": len(of_year["train"]),
                "new_labels": len(new),
                "shard_seconds": round(sharding, 1),
                "retrained": mean_of(scratch),
                "refreshed": mean_of(refreshed),
                "gain": gains(after, anew, texts),
            }
            runs = targets
        before = data


def timed_run(data: str, run: str, recipe: str, overrides: Sequence[str], year: str, memory: bool) -> dict[str, Any]:
    """Train a run; return seconds, and metrics on all documents, on documents of `year`, and on new labels."""
    start, cpu = time.perf_counter(), processor_seconds()
    resolved = resolve(recipe, overrides, data)
    train(data, run, resolved.recipe, beam_options=() if resolved.recipe.table_epochs() else None)
    if memory and not carry_fusion(data, run, resolved.recipe.train.start_from or run):
        fit_fusion(data, run, FitOptions(split="val"), ranker_budget=0)
    picked: dict[str, Any] = {
        "seconds": round(time.perf_counter() - start, 1),
        "cpu_seconds": round(processor_seconds() - cpu, 1),
        "epochs": resolved.recipe.train.epochs,
    }
    scored = evaluate(data, run, EvaluateOptions())
    picked["queries"] = contributions(data, run)
    picked["all"] = _few(scored["metrics"])
    parts, labels = scored.get("parts", {}), scored.get("labels_by_part", {})
    picked["year"] = _few(parts.get(year, {}))
    picked["new_labels"] = {name: round(value, 2) for name, value in labels.get(year, {}).items()}
    return picked


def from_run(run: str, seed: int) -> list[str]:
    return [f"train.start_from={json.dumps(run)}", f"train.seed={seed}"]


def mean_of(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each figure over runs with different seeds."""
    means = dict[str, Any]()
    for name in runs[0].keys() - {"queries"}:
        values = [run[name] for run in runs]
        means[name] = mean_of(values) if isinstance(values[0], dict) else round(sum(values) / len(values), 2)
    return means


def processor_seconds() -> float:
    """Return the processor seconds of this process and its finished children, including miners."""
    return sum(os.times()[:4])


def _few(metrics: dict[str, float]) -> dict[str, float]:
    return {name: round(metrics[name], 2) for name in ("P@1", "P@5", "PSP@5", "R@10") if name in metrics}


def parted(raw: Path, arguments: argparse.Namespace) -> dict[str, dict[int, list[Point]]]:
    """Return the sampled points of each split by year or part."""
    parts = dict[str, dict[int, list[Point]]]()
    for split, (file, step) in {"train": ("trn.json.gz", arguments.sample), "test": ("tst.json.gz", 1)}.items():
        points = [with_labels(point, arguments.label_sample) for point in read(raw / file)[::step]]
        points = [point for point in points if point["target_ind"]]
        draw = random.Random(split)
        numbers = [number_of(point, arguments, draw) for point in points]
        parts[split] = defaultdict(list)
        for number, point in zip(numbers, points, strict=True):
            parts[split][number].append(point)
    return parts


def with_labels(point: Point, step: int) -> Point:
    """Return a point with only its labels in a sample of every `step`th label."""
    return {**point, "target_ind": [label for label in point["target_ind"] if label % step == 0]}


def text_of(row: Mapping[str, str]) -> str:
    """Return the text of a point or a label."""
    return " ".join(filter(None, (row.get("title"), row.get("content"))))


def number_of(point: Point, arguments: argparse.Namespace, draw: random.Random) -> int:
    """Return the year or the part of a point."""
    if arguments.parts:
        return draw.randint(1, arguments.parts)
    return max(arguments.first, int(point["uid"][1:5]))


def write(folder: Path, splits: dict[str, list[Point]], labels: dict[str, str], names: Sequence[str]) -> None:
    """Write points by split, and labels if any, as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, points in splits.items():
        rows = (
            {
                "key": point["uid"],
                "text": text_of(point),
                "labels": [names[label] for label in point["target_ind"]],
            }
            for point in points
        )
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if labels:
        rows = ({"key": key, "text": text} for key, text in labels.items())
        (folder / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(file: Path) -> list[Point]:
    """Read the JSON objects of a compressed file, one per line."""
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
