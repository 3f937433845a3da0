"""A profile of one step: launches, the slowest kernels, separate host and device time, and a trace."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.bench import Bench, Measurement
from benchmarks.gpu.classifier_step import SHAPES, SIZES, Shape, open_step
from benchmarks.gpu.models import BAG, open_model, open_steps
from benchmarks.gpu.profiles import profiled
from benchmarks.gpu.whole_step import WIDEST


def measurements(bench: Bench) -> Iterator[Measurement]:
    labels = 2048 if bench.quick else SIZES["1.3M"]
    shape = Shape(*((16, 8) if bench.quick else SHAPES[0]), labels)
    yield Measurement("classifier", lambda: _profile(bench, "classifier", open_step(bench, shape, "own")[0]), 1)
    yield Measurement(BAG, partial(_whole, bench, BAG, labels), 1)
    yield Measurement(WIDEST, partial(_whole, bench, WIDEST, labels), 8, on_cpu=False)


def _whole(bench: Bench, encoder: str, labels: int) -> dict[str, Any]:
    return _profile(bench, encoder, open_steps(bench, open_model(bench, encoder, labels), labels))


def _profile(bench: Bench, name: str, step: Callable[[], object]) -> dict[str, Any]:
    return profiled(bench, step, f"trace-{name.replace(' ', '')}.json.gz")
