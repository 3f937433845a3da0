"""One optimizer step of all ranks: encode the parts, score the whole batch against each rank's labels, update.

The encoder is data-parallel: a rank encodes its part of the batch, and x of all parts goes to every rank. The
classifier is model-parallel: a rank scores the global batch against the candidates of its own labels and updates their
vectors. What the labels of each rank say about x is summed over ranks and goes back through the encoder. One rank does
the same with nobody to tell.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from trainer.checkpoints.writer import CheckpointWriter
from trainer.config import Train
from trainer.encoders.frozen import FrozenEmbeddings
from trainer.group import Group
from trainer.heads.gradient_cache import CachedEmbeddings
from trainer.heads.label_encoder import LabelEncoderHead
from trainer.model import Model
from trainer.negatives.in_trainer_index import OwnIndex
from trainer.negatives.planner import Find, Planner
from trainer.negatives.sources import Sources
from trainer.stream import Batch

# Sees the global batch, its x [B, D], and what finds hard negatives for it, before anything changes.
Look = Callable[[Batch, torch.Tensor, Find | None], None]


@dataclass
class Clock:
    """Seconds by what they went into."""

    seconds: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now


@dataclass(frozen=True)
class Taken:
    """What `step` of the epoch gave, on every rank: the mean loss of the global batch, its row ids [B] and x [B, D]."""

    step: int
    loss: float
    rows: np.ndarray
    x: torch.Tensor


def take_step(
    model: Model,
    planner: Planner,
    group: Group,
    batch: Batch,
    step: int,
    factor: float,
    clock: Clock,
    writer: CheckpointWriter,
    index: OwnIndex | None = None,
    found: Sources | None = None,
    options: Train | None = None,
    frozen: FrozenEmbeddings | None = None,
    look: Look | None = None,
) -> Taken:
    """Train on the global batch of which `batch` is this rank's part, at global `step`; `factor` scales every rate.

    `writer` hears of rows before they change. Hard negatives are those of `index` where there is one, and what `found`
    finds with the model as it is now. `options`: in how many parts the encoder takes the batch, and how long its
    gradient may be. `frozen` has x where the encoder does not learn. `look` sees what is about to be scored. Raises
    RankLostError; StorageError of a checkpoint being written.
    """
    key = (batch.epoch, batch.step)
    accumulate, clip = (options.accumulate, options.clip) if options else (1, 0.0)
    everyone = planner.gather(batch, group)
    clock.lap("gather")
    if isinstance(model.classifier, LabelEncoderHead):
        embedded = model.classifier.step(batch, planner.drawn(everyone), factor, planner.positive_weight, clip)
        clock.lap("encode")
        return Taken(batch.step, embedded.loss, everyone.rows, embedded.x)
    sizes = group.sizes(len(batch))
    first = sum(sizes[: group.rank])
    cached: CachedEmbeddings | None = None
    if frozen is not None:
        encoded = frozen.of(batch)
    elif accumulate > 1:
        size = -(-len(batch) // accumulate)
        cached = CachedEmbeddings(model.encoder, batch.inputs.slice, len(batch), size, key, first=first)
        encoded = cached.embed()
    else:
        inputs = model.encoder.prepare(batch.inputs, key, group.before)
        clock.lap("prepare")
        encoded = model.encoder.encode(inputs, key)
    x = model.classifier.extend(encoded)
    clock.lap("encode")
    every_x = group.gather(x.detach(), sizes)
    clock.lap("gather")
    if index is not None:
        everyone = index.join(everyone, every_x, model.classifier, group)
        clock.lap("search")
    total, on_x = 0.0, torch.zeros_like(every_x)
    find = None if found is None else found.finder(batch.epoch, every_x.float().numpy())
    if look is not None:
        look(everyone, every_x, find)
        clock.lap("look")
    for candidates in planner.chunks(everyone, find):
        writer.before_change(candidates.ids)
        loss, grad = model.descend(every_x, candidates, factor, step, 1 / len(everyone), group)
        total += loss
        on_x += grad
        if found is not None:
            found.touch(candidates.ids)
    clock.lap("classify")
    total = group.sum(torch.tensor(total, dtype=torch.float64)).item()
    if frozen is not None:
        return Taken(batch.step, total, everyone.rows, every_x)
    grad = group.sum(on_x)[first : first + len(batch)]
    clock.lap("gather")
    x.backward(grad)
    if cached is not None:
        assert encoded.grad is not None
        cached.backward(encoded.grad)
    model.encoder.reduce(group)
    model.encoder.update(factor, clip)
    clock.lap("update")
    return Taken(batch.step, total, everyone.rows, every_x)
