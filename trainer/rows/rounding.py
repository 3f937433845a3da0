"""Stochastic rounding of float32 to bfloat16 and float16: up or down, so that the expectation is the value itself.

The random bits are a hash of (key, row, column), the key of (seed, step): no state, and the same whatever the order of
rows, the number of threads or ranks, and after a resume. See docs/decisions/0012.
"""

import torch

from schemas.randomness import Purpose, torch_seed

GOLDEN = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # of splitmix64 (Steele, Lea and Flood, 2014)
MIX32 = ((16, 0x7FEB352D), (15, 0x846CA68B))  # of lowbias32 (Wellons, 2018)
_LOW = 0xFFFFFFFF


def key_of(seed: int, step: int) -> int:
    """Return the key of a step's random bits, in [0, 2**63)."""
    return torch_seed(seed, Purpose.ROUNDING, step)


def noise(key: int, rows: torch.Tensor, columns: int) -> torch.Tensor:
    """Return sixteen random bits for each of `columns` of rows `rows` int64 [C]: int32 [C, columns] in [0, 2**16)."""
    mixed = rows * _signed(GOLDEN) + key
    for shift, factor in MIX64:
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    mixed = mixed ^ _shifted(mixed, 31)
    half = (columns + 1) // 2
    counter = torch.arange(half, device=rows.device)
    word = ((mixed & _LOW)[:, None] + counter * (_shifted(mixed, 32) | 1)[:, None]) & _LOW
    for shift, factor in MIX32:
        word = ((word ^ (word >> shift)) * factor) & _LOW
    word ^= word >> 16
    # One word serves a column of the first half and one of the second.
    return torch.cat([word & 0xFFFF, word >> 16], 1)[:, :columns].to(torch.int32)


def rounded(x: torch.Tensor, dtype: torch.dtype, bits: torch.Tensor) -> torch.Tensor:
    """Round x float32 [C, D] to `dtype`, up where the 16 `bits` [C, D] are at least what is missing to the next value.

    Exactly unbiased; of float16 below 2**-14, what is left under 2**-13 of the distance of its values is cut off.
    float16 ends at 65504: greater values become that.
    """
    if dtype == torch.float32:
        return x
    raw = x.view(torch.int32)
    magnitude = raw & 0x7FFFFFFF
    if dtype == torch.bfloat16:
        # Infinity and the NaN that arithmetic gives have zeros in the low half, so they stay what they are.
        return ((raw + bits) >> 16).to(torch.int16).view(torch.bfloat16)
    bits = bits >> 3
    normal = (((magnitude + bits) >> 13) - (112 << 10)).clamp(max=0x7BFF)
    # Below 2**-14 the values lie evenly: m * 2**(e - 150) in units of 2**-37, and 2**13 of those are one of theirs.
    away = (113 - (magnitude >> 23)).clamp(0, 31)
    even = ((((magnitude & 0x7FFFFF) | 0x800000) >> away) + bits) >> 13
    half = torch.where(magnitude < 0x38800000, even, normal)
    half = torch.where(magnitude < 0x7F800000, half, torch.where(magnitude > 0x7F800000, 0x7E00, 0x7C00))
    return (half | ((raw >> 16) & 0x8000)).to(torch.int16).view(torch.float16)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift int64 logically to the right."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant
