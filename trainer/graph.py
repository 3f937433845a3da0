"""A step of one rank as a CUDA graph: one launch instead of about a hundred.

The graph reads varying inputs from fixed memory: the batch, the factor on learning rates, and the random key. Batches
are padded to a few sizes, which does not change results. A step copies no values to the host, and takes the same
branches whatever the values are.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from schemas.errors import ExtremisError
from trainer.device import CPU
from trainer.heads.classifier import merges_on
from trainer.heads.queries import QueryEmbeddings
from trainer.methods.recipe import Recipe
from trainer.model import Model
from trainer.negatives.base import NegativeSources
from trainer.negatives.planner import GlobalBatch
from trainer.step import StepContext, StepHook, StepResult, take_step
from trainer.stream.batch import Batch, Candidates
from trainer.stream.transfer import map_arrays, send

T = TypeVar("T")
TakeStep = Callable[..., StepResult]  # like `take_step`, for one context
_MAX_GRAPHS = 32  # maximum number of graphs: batches of further sizes run without a graph


class _Layout(NamedTuple):
    """Memory layout of the tensors in a value: the size of each block of memory, and the position of each tensor."""

    pieces: tuple[int, ...]
    tensors: tuple[tuple[Any, ...], ...]


class _Recorded(NamedTuple):
    pieces: list[torch.Tensor]  # bytes that `replay` reads
    replay: Callable[[], Any]


class Graphs:
    """Runs functions of tensors on `device` as graphs; a graph is recorded when a memory layout occurs a second time.

    The first call with a layout runs without a graph: it compiles and loads kernels, and creates the optimizers' state.
    On a device that cannot record, the function is called with copies of the tensors, as in a graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._recorded: dict[_Layout, _Recorded | None] = {}
        self._pool: Any = None

    def __call__(self, function: Callable[[T], Any], inputs: T) -> Any:
        """Return the tensors of `function(inputs)`, which the caller owns. Raises ExtremisError if recording fails."""
        layout, pieces = self._layout(inputs)
        if layout not in self._recorded:
            if len(self._recorded) < _MAX_GRAPHS:
                self._recorded[layout] = None
            return function(inputs)
        recorded = self._recorded[layout] or self._record(function, inputs, layout)
        for piece, new in zip(recorded.pieces, pieces, strict=True):
            piece.copy_(new)
        return map_arrays(recorded.replay(), torch.clone, (torch.Tensor,))

    def _layout(self, inputs: Any) -> tuple[_Layout, list[torch.Tensor]]:
        """Return the layout of `inputs`, and its blocks of memory as bytes."""
        numbers: dict[int, int] = {}
        pieces: list[torch.Tensor] = []
        places: list[tuple[Any, ...]] = []

        def visit(tensor: torch.Tensor) -> torch.Tensor:
            memory = tensor.untyped_storage()
            if memory._cdata not in numbers:
                numbers[memory._cdata] = len(pieces)
                pieces.append(torch.empty(0, dtype=torch.uint8, device=self._device).set_(memory))  # type: ignore[call-overload]
            place = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            places.append((numbers[memory._cdata], *place))
            return tensor

        map_arrays(inputs, visit, (torch.Tensor,))
        return _Layout(tuple(map(len, pieces)), tuple(places)), pieces

    def _record(self, function: Callable[[T], Any], inputs: T, layout: _Layout) -> _Recorded:
        pieces = [torch.zeros(size, dtype=torch.uint8, device=self._device) for size in layout.pieces]
        places = iter(layout.tensors)

        def place_copy(tensor: torch.Tensor) -> torch.Tensor:
            piece, dtype, *place = next(places)
            memory = pieces[piece].untyped_storage()
            return torch.empty(0, dtype=dtype, device=self._device).set_(memory, *place)

        copies = map_arrays(inputs, place_copy, (torch.Tensor,))
        replay = self._graph(function, copies) if self._device.type == "cuda" else partial(function, copies)
        self._recorded[layout] = recorded = _Recorded(pieces, replay)
        return recorded

    def _graph(self, function: Callable[[T], Any], copies: T) -> Callable[[], Any]:
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()  # except for the results, nothing survives a replay
        try:
            # Other threads continue to send batches.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = function(copies)
        except RuntimeError as error:
            raise ExtremisError(
                f"a step cannot be recorded as a CUDA graph: {str(error).splitlines()[0]}. Continue with "
                "train.graph = false and --resume."
            ) from error

        def replay() -> Any:
            graph.replay()
            return results

        return replay


class _StepInputs(NamedTuple):
    """The batch and the scalars [] of a step, on the device."""

    prepared: Any
    drawn: Any
    factor: torch.Tensor  # float64, for the rates
    key: torch.Tensor  # int64, for random bits


@dataclass(frozen=True)
class GraphStep:
    """Runs `take_step` on a single rank as a graph, for batches that are planned and prepared on the device.

    A step runs without a graph if it has a hook, or if `is_watched`, because a listener must see rows before the rows
    change.
    """

    context: StepContext
    graphs: Graphs
    is_watched: Callable[[], bool] = lambda: False

    def __call__(
        self, batch: Batch | GlobalBatch, number: int, factor: float, hook: StepHook | None = None
    ) -> StepResult:
        """Do the same as `take_step`. Raises ExtremisError if recording fails."""
        gathered, model = batch if isinstance(batch, Batch) else batch.gathered, self.context.model
        if hook is not None or self.is_watched():
            return take_step(self.context, gathered, number, factor, hook)
        assert gathered.candidates is not None
        numbers = send((np.array(factor), np.array(model.head.key(number))), model.device)
        inputs = _StepInputs(gathered.prepared, gathered.candidates.drawn, *numbers)
        loss, x = self.graphs(partial(self._take, gathered), inputs)
        self.context.clock.lap("graph")
        return StepResult(gathered.step, loss, gathered.rows, x)

    def _take(self, batch: Batch, inputs: _StepInputs) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch.candidates is not None
        batch = replace(batch, prepared=inputs.prepared, candidates=batch.candidates._replace(drawn=inputs.drawn))
        result = take_step(self.context, batch, inputs.key, inputs.factor)
        return result.loss, result.x


def graph_obstacle(recipe: Recipe, model: Model, queries: QueryEmbeddings, sources: NegativeSources, ranks: int) -> str:
    """Return the reason why a run's steps cannot be recorded as graphs, or "" if they can be recorded."""
    reasons = {
        "the run uses a CPU": model.device == CPU,
        "several ranks wait for each other within a step": ranks > 1,
        "batches for this encoder cannot be padded (only batches for a bag encoder can)": not model.encoder.can_pad,
        "queries are encoded in parts, or the encoder is frozen": queries.preparing() is None,
        "recording requires binary cross-entropy, own pools, and vectors on the device": not (
            recipe.keeps_negatives_on_device and merges_on(model.device, recipe)
        ),
        "hard negatives are found within a step": bool(sources),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def plan_for_device(
    plan: Callable[[Batch], Candidates | None], device: torch.device, pads: bool, batch: Batch
) -> Candidates | None:
    """Plan a batch, and send the labels to `device` for merging; `pads`: pad the labels. Any thread may call this."""
    candidates = plan(batch)
    if candidates is None or candidates.drawn is None:
        return candidates
    drawn = candidates.drawn.padded() if pads else candidates.drawn
    return candidates._replace(drawn=send(drawn, device))
