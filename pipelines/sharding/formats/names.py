"""Finding files under their usual names."""

from collections.abc import Mapping, Sequence

from schemas.errors import InputError
from schemas.storage import join

_FILTERS = {
    "train": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "val": ("filter_labels_val.txt", "val_filter_labels.txt"),
    "test": ("filter_labels_test.txt", "tst_filter_labels.txt", "filter_labels_text.txt"),
}


def one_of(
    source: str, names: Sequence[str], usual: Sequence[str], expected: str, *, required: bool = False
) -> str | None:
    """Which of the `usual` names is among those at `source`; None: none. Raises InputError: two are, or it must be."""
    present = [name for name in usual if name in names]
    if len(present) > 1:
        raise InputError(f"{source}: both {present[0]} and {present[1]} are here, for the same thing. Remove one.")
    if not present and required:
        raise InputError(f"{source}: no {' or '.join(usual)} here; found: {listed(names)}. Expected {expected}.")
    return present[0] if present else None


def filters_at(source: str, names: Sequence[str]) -> Mapping[str, str]:
    """URLs of the XC filter files among `names`, by split."""
    found = {split: one_of(source, names, usual, "") for split, usual in _FILTERS.items()}
    return {split: join(source, name) for split, name in found.items() if name}


def listed(names: Sequence[str]) -> str:
    """The first names, for a message."""
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "nothing"
