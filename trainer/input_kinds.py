"""Names of an encoder's inputs. The module imports no encoder, because recipes are checked without loading encoders."""

from collections.abc import Mapping
from typing import Literal, get_args

from schemas.errors import InputError

InputName = Literal["tokens", "features", "dense"]
EncoderInputs = Literal[
    "tokens", "features", "both", "dense", "tokens+dense", "features+dense", "all"
]  # for encoder.inputs
InputKind = Literal[EncoderInputs, "none"]  # also for streams without an encoder
INPUT_NAMES: tuple[InputName, ...] = get_args(InputName)
_SPECIAL: Mapping[str, tuple[InputName, ...]] = {"both": ("tokens", "features"), "all": INPUT_NAMES}


def input_names(kind: InputKind) -> tuple[InputName, ...]:
    """Return the inputs that `kind` reads. Raises InputError for an unknown kind."""
    if kind not in (known := get_args(InputKind)):
        raise InputError(f"inputs = {kind!r:.80}: expected one of {', '.join(known)}.")
    return _SPECIAL.get(kind) or tuple(part for part in INPUT_NAMES if part in kind.split("+"))


def kind_of(parts: Mapping[InputName, bool]) -> InputKind:
    """Return the kind that reads exactly the `parts` that exist."""
    there = tuple(part for part in INPUT_NAMES if parts[part])
    kinds: tuple[EncoderInputs, ...] = get_args(EncoderInputs)
    return next((kind for kind in kinds if input_names(kind) == there), "none")
