"""Names of an encoder's inputs. The module imports no encoder, because recipes are checked without loading encoders."""

from collections.abc import Mapping
from typing import Literal, get_args

Part = Literal["tokens", "features", "dense"]
Read = Literal["tokens", "features", "both", "dense", "tokens+dense", "features+dense", "all"]  # for encoder.inputs
Kind = Literal[Read, "none"]  # also for streams without an encoder
PARTS: tuple[Part, ...] = get_args(Part)
_SPECIAL: Mapping[str, tuple[Part, ...]] = {"both": ("tokens", "features"), "all": PARTS}


def reads(kind: Kind) -> tuple[Part, ...]:
    """Return the inputs that `kind` reads."""
    return _SPECIAL.get(kind) or tuple(part for part in PARTS if part in kind.split("+"))


def kind_of(parts: Mapping[Part, bool]) -> Kind:
    """Return the kind that reads exactly the `parts` that exist."""
    there = tuple(part for part in PARTS if parts[part])
    kinds: tuple[Read, ...] = get_args(Read)
    return next((kind for kind in kinds if reads(kind) == there), "none")
