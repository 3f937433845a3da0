"""Steps on rows of a matrix on any device, in plain PyTorch: what the kernels for a GPU are held to.

They do what the compiled loops of `kernels.py` do in main memory, with the same random bits for rounding. No value is
read back, so nothing waits for the device.
"""

from typing import NamedTuple

import torch
from torch.nn.functional import softplus

from trainer.rows.kernels import ADAGRAD, MOMENTUM, SGD, Rule
from trainer.rows.lanes import LOWBIAS

_LOW32 = 0xFFFFFFFF
# Of splitmix64 (Steele, Lea and Flood, 2014), in two's complement.
_GOLDEN, _F1, _F2 = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_S1, _S2, _S3 = 30, 27, 31


class DeviceMatrix(NamedTuple):
    """Vectors [R, D] on a device, and their optimizer's state; what it does not keep is None."""

    vectors: torch.Tensor
    first: torch.Tensor | None  # [R, D]
    second: torch.Tensor | None  # [R, D]
    scalar: torch.Tensor | None  # [R]
    origin: int  # the label of row 0


class DevicePairs(NamedTuple):
    """Pairs on a device, ascending by query: those of query q are [query_starts[q], query_starts[q + 1]).

    `label` [n]: the number of the label among C. `order` [n] puts pairs into the order of their labels: those of label
    number i are order[label_starts[i] : label_starts[i + 1]]. Signs of `weight` [n] are as in `kernels.Pairs`. Pads
    are behind the labels; what pairs they have, weigh nothing.
    """

    query: torch.Tensor  # [n] int32
    label: torch.Tensor  # [n] int32
    weight: torch.Tensor  # [n] float32
    query_starts: torch.Tensor  # [B + 1] int32
    order: torch.Tensor  # [n] int32
    label_starts: torch.Tensor  # [C + 1] int32


def score_pairs(
    x: torch.Tensor, matrix: DeviceMatrix, ids: torch.Tensor, pairs: DevicePairs, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return binary cross-entropy of the pairs by query [B], `scale` times its slopes [n], and their gradient on x."""
    query, label = pairs.query.long(), pairs.label.long()
    w = matrix.vectors.index_select(0, ids.index_select(0, label).clamp(min=0)).float()
    score = (w * x.index_select(0, query)).sum(1)
    margin = torch.where(pairs.weight > 0, score, -score)
    loss = x.new_zeros(len(x)).index_add_(0, query, pairs.weight.abs() * softplus(margin))
    slopes = scale * pairs.weight * torch.sigmoid(margin)
    return loss, slopes, torch.zeros_like(x).index_add_(0, query, slopes[:, None] * w)


def update_rows(
    matrix: DeviceMatrix,
    rule: Rule,
    ids: torch.Tensor,
    gradient: torch.Tensor,
    pairs: DevicePairs | None = None,
    slopes: torch.Tensor | None = None,
    x: torch.Tensor | None = None,
) -> None:
    """Make one step on rows `ids` [C], all distinct but for pads, from the `gradient` [R, D] of the first R of them.

    That of `pairs` with `slopes` [n] and x [B, D] comes on top. Pads are behind the others.
    """
    if not len(ids):
        return
    g, real = gradient, ids[:1] >= 0
    if pairs is not None:
        assert slopes is not None
        assert x is not None
        g = x.new_zeros(len(ids), x.shape[1])
        g[: len(gradient)] = gradient
        g.index_add_(0, pairs.label.long(), slopes[:, None] * x.index_select(0, pairs.query.long()))
        # A pad does again what the first row does, so that the same values are written twice.
        g = torch.where((ids < 0)[:, None], g[:1], g)
        ids = torch.where(ids < 0, ids[:1], ids).clamp(min=0)
    places = _Places(ids, real)
    rows = places.read(matrix.vectors)
    w = _descend(matrix, rule, places, rows.float(), g)
    places.write(matrix.vectors, rows, narrow(w, ids + matrix.origin, rule.key, matrix.vectors.dtype))


class _Places(NamedTuple):
    """Rows `ids` [C] of vectors and of their state; nothing is written where they are all pads, not `real` [1]."""

    ids: torch.Tensor
    real: torch.Tensor

    def read(self, state: torch.Tensor) -> torch.Tensor:
        return state.index_select(0, self.ids)

    def write(self, state: torch.Tensor, before: torch.Tensor, after: torch.Tensor) -> None:
        state.index_copy_(0, self.ids, torch.where(self.real, after, before))


def _descend(matrix: DeviceMatrix, rule: Rule, places: _Places, w: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Return rows w [C, D] after a step of the optimizer, whose state is updated."""
    rate, beta1, beta2, eps = (float(number) for number in (rule.rate, rule.beta1, rule.beta2, rule.eps))
    if rule.keep != 1:
        w = w * float(rule.keep)
    if rule.method == SGD:
        return w - rate * g
    if rule.method == MOMENTUM:
        assert matrix.first is not None
        first = places.read(matrix.first)
        moved = beta1 * first + g
        places.write(matrix.first, first, moved)
        return w - rate * moved
    assert matrix.scalar is not None
    if rule.method == ADAGRAD:
        scalar = places.read(matrix.scalar)
        square = scalar + (g * g).sum(1) / g.shape[1]
        places.write(matrix.scalar, scalar, square)
        return w - (rate / (square.sqrt() + eps))[:, None] * g
    assert matrix.first is not None
    assert matrix.second is not None
    before = [places.read(state) for state in (matrix.scalar, matrix.first, matrix.second)]
    count, first, second = before
    count, first = count + 1, first + (1 - beta1) * (g - first)
    second = beta2 * second + (1 - beta2) * g * g
    for state, old, new in zip(
        (matrix.scalar, matrix.first, matrix.second), before, (count, first, second), strict=True
    ):
        places.write(state, old, new)
    short, long = (1 - beta1 ** count.double()).float()[:, None], (1 - beta2 ** count.double()).float()[:, None]
    return w - rate * (first / short) / ((second / long).sqrt() + eps)


def narrow(values: torch.Tensor, labels: torch.Tensor, key: int, dtype: torch.dtype) -> torch.Tensor:
    """Round float32 [C, D] stochastically to `dtype`, by random bits of (key, label, column); float32 stays.

    The bits, and how they round, are those of `kernels.py`.
    """
    if dtype == torch.float32:
        return values
    raw = values.contiguous().view(torch.int32).to(torch.int64) & _LOW32
    noise = _noise(labels, key, values.shape[1])
    bits = _bfloat16(raw, noise) if dtype == torch.bfloat16 else _float16(raw, noise)
    return bits.to(torch.int16).view(dtype)


def _noise(labels: torch.Tensor, key: int, columns: int) -> torch.Tensor:
    """Return 16 random bits for each of [C, columns], as int64."""
    mixed = labels * _GOLDEN + key
    mixed = (mixed ^ _shifted(mixed, _S1)) * _F1
    mixed = (mixed ^ _shifted(mixed, _S2)) * _F2
    mixed = mixed ^ _shifted(mixed, _S3)
    first, stride = mixed & _LOW32, _shifted(mixed, 32) | 1
    half = (columns + 1) // 2
    word = first[:, None] + torch.arange(half, device=labels.device) * stride[:, None] & _LOW32
    for shift, factor in LOWBIAS:
        word = word ^ word >> shift
        word = word if factor is None else word * factor & _LOW32
    return torch.cat([word & 0xFFFF, word[:, : columns - half] >> 16], 1)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """Shift 64 bits right, zeros from the left."""
    return bits >> by & (1 << 64 - by) - 1


def _bfloat16(raw: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return (raw + noise & _LOW32) >> 16


def _float16(raw: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    magnitude, noise = raw & 0x7FFFFFFF, noise >> 3
    normal = ((magnitude + noise >> 13) - (112 << 10)).clamp(max=0x7BFF)
    away = (113 - (magnitude >> 23) & _LOW32).clamp(max=31)
    even = ((magnitude & 0x7FFFFF | 0x800000) >> away) + noise >> 13
    half = torch.where(magnitude < 0x38800000, even, normal)
    half = torch.where(magnitude < 0x7F800000, half, torch.where(magnitude > 0x7F800000, 0x7E00, 0x7C00))
    return raw >> 16 & 0x8000 | half
