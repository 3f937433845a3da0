"""Steps of a classifier by the kernels for a GPU beside those of plain PyTorch; run as a program, in the interpreter.

    TRITON_INTERPRET=1 python -m tests.trainer.rows.kernel_cases [NAME…]

prints the greatest differences of every case, or of those named, one JSON object. On a GPU the same cases run without
the interpreter.
"""

import json
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from schemas import PAD
from tests.builders import batch_of
from trainer.device import send
from trainer.negatives.planner import add_margins, own_pool, shared_pool, unmerged_candidates
from trainer.rows import torch_kernels
from trainer.rows.matrix import DTYPES, RowMatrix, RowOptimizer
from trainer.rows.torch_kernels import DevicePairs, merge_labels, order_pairs
from trainer.stream.batch import NO_MARGINS, Candidates

OPTIMIZERS = {
    "sgd": RowOptimizer("sgd"),
    "momentum": RowOptimizer("sgd", momentum=0.9),
    "adagrad": RowOptimizer("adagrad", weight_decay=0.1),
    "adam": RowOptimizer("adam", weight_decay=0.1),
}
LABELS, STEPS = 1009, 2
WIDTHS = (64, 65, 96, 128, 256, 512, 768)  # where a row is within a warp, over several, beside a power of two
POOL = 7  # labels of a shared pool that get a gradient of their own
LR, SCALE = 0.05, 0.25


@dataclass(frozen=True)
class Case:
    """Vectors of `dtype` and width D, an optimizer, and how candidates are drawn."""

    dtype: str
    optimizer: str
    dimension: int
    pool: str

    @property
    def queries(self) -> int:
        """B: of a hot label as many pairs that there are spans of them, within others and at the end."""
        return 5 if self.pool != "hot" else 3 * triton_spans() + 7

    @property
    def name(self) -> str:
        return f"{self.dtype}-{self.optimizer}-{self.dimension}-{self.pool}"

    def candidates(self, step: int) -> Candidates:
        """Labels that many queries share, pads, draws that repeat, and a query without any pair."""
        draw = np.random.default_rng((self.dimension, step))
        queries = self.queries
        positives = [sorted(draw.choice(9, size=draw.integers(1, 4), replace=False).tolist()) for _ in range(queries)]
        if self.pool == "hot":
            positives = [sorted({*some, 4, 9}) for some in positives]
        hard = draw.integers(20, 30, (queries, 2))
        hard[draw.random(hard.shape) < 0.5] = PAD
        hard[-1], positives[-1] = PAD, []
        batch, margins = batch_of(positives, hard), (0.5, 2.0) if step else NO_MARGINS
        if self.pool == "shared":
            return add_margins(shared_pool(batch, hard, draw.integers(0, LABELS, 11), 3.5), batch, hard, margins)
        pool = draw.integers(0, LABELS, (queries, 5))
        pool[:, :3] = draw.integers(0, 12, (queries, 3))
        pool[-1] = PAD
        if self.pool in ("own", "hot"):
            return add_margins(own_pool(batch, hard, pool, 3.5), batch, hard, margins)
        hard_labels = torch.from_numpy(hard) if self.pool == "late" else hard
        return add_margins(unmerged_candidates(batch, hard_labels, pool, 3.5), batch, None, margins)

    def pairs(self, step: int, device: torch.device) -> tuple[torch.Tensor, DevicePairs]:
        """Return ids and pairs on the device: of drawn labels with padding behind them, and as late ones."""
        candidates = self.candidates(step)
        drawn = candidates.drawn
        if drawn is not None:
            hard = None if drawn.hard is None else drawn.hard.to(device)
            return merge_labels(send(replace(drawn, hard=None), device), hard)
        sent = send(candidates, device)
        return sent.ids, order_pairs(sent, self.queries, len(sent.ids))

    def matrix(self, device: torch.device) -> RowMatrix:
        rows = torch.randn(LABELS, self.dimension, generator=torch.Generator().manual_seed(1)) * 0.3
        matrix = RowMatrix(rows.to(DTYPES[self.dtype]), OPTIMIZERS[self.optimizer], first=5_000_000_000, seed=9)
        matrix.move(device)
        return matrix

    def _differentiate_pool(self, operations: Any, device: torch.device) -> list[torch.Tensor]:
        """Return loss and slopes of a pool with scores that do not count; and whether narrow slopes are those."""
        draw = torch.Generator().manual_seed(2)
        scores, weight = 30 * torch.randn(11, 777, generator=draw), torch.rand(777, generator=draw)
        scores[3, 5:70] = -torch.inf
        loss, slopes = operations.differentiate_pool(scores.to(device, copy=True), weight.to(device))
        _, narrow = operations.differentiate_pool(scores.to(device, copy=True), weight.to(device), torch.bfloat16)
        assert narrow.dtype == torch.bfloat16
        return [loss.float(), slopes, ((narrow.float() - slopes).abs() > 2**-7 * slopes.abs() + 1e-30).float()]

    def run(self, operations: Any, device: torch.device) -> list[torch.Tensor]:
        """Take STEPS steps by the module `operations`: losses, slopes, gradients, and what is left in the end."""
        matrix, results = self.matrix(device), []
        for step in range(STEPS):
            x = torch.randn(self.queries, self.dimension, generator=torch.Generator().manual_seed(step)).to(device)
            ids, pairs = self.pairs(step, device)
            on_pool = torch.zeros(POOL if self.pool == "shared" else 0, self.dimension, device=device) + 0.01
            rule = matrix.rule(LR, step)
            loss, slopes, on_x = operations.score_pairs(x, matrix.device_matrix(), ids, pairs, SCALE)
            operations.update_rows(matrix.device_matrix(), rule, ids, on_pool, (pairs, slopes, x))
            # The same without pairs, as a step of another loss has it.
            operations.update_rows(matrix.device_matrix(), rule, ids[:9], torch.full_like(x[:1], 0.1).repeat(9, 1))
            results += [loss, slopes, on_x]
            if self.pool == "shared":
                results += self._differentiate_pool(operations, device)
        return [*results, *matrix.state.values(), matrix.weight.float()]


CASES = [
    *(Case(dtype, optimizer, 13, "own") for dtype in DTYPES for optimizer in OPTIMIZERS),
    *(Case(dtype, "adagrad", dimension, "own") for dtype in DTYPES for dimension in (1, 64, 65)),
    *(Case(dtype, "sgd", 96, "shared") for dtype in DTYPES),
    *(Case("bfloat16", optimizer, 64, pool) for optimizer in OPTIMIZERS for pool in ("drawn", "late")),
    *(Case("bfloat16", optimizer, width, "drawn") for width in WIDTHS[1:] for optimizer in ("sgd", "adagrad", "adam")),
    *(Case("float32", "adagrad", dimension, "hot") for dimension in (1, 64, 768)),
    Case("bfloat16", "adagrad", 769, "own"),
]


def triton_spans() -> int:
    """Return how many pairs of one label are summed ahead."""
    from trainer.rows.triton_kernels import _SPAN

    return _SPAN


def differences(case: Case, device: torch.device) -> list[float]:
    """Return how far the kernels are from the reference, as shares of the greatest value: each step's, state, rows."""
    from trainer.rows import triton_kernels

    expected, got = case.run(torch_kernels, device), case.run(triton_kernels, device)
    return [float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in zip(got, expected, strict=True)]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                case.name: differences(case, torch.device("cpu"))
                for case in CASES
                if not sys.argv[1:] or case.name in sys.argv[1:]
            }
        )
    )
