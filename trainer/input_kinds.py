"""Names of an encoder's inputs. The module imports no encoder, because recipes are checked without loading encoders."""

from collections.abc import Mapping
from typing import Literal, get_args

InputName = Literal["tokens", "features", "dense"]
EncoderInputs = Literal[
    "tokens", "features", "both", "dense", "tokens+dense", "features+dense", "all"
]  # for encoder.inputs
InputKind = Literal[EncoderInputs, "none"]  # also for streams without an encoder
INPUT_NAMES: tuple[InputName, ...] = get_args(InputName)
_SPECIAL: Mapping[str, tuple[InputName, ...]] = {"both": ("tokens", "features"), "all": INPUT_NAMES}


def input_names(kind: InputKind) -> tuple[InputName, ...]:
    """Return the inputs that `kind` reads."""
    return _SPECIAL.get(kind) or tuple(part for part in INPUT_NAMES if part in kind.split("+"))


def kind_of(parts: Mapping[InputName, bool]) -> InputKind:
    """Return the kind that reads exactly the `parts` that exist."""
    there = tuple(part for part in INPUT_NAMES if parts[part])
    kinds: tuple[EncoderInputs, ...] = get_args(EncoderInputs)
    return next((kind for kind in kinds if input_names(kind) == there), "none")
