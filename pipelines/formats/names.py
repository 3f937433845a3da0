"""Names of files: those at a source, and which of the usual ones are among them."""

import fnmatch
import re
from collections.abc import Mapping, Sequence

from schemas import storage
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
    """Find the one of the `usual` names that is at `source`; None: none. Raises InputError: two, or none `required`."""
    present = [name for name in usual if name in names]
    if len(present) > 1:
        raise InputError(f"{source}: both {present[0]} and {present[1]} are here, for the same thing. Remove one.")
    if not present and required:
        raise InputError(f"{source}: no {' or '.join(usual)} here; found: {listed(names)}. Expected {expected}.")
    return present[0] if present else None


def filters_at(source: str, names: Sequence[str]) -> Mapping[str, str]:
    """Return the URLs of the XC filter files among `names`, by split."""
    files = {split: one_of(source, names, usual, "") for split, usual in _FILTERS.items()}
    return {split: join(source, name) for split, name in files.items() if name}


def listed(names: Sequence[str]) -> str:
    """List the first names, for a message."""
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "nothing"


def single_file(source: str, kind: str) -> bool:
    """Tell whether `source` is one file whose name ends in the pattern `kind`, and no folder or pattern."""
    wild = "*" in source or "?" in source
    return not wild and re.search(rf"\.{kind}$", source) is not None and not storage.list_names(source)


def listing(source: str) -> tuple[str, list[str]]:
    """Return (prefix, sorted names below it) of `source`, a prefix or a pattern with `*` and `?`.

    Of a prefix: the names directly under it and those in its folders, as `folder/name`. Of a pattern: the names that
    match it, below the folders that it spells out.
    """
    parts = source.split("/")
    wild = next((i for i, part in enumerate(parts) if "*" in part or "?" in part), None)
    if wild is not None:
        root = "/".join(parts[:wild]) or ("/" if source.startswith("/") else ".")
        return root, _matching(root, parts[wild:])
    names = storage.list_names(source)
    inside = [f"{name}/{file}" for name in names if "." not in name for file in storage.list_names(join(source, name))]
    return source, sorted(names + inside)


def _matching(root: str, patterns: Sequence[str]) -> list[str]:
    names = fnmatch.filter(storage.list_names(root), patterns[0])
    if len(patterns) == 1:
        return sorted(names)
    return sorted(f"{name}/{rest}" for name in names for rest in _matching(join(root, name), patterns[1:]))
