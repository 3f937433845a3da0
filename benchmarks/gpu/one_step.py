"""A profile of one step: launches, the slowest kernels, separate host and device time, and a trace."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.gpu.classifier_step import SHAPES, SIZES, Shape, open_step
from benchmarks.gpu.models import BAG, open_model, open_steps
from benchmarks.gpu.place import Measurement, Place
from benchmarks.gpu.profiles import profiled
from benchmarks.gpu.whole_step import WIDEST


def measurements(place: Place) -> Iterator[Measurement]:
    labels = 2048 if place.quick else SIZES["1.3M"]
    shape = Shape(*((16, 8) if place.quick else SHAPES[0]), labels)
    yield Measurement("classifier", lambda: _profile(place, "classifier", open_step(place, shape, "own")[0]), 1)
    yield Measurement(BAG, partial(_whole, place, BAG, labels), 1)
    yield Measurement(f"{BAG}, recorded", partial(_whole, place, BAG, labels, recorded=True), 1, on_cpu=False)
    yield Measurement(WIDEST, partial(_whole, place, WIDEST, labels), 8, on_cpu=False)


def _whole(place: Place, encoder: str, labels: int, recorded: bool = False) -> dict[str, Any]:
    steps = open_steps(place, open_model(place, encoder, labels), labels, recorded=recorded)
    return profiled(place, steps) if recorded else _profile(place, encoder, steps)  # a trace of graphs shows little


def _profile(place: Place, name: str, step: Callable[[], object]) -> dict[str, Any]:
    return profiled(place, step, f"trace-{name.replace(' ', '')}.json.gz")
