"""Removing a version of data, or an export, that no other one needs."""

from typing import Any

from extremis.console import say
from extremis.versioning.list_exports import ListedExport, list_exports, open_listed_export
from extremis.versioning.list_versions import Listed, list_versions, needed_by, open_listed
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout, staging
from schemas.manifest import unpublish
from schemas.owners.claim import claimed
from schemas.storage import join, resolve
from schemas.version import find_current


def drop(url: str) -> dict[str, Any]:
    """Remove the data set, or the export, at `url`, invisible first.

    Raises InputError: none is there, or one beside it needs a part of it; ClaimedError: it is being made.
    """
    with claimed(url, "removed", say):
        export = open_listed_export(url)
        if export is not None:
            return _drop_export(export)
        listed = open_listed(url)
        if listed is None:
            raise InputError(f"{url}: no data set or export here. extremis data list names those of a prefix.")
        _require_unneeded(url, listed)
        unpublish(url)
        for name in DataLayout.FOLDERS:
            storage.remove(join(url, name), recursive=True)
        storage.remove(DataLayout(url).staging, recursive=True)
    say(f"{url}: removed")
    return {"data": url, "digest": listed.manifest.digest}


def _drop_export(export: ListedExport) -> dict[str, Any]:
    """Remove an export, unless it is current or one beside it names its files. Raises InputError."""
    url = resolve(export.url, ".")
    folder = resolve(url, "..")
    current = find_current(folder)
    if current is not None and resolve(current, ".") == url:
        raise InputError(f"{url}: the current export of {folder}. Make another one current first.")
    others = [other.url for other in list_exports(folder) if url in other.needs]
    if others:
        raise InputError(f"{url}: {', '.join(others)} need its files. Drop these first.")
    unpublish(url)
    for name in sorted({path.partition("/")[0] for path in export.manifest.files}):
        storage.remove(join(url, name), recursive=True)
    storage.remove(staging(url), recursive=True)
    say(f"{url}: removed")
    return {"export": url, "digest": export.manifest.digest}


def _require_unneeded(url: str, listed: Listed) -> None:
    """Raise InputError that names the data sets beside the one at `url` that need it."""
    others = needed_by(url, list_versions(resolve(url, "..")))
    if others:
        names = ", ".join(f"{each.url} (version {each.version.number})" for each in others)
        part = listed.version.part
        raise InputError(f"{url}: {names} need its part {part}. Drop these first, the newest one first.")
