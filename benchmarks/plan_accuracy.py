"""`extremis plan` against a real run: bytes of every table within 20 %, seconds of every step within 2 times.

python -m benchmarks.plan_accuracy [--quick]
"""

import argparse
import gzip
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.common.report import report
from extremis.planning.plan import plan, workload
from pipelines.mine import mine
from pipelines.options import MineOptions
from pipelines.shard import ShardOptions, shard
from trainer.config import Recipe, load_recipe
from trainer.loop import Trainer

TATE = Path(__file__).parents[1] / "examples" / "tate"
ROWS = {False: 40_000, True: 5_000}
RECIPE = (
    "encoder.dimension=64",
    "encoder.buckets=65536",
    "encoder.hidden=0",
    "train.epochs=4",
    "refresh.start=3",
    "logging.tensorboard=false",
    "checkpoint.every_epochs=0",
    "encoder.lr=0.1",
    "negatives.hard=40",
    "refresh.every=3",
)
ONE = ("--direct_num_workers=1", "--direct_running_mode=in_memory")


def main() -> None:
    """Run everything once, plan it, and print the ratios."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    recipe = load_recipe("astra", RECIPE)
    with tempfile.TemporaryDirectory() as folder:
        measured, seconds = _run(Path(folder), ROWS[quick], recipe)
        data = f"{folder}/data"
        averages: dict[str, Any] = {"ranks": 1, "workers": 1}
        planned = plan(workload(data, None, None, recipe, "8GiB", averages), data)
    sizes = {name: _apart(planned["tables"][name]["bytes"], size) for name, size in measured.items()}
    times = {name: _apart(planned["seconds"][name], measured_seconds) for name, measured_seconds in seconds.items()}
    report(
        "extremis plan tells bytes within 20 % and time within 2 times",
        {
            "rows": ROWS[quick],
            "bytes": {name: [planned["tables"][name]["bytes"], size] for name, size in measured.items()},
            "seconds": {name: [round(planned["seconds"][name], 2), round(s, 2)] for name, s in seconds.items()},
        },
        {"bytes": max(sizes.values()), **{f"seconds of {name}": ratio for name, ratio in times.items()}},
        {"bytes": "<1.2", **{f"seconds of {name}": "<2" for name in times}},
        ratio="the larger of planned / measured and measured / planned",
    )


def _run(folder: Path, rows: int, recipe: Recipe) -> tuple[dict[str, int], dict[str, float]]:
    """Bytes of each table of a real run, and seconds of each step."""
    raw, data, run = folder / "raw", str(folder / "data"), str(folder / "run")
    raw.mkdir()
    for name, some in (("trn", rows), ("lbl", None)):
        with gzip.open(TATE / f"{name}.json.gz", "rb") as source, gzip.open(raw / f"{name}.json.gz", "wb", 1) as copy:
            copy.writelines(islice(source, some))
    seconds = {"shard": _time(lambda: shard(str(raw), data, ShardOptions(tokenizer="train:8000", text="title"), ONE))}

    def train() -> None:
        trainer = Trainer.start(data, run, recipe, lambda line: None)
        for epoch in trainer.train():
            if epoch.epoch == recipe.table_epochs()[0] - 2:
                trainer.parts.saver.writer.wait()  # for the dump
                seconds["mine"] = _time(lambda: mine(data, run, options=MineOptions(), beam_options=ONE))

    seconds["train"] = _time(train) - seconds["mine"]
    dump = next(Path(run, "dumps").iterdir())
    places = {
        "queries": Path(data, "queries", "train"),
        "labels": Path(data, "labels"),
        **{f"embeddings of {name}": dump / name for name in ("queries", "labels")},
        "vectors": dump / "vectors",
        **{f"negatives of {n}": next(Path(run, "negatives").iterdir()) / n for n in ("queries", "labels")},
        "checkpoint": max(Path(run, "checkpoints").iterdir()),
    }
    kinds = (".parquet", ".safetensors")
    sizes = {
        name: sum(path.stat().st_size for path in place.rglob("*") if path.suffix in kinds)
        for name, place in places.items()
    }
    return sizes, seconds


def _time(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _apart(planned: float, measured: float) -> float:
    return max(planned / measured, measured / planned)


if __name__ == "__main__":
    main()
