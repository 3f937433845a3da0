"""Which kernels step on the rows of a device: plain PyTorch says what they do, one module does it fast on each device.

`torch_kernels.py` is the reference. On a CPU, the loops of `numba_kernels.py` do the same in a single pass. On a GPU,
`triton_kernels.py` has the same functions; a run compares them with the reference before its first step, because a GPU,
a driver or a release of Triton that nobody has tried may break them.
"""

import functools
import importlib.util
import os
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from schemas import PAD
from schemas.errors import InputError
from trainer.device import send
from trainer.group import ALONE, Group
from trainer.rows import numba_kernels, torch_kernels
from trainer.rows.codes import Matrix, Rule
from trainer.stream.batch import Candidates

KERNELS = {"cpu": "numba", "cuda": "triton"}  # by the type of a device; the reference on others
_FUNCTIONS = ("score_pairs", "differentiate_pool", "update_rows")
_VARIABLE = "EXTREMIS_KERNELS"
_TOLERANCE = 1e-4  # share of the greatest value: sums in another order
_replaced: set[str] = set()  # functions of triton_kernels.py that the reference replaces in this process
# What kernels are compiled for: a device, dtypes of the rows that are scored and updated, an optimizer's method, and D.
Form = tuple[torch.device, torch.dtype, torch.dtype, int, int]


def kernels_of(device: torch.device) -> Any:
    """Return `numba_kernels`, or an object with the functions of the reference. Raises InputError as `name_kernels`."""
    name = name_kernels(device)
    if name in ("numba", "reference"):
        return numba_kernels if name == "numba" else torch_kernels
    from trainer.rows import triton_kernels

    if name == "triton":
        return triton_kernels
    return SimpleNamespace(**vars(triton_kernels) | {name: getattr(torch_kernels, name) for name in _replaced})


def name_kernels(device: torch.device) -> str:
    """Return "numba", "reference" or "triton", the last with the functions that the reference replaces.

    Raises InputError if EXTREMIS_KERNELS is neither `reference` nor `triton`, or asks for a Triton that is absent.
    """
    by_hand, name = os.environ.get(_VARIABLE, ""), KERNELS.get(device.type, "reference")
    if by_hand not in ("", "reference", "triton"):
        raise InputError(f"{_VARIABLE} = {by_hand!r}: expected 'reference' or 'triton'. Unset it to use the device's.")
    if by_hand == "reference" or name != "triton":
        return by_hand if by_hand == "reference" else name
    if importlib.util.find_spec("triton") is None:
        if by_hand:
            raise InputError(f"{_VARIABLE} = 'triton': Triton is not installed. Install Triton, or unset the variable.")
        return "reference"
    if by_hand or not _replaced:
        return "triton"
    return "reference" if len(_replaced) == len(_FUNCTIONS) else f"triton, reference for {', '.join(sorted(_replaced))}"


def check_kernels(forms: Iterable[Form], group: Group = ALONE) -> str:
    """Compare Triton's functions with the reference on rows of `forms`; it replaces those that fail on any rank.

    Every rank calls this before its first step. Returns a line on what is replaced, or "".
    """
    checked = (form for form in forms if "triton" in name_kernels(form[0]) and not os.environ.get(_VARIABLE))
    own = {name: fault for form in checked for name, fault in _faults(*form).items()}
    ranks = enumerate(group.all_gather_objects(own))
    faults = {name: f"{name} on rank {rank} {fault}" for rank, found in ranks for name, fault in found.items()}
    _replaced.update(faults)
    if not faults:
        return ""
    return (
        f"odd: plain PyTorch replaces kernels that fail on this device, and is slower: {'; '.join(faults.values())}. "
        "Please report this line, with the output of `python -m torch.utils.collect_env`."
    )


@functools.cache
def _faults(*form: Any) -> dict[str, str]:
    """Return what is wrong with Triton's functions on rows of a form: {function: fault}."""
    faults = {}
    for name in _FUNCTIONS:
        try:
            from trainer.rows import triton_kernels

            got, expected = (_results(getattr(module, name), *form) for module in (triton_kernels, torch_kernels))
            apart = [_distance(*pair) for pair in zip(got, expected, strict=True)]
            if name == "update_rows" and form[2] == torch.bfloat16:
                # A value whose last bits differ may be rounded the other way, but few are: random bits are the same.
                apart.append(100 * float((got[0] != expected[0]).double().mean()))
            if not all(distance <= 1 for distance in apart):
                faults[name] = f"differs by {max(apart):.2g} times the tolerance"
        except Exception as error:  # of a compiler, of a driver
            faults[name] = " ".join(f"raises {type(error).__name__}: {error}".split())[:200]
    return faults


def _distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far two results are apart, as a multiple of the tolerance; NaN if a number is NaN."""
    error, size = (got.double() - expected.double()).abs(), expected.double().abs()
    step = 2**-7 if expected.dtype == torch.bfloat16 else 0  # between neighbours
    return float((error / (_TOLERANCE * size.max() + step * size + 1e-12)).max())


def _results(
    function: Any, device: torch.device, scored: torch.dtype, updated: torch.dtype, method: int, columns: int
) -> list[torch.Tensor]:
    """Return what a function makes of a few hundred random rows, where many pairs have one label, and some are pads."""
    draw, codes = np.random.default_rng(0), torch_kernels.DTYPE_CODES

    def uniform(*shape: int) -> np.ndarray:
        return draw.random(shape, np.float32)

    label = np.where(uniform(256) < 0.5, 0, draw.integers(0, 250, 256))
    ids, weight = np.append(draw.permutation(300)[:247], [PAD] * 3), uniform(256) * (label < 247)
    sent, x, vectors, second, count, scores, numbers = send(
        (
            Candidates(ids, np.arange(256) // 8, label, uniform(256) < 0.3, weight, uniform(300)),
            *(uniform(32, columns) - 0.5, uniform(300, columns) - 0.5, uniform(300, columns)),
            *(1 + np.floor(9 * uniform(300)), 40 * uniform(32, 300) - 20),
            (np.array(0.5, np.float32), np.array(0.9, np.float32), np.array(1 << 40)),
        ),
        device,
    )
    if function.__name__ == "differentiate_pool":
        scores[3, :70] = -torch.inf
        return [part for dtype in {torch.float32, scored} for part in function(scores.clone(), sent.pool_weight, dtype)]
    pairs = torch_kernels.order_pairs(sent, 32, 250)
    if function.__name__ == "score_pairs":
        return list(function(x, Matrix(vectors.to(scored), codes[scored], None, None, None, 0), sent.ids, pairs, 0.5))
    matrix = Matrix(vectors.to(updated), codes[updated], vectors.clone(), second, count, 1 << 33)
    rate, keep, key = numbers
    rule = Rule(method, rate, keep, np.float32(0.9), np.float32(0.99), np.float32(1e-8), key)
    function(matrix, rule, sent.ids, x[:9], (pairs, pairs.weight, x))
    function(matrix, rule, sent.ids[:32], x)  # as in a step of another loss
    return [matrix.vectors, matrix.first, matrix.second, matrix.scalar]
