"""Seconds of each step, measured on this machine with small made-up data."""

import gzip
import json
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from extremis.planning.sizes import Sizes
from extremis.planning.workload import Workload
from pipelines.options import MineOptions
from pipelines.shard import ShardOptions, shard
from schemas.storage import join
from search import index
from search.block import Block, search
from search.factory import Factory
from trainer.config import Recipe
from trainer.loop import Trainer

_FEW, _MANY = 2_000, 12_000  # rows; their difference leaves start-up out
_BLOCK_ROWS, _BLOCK_QUERIES = 1 << 15, 1 << 12
_WARM_UP_STEPS = 3
_WORDS = 3_000
_ONE_PROCESS = ("--direct_num_workers=1", "--direct_running_mode=in_memory")


@dataclass(frozen=True)
class Rates:
    """Rates of this machine, for one worker or rank."""

    shard_rows_per_second: float
    mine_seconds: float  # of one refresh
    train_steps_per_second: float

    def seconds(self, workload: Workload) -> dict[str, float]:
        """Estimate the seconds of each step, divided evenly over W workers and G ranks."""
        rows = workload.queries + workload.labels
        return {
            "shard": rows / self.shard_rows_per_second / workload.workers,
            "mine": self.mine_seconds * workload.dumps / workload.workers,
            "train": workload.steps / self.train_steps_per_second / workload.ranks,
        }


def calibrate(workload: Workload, sizes: Sizes) -> Rates:
    """Shard, search and train for some seconds each. Raises ExtremisError."""
    with tempfile.TemporaryDirectory(prefix="extremis-plan-") as folder:
        few, many = (_shard(workload, Path(folder), rows) for rows in (_FEW, _MANY))
        rate = (_MANY - _FEW) / max(many - few, 1e-3)
        steps = train_rate(str(Path(folder) / f"data-{_MANY}"), join(folder, "run"), workload.recipe)
    return Rates(rate, mine_seconds(workload, sizes), steps)


def mine_seconds(workload: Workload, sizes: Sizes) -> float:
    """Measure one refresh on a small block of the planned index, and scale by mining's own estimate of cost."""
    blocks = sizes.blocks
    if blocks is None:
        return 0.0
    planned = max(stop - start for start, stop in blocks.bounds)
    rows = min(planned, _BLOCK_ROWS)
    share = (rows / planned) ** 0.5
    smaller = re.sub(r"\d+", lambda number: str(max(1, int(int(number[0]) * share))), blocks.factory.spec, count=1)
    factory = blocks.factory if blocks.factory.exact else Factory(smaller)
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((rows, workload.columns)).astype(np.float32)
    queries = draw.standard_normal((_BLOCK_QUERIES, workload.columns)).astype(np.float32)
    width = workload.recipe.negatives.table_width
    index.set_up(MineOptions().threads)
    start = time.perf_counter()
    block = Block(0, vectors, index.build(factory, vectors, 0))
    for first in range(0, _BLOCK_QUERIES, blocks.batch):
        search(block, queries[first : first + blocks.batch], width)
    seconds = time.perf_counter() - start
    count = len(blocks.bounds)
    work = _work(blocks.factory, planned, count, workload.rows, width)
    return seconds * work / _work(factory, rows, 1, _BLOCK_QUERIES, width)


def _work(factory: Factory, rows: int, blocks: int, queries: int, width: int) -> float:
    """Estimate the cost of building and searching as the choice of an index does; of a graph, queries × labels."""
    if not factory.exact and not factory.lists:
        return float(blocks * rows) * queries
    fixed = factory.cost(rows, 0, queries, width, None)  # what speaks against an index, and takes no time
    return factory.cost(rows, blocks, queries, width, None) - fixed


def train_rate(data: str, run: str, recipe: Recipe) -> float:
    """Measure steps per second of one epoch, without the first steps. A step's cost does not depend on L."""
    once = recipe.model_copy(
        update={
            "train": recipe.train.model_copy(update={"epochs": 1}),
            "logging": recipe.logging.model_copy(update={"tensorboard": False, "wandb": "", "mlflow": ""}),
            "validation": recipe.validation.model_copy(update={"split": ""}),
        }
    )
    trainer = Trainer.start(data, run, once, lambda line: None)
    moments: list[float] = []
    for _ in trainer.train(lambda step, total, loss: moments.append(time.perf_counter())):
        pass
    seconds = np.diff(moments[_WARM_UP_STEPS:])
    return float(1 / np.median(seconds)) if len(seconds) else float("inf")


def _shard(workload: Workload, folder: Path, rows: int) -> float:
    """Measure the seconds of sharding `rows` made-up points, beside a quarter as many labels."""
    raw = folder / f"raw-{rows}"
    raw.mkdir()
    labels = max(1, rows // 4)
    draw = np.random.default_rng(0)
    points = [
        {
            "uid": f"{number:0{max(8, round(workload.key_bytes))}d}",
            "title": _text(draw, workload.tokens),
            "target_ind": draw.integers(0, labels, max(1, round(workload.labels_per_query))).tolist(),
        }
        for number in range(rows)
    ]
    names = [{"uid": f"L{number}", "title": _text(draw, workload.label_tokens)} for number in range(labels)]
    for name, lines in (("trn", points), ("lbl", names)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (raw / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), 1))
    start = time.perf_counter()
    shard(str(raw), str(folder / f"data-{rows}"), ShardOptions(tokenizer="train:4000", text="title"), _ONE_PROCESS)
    return (time.perf_counter() - start) * rows / (rows + labels)


def _text(draw: np.random.Generator, tokens: float) -> str:
    """Make about `tokens` words of a small vocabulary."""
    ranks = np.exp(draw.random(max(1, draw.poisson(tokens))) * np.log(_WORDS)).astype(int)
    return " ".join(np.base_repr(int(rank) * 7919 % 99_991, 36).lower() for rank in ranks)
