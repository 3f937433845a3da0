"""Checks that an output path is absent, empty, or contains an output of the same kind, and is outside of all inputs.

The kind names the owner's work, for example sharded, trained or exported. A manifest or a run's recipe shows the kind.
Before a manifest or recipe exists, the file `.kind` shows the kind; this file is written first and removed with the
claim.
"""

from collections.abc import Iterable

from schemas import storage
from schemas.errors import InputError
from schemas.layout import ABLATION_PAGE, ABLATION_RESULT, CLUSTERS, MANIFEST, MINING_COST, RunLayout
from schemas.manifest import is_published
from schemas.storage import join
from schemas.table import Table

KIND_FILE = ".kind"
_OTHER = "other files"
# Work of an owner, by the kind of the table that the owner makes.
_WORK_BY_KIND = {"data": "sharded", "export": "exported", "negatives": "mined", "tuples": "handed over"}
_WORK_BY_KIND |= dict.fromkeys(("embeddings", "vectors"), "embedded")
_COMPANION_FILES = (MINING_COST, ABLATION_RESULT)  # files beside tables, and in failed runs
_NAMES = {"sharded": "a data set", "trained": "a run", "exported": "an export", "embedded": "embeddings"}
_NAMES |= {"mined": "hard negatives", "clustered": "queries in cluster order", "compared": "a comparison of recipes"}
_NAMES |= {"handed over": "tuples"}
_RECIPE = RunLayout("").config.strip("/")


def require_output_folder(out: str, doing: str, reads: Iterable[str | None] = ()) -> None:
    """Refuse to write an output of kind `doing` at the prefix `out` over another kind, or inside a path in `reads`.

    Raises InputError, StorageError; TableError if the existing files are damaged.
    """
    _require_apart(out, reads)
    if storage.is_stream(out) or storage.exists(out):
        raise InputError(f"{out}: expected a folder to write to, got a file. Give another path.")
    present = _kind_at(out, storage.list_names(out))
    if present not in (None, doing):
        wanted = _NAMES.get(doing, doing)
        raise InputError(
            f"{out}: contains {_NAMES.get(present, present)}, but this command writes {wanted}. Nothing was changed; "
            "give another path."
        )


def require_output_file(out: str, reads: Iterable[str | None], remedy: str, may_replace: bool = False) -> None:
    """Refuse to write a file at `out` over or inside a path in `reads`, or over a file unless `may_replace`.

    A device, a pipe or another file that is not regular is allowed. Raises InputError, with `remedy` at the end of the
    message, if a file exists; StorageError.
    """
    _require_apart(out, reads)
    if storage.is_folder(out):
        raise InputError(f"{out}: expected a file to write, got a folder. Give the path of a file in this folder.")
    if not (may_replace or storage.is_stream(out)) and storage.exists(out):
        raise InputError(f"{out}: this file exists already. {remedy}")


def mark_kind(out: str, doing: str) -> bool:
    """Write a mark of the kind `doing` at `out`, before all other files; return whether this kind has a mark."""
    if doing in _NAMES:
        storage.write_bytes(join(out, KIND_FILE), f"{doing}\n".encode())
    return doing in _NAMES


def unmark_kind(out: str, doing: str) -> None:
    """Remove the mark if other files show the kind of `out`, or if no other file is left."""
    names = [name for name in storage.list_names(out) if name != KIND_FILE]
    if ".staging" not in names and (MANIFEST in names or _kind_at(out, names) in (None, doing)):
        storage.remove(join(out, KIND_FILE))


def _require_apart(out: str, reads: Iterable[str | None]) -> None:
    for read in () if storage.is_stream(out) else reads:
        if read is not None and storage.is_within(out, read):
            if storage.is_within(read, out):
                raise InputError(f"{out}: the command reads this path, and would overwrite it. Give another path.")
            raise InputError(f"{out}: is inside {read}, which the command reads. Give a path outside this folder.")


def _kind_at(url: str, names: list[str]) -> str | None:
    """Return the kind of the output at `url` with the files `names`, or None. Raises TableError, StorageError."""
    if MANIFEST in names:
        return _kind_of(url)
    if _RECIPE in names:
        return "trained"
    if ABLATION_PAGE in names:
        return "compared"
    visible = [name for name in names if not name.startswith(".") and name not in _COMPANION_FILES]
    if not visible and ".staging" not in names:
        return None
    if KIND_FILE in names:
        return storage.read_bytes(join(url, KIND_FILE)).decode(errors="replace").strip()
    made = {_kind_of(join(url, name)) if is_published(join(url, name)) else _OTHER for name in visible}
    return _OTHER if len(made) > 1 else made.pop() if made else None


def _kind_of(url: str) -> str:
    """Return the kind of work that produced the finished table at `url`. Raises TableError."""
    table = Table.open(url)
    made = "clustered" if CLUSTERS in table.parameters else f"a table of {table.kind}"
    return _WORK_BY_KIND.get(table.kind, made)
