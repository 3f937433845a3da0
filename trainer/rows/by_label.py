"""Pairs of queries and labels in the order of their labels, on the device that scores them.

No value is read back: as many operations for any values, and arrays as long as the pairs are many.
"""

from typing import Any, NamedTuple

import torch

from schemas import PAD
from trainer.rows.reference import DevicePairs
from trainer.stream.batch import DrawnLabels
from trainer.stream.transfer import send


class PairsByQuery(NamedTuple):
    """Pairs [n], ascending by query: `label` is a number among C, `positive` is bool, `weight` counts the pair."""

    query: Any
    label: Any
    positive: Any
    weight: Any


def order_pairs(pairs: PairsByQuery, queries: int, labels: int) -> DevicePairs:
    """Return `pairs`, tensors on a device, of B = `queries` and C = `labels` in both orders."""
    ordered, order = torch.sort(pairs.label, stable=True)
    return DevicePairs(
        query=pairs.query,
        label=pairs.label,
        weight=torch.where(pairs.positive, -pairs.weight, pairs.weight),
        query_starts=_starts(pairs.query, queries),
        order=order.to(torch.int32),
        label_starts=_starts(ordered, labels),
    )


def merge_labels(drawn: Any, hard: torch.Tensor | None = None) -> tuple[torch.Tensor, DevicePairs]:
    """Return the labels of `drawn`, a sent DrawnLabels, each once, and their pairs: ids [n] int64, pads behind them.

    `hard`: what `drawn` is still to get. As `merge.merge`, but that what a query draws twice is two pairs, and that
    pads, and what it draws though it has it otherwise, are pairs of weight 0.
    """
    none = torch.iinfo(drawn.label.dtype).max  # a pad is ordered behind all labels
    label = drawn.label if hard is None else _with_hard(drawn, torch.where(hard < 0, none, hard))
    count = len(label)
    number = torch.arange(count, device=label.device, dtype=torch.int32)
    query = torch.searchsorted(drawn.starts, number, right=True, out_int32=True) - 1
    ordered, order = torch.sort(label, stable=True)
    new_label, new_query = _changes(ordered), _changes(query[order])
    # Of a query's pairs with one label those that are no draws come first.
    first = torch.where(new_label | new_query, number, 0).cummax(0).values
    draw = drawn.draw[order]
    again = torch.empty_like(draw).scatter_(0, order, draw & ~draw[first])
    weight = torch.where(drawn.positive, -drawn.weight, drawn.weight).masked_fill(again | (label == none), 0)
    place = new_label.cumsum(0, dtype=torch.int32) - 1
    slot = torch.where(new_label, place, count).long()  # the last one takes what begins no label
    starts = number.new_full((count + 1,), count).scatter_(0, slot, torch.where(new_label, number, count))
    ids = slot.new_full((count + 1,), PAD).scatter_(0, slot, torch.where(ordered == none, PAD, ordered).long())
    places = torch.empty_like(place).scatter_(0, order, place)
    return ids[:count], DevicePairs(query, places, weight, drawn.starts, order.to(torch.int32), starts)


def send_labels(device: torch.device, drawn: DrawnLabels) -> torch.Tensor:
    """Return the labels of `drawn` on `device`, as often as they come, int64; the greatest in place of pads."""
    labels = send(drawn.label, device).long()
    if drawn.hard is not None:
        labels = torch.cat([labels, drawn.hard.flatten()])
    return torch.where(labels < 0, labels.amax(), labels) if len(labels) else labels


def _with_hard(drawn: Any, hard: torch.Tensor) -> torch.Tensor:
    """Return the labels of `drawn` with hard negatives [B, H] in their places."""
    places = drawn.hard_starts[:, None] + torch.arange(hard.shape[1], device=hard.device)
    label: torch.Tensor = drawn.label.scatter(0, places.flatten(), hard.flatten().to(drawn.label.dtype))
    return label


def _starts(ordered: torch.Tensor, count: int) -> torch.Tensor:
    """Return where each of [0, `count`] begins in `ordered` [n], int32 [count + 1]."""
    numbers = torch.arange(count + 1, device=ordered.device, dtype=ordered.dtype)
    return torch.searchsorted(ordered, numbers, out_int32=True)


def _changes(values: torch.Tensor) -> torch.Tensor:
    """Tell of each of [n] whether it is another than the one before; the first is."""
    changes = torch.ones(len(values), dtype=torch.bool, device=values.device)
    torch.ne(values[1:], values[:-1], out=changes[1:])
    return changes
