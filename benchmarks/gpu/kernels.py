"""Checks of every kernel against plain PyTorch on a CPU, and against repeated runs, which must give the same bits.

In addition to the cases of the tests: a label of all 4,096 queries, and rows that begin beyond 2^31 elements of the
matrix. A CPU interprets the kernels, and repeats each kernel once.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench, Measurement, SkippedError, require
from schemas import PAD
from tests.builders import batch_of
from tests.trainer.rows.kernel_cases import CASES, LABELS, LR, SCALE, Case
from trainer.device import CPU, send
from trainer.negatives.planner import own_pool
from trainer.rows import torch_kernels
from trainer.rows.torch_kernels import DevicePairs, order_pairs

REPEATS = 50
FAR = 2**31  # elements before the rows, too many for 32 bits
HOT_QUERIES = 4096
PROBE = Case("float32", "sgd", 1, "own")
_OFF, _OFF_ROUNDED = 1e-4, {"float32": 1e-4, "bfloat16": 2**-7, "float16": 2**-10}


def measurements(bench: Bench) -> Iterator[Measurement]:
    for case in (CASES[0], CASES[-1]) if bench.quick else CASES:
        yield Measurement(case.name, functools.partial(_compare, bench, case))
    hot = Case("bfloat16", "adagrad", 64, "own")
    yield Measurement("a hot label", functools.partial(_hot, bench, hot), on_cpu=False)
    far = _Far("bfloat16", "adam", 64, "own", FAR // 64 if not bench.quick else 1000)
    yield Measurement("beyond 2^31 elements", functools.partial(_far, bench, far), gib=45, on_cpu=False)


@dataclass(frozen=True)
class _Far(Case):
    """The same labels in the last rows of a matrix, after `before` other rows."""

    before: int

    def pairs(self, step: int, device: torch.device) -> tuple[torch.Tensor, DevicePairs]:
        ids, pairs = super().pairs(step, device)
        return torch.where(ids == PAD, ids, ids + self.before), pairs

    def matrix(self, device: torch.device) -> Any:
        matrix = super().matrix(device)
        for name, part in {"weight": matrix.weight, **matrix.state}.items():
            whole = part.new_zeros(self.before + len(part), *part.shape[1:])
            whole[self.before :] = part
            if name == "weight":
                matrix.weight = whole
            else:
                matrix.state[name] = whole
        matrix._first -= self.before  # so that labels and random rounding are the same as with the small matrix
        return matrix


@functools.cache
def _kernels(bench: Bench) -> Any:
    try:
        import triton
        from triton.runtime.errors import InterpreterError

        from trainer.rows import triton_kernels
    except ImportError as error:
        require(not bench.on_gpu, f"Triton cannot be loaded, so no kernel was run: {error}")
        raise SkippedError("Triton is not installed, so the kernels were not interpreted") from error
    if not bench.on_gpu:
        try:
            PROBE.run(triton_kernels, bench.device)
        except InterpreterError as error:
            if isinstance(error.__cause__, TypeError) and "0-dimensional" in str(error):
                versions = f"Triton {triton.__version__} and NumPy {np.__version__}"
                raise SkippedError(f"the interpreter's loops do not run with {versions}: {error}") from error
            raise
    return triton_kernels


def _compare(bench: Bench, case: Case) -> dict[str, Any]:
    kernels = _kernels(bench)
    got = case.run(kernels, bench.device)
    figures = _difference(case.run(torch_kernels, CPU), got, case.dtype)
    for _ in range(REPEATS if bench.on_gpu else 1):
        _require_same(case.run(kernels, bench.device), got)
    return figures


def _hot(bench: Bench, case: Case) -> dict[str, Any]:
    kernels, queries = _kernels(bench), 32 if bench.quick else HOT_QUERIES
    expected = _hot_step(case, queries, torch_kernels, CPU)
    got, again = (_hot_step(case, queries, kernels, bench.device) for _ in range(2))
    _require_same(again, got)
    return _difference(expected, got, case.dtype)


def _hot_step(case: Case, queries: int, operations: Any, device: torch.device) -> list[torch.Tensor]:
    """Take a step in which each query has label 0 and separate other labels."""
    draw = np.random.default_rng(0)
    batch = batch_of([[0, 1 + int(draw.integers(LABELS - 1))] for _ in range(queries)])
    none = np.full((queries, 1), PAD)
    candidates = own_pool(batch, none, draw.integers(0, LABELS, (queries, 8)), 3.5)
    sent, matrix = send(candidates, device), case.matrix(device)
    pairs = order_pairs(sent, queries, len(sent.ids))
    x = torch.randn(queries, case.dimension, generator=torch.Generator().manual_seed(0)).to(device)
    loss, slopes, on_x = operations.score_pairs(x, matrix.device_matrix(), sent.ids, pairs, SCALE)
    operations.update_rows(matrix.device_matrix(), matrix.rule(LR, 0), sent.ids, x[:0], (pairs, slopes, x))
    return [loss, slopes, on_x, *matrix.state.values(), matrix.weight.float()]


def _far(bench: Bench, case: _Far) -> dict[str, Any]:
    """Check that steps on far rows equal steps on near rows to the bit, and touch no other row."""
    kernels = _kernels(bench)
    near = Case(case.dtype, case.optimizer, case.dimension, case.pool).run(kernels, bench.device)
    far = case.run(kernels, bench.device)
    _require_same([each[-LABELS:] if len(each) > case.before else each for each in far], near)
    touched = far[-1][: case.before].count_nonzero().item()
    require(touched == 0, f"{touched} numbers before the rows were changed")
    return {"elements": case.before * case.dimension, "same": True}


def _difference(expected: list[torch.Tensor], got: list[torch.Tensor], dtype: str) -> dict[str, Any]:
    """Return the differences of results from the reference, as shares of the reference's greatest value."""
    *others, rows = (
        float((a.cpu() - b).abs().max() / b.abs().max().clamp(min=1e-9)) for a, b in zip(got, expected, strict=True)
    )
    figures = {"off": max(others), "rows_off": rows}
    require(figures["off"] < _OFF and rows < _OFF_ROUNDED[dtype], f"not the reference's results: {figures}")
    return figures


def _require_same(again: list[torch.Tensor], first: list[torch.Tensor]) -> None:
    changed = sum(not torch.equal(a, b) for a, b in zip(again, first, strict=True))
    require(not changed, f"{changed} of {len(first)} results differ in their bits from those of the same steps before")
