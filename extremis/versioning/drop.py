"""Removing a version that no other one needs."""

from typing import Any

from extremis.console import say
from extremis.versioning.list_versions import Listed, list_versions, needed_by, open_listed
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import unpublish
from schemas.owners.claim import claimed
from schemas.storage import join
from schemas.views.relative import resolve


def drop(url: str) -> dict[str, Any]:
    """Remove the data set at `url`, invisible first.

    Raises InputError: none is there, or a version beside it needs a part of it; ClaimedError: it is being made.
    """
    with claimed(url, "removed", say):
        listed = open_listed(url)
        if listed is None:
            raise InputError(f"{url}: no data set here. extremis data list names those of a prefix.")
        _require_unneeded(url, listed)
        unpublish(url)
        for name in DataLayout.MADE:
            storage.remove(join(url, name), recursive=True)
        storage.remove(DataLayout(url).staging, recursive=True)
    say(f"{url}: removed")
    return {"data": url, "digest": listed.manifest.digest}


def _require_unneeded(url: str, listed: Listed) -> None:
    """Raise InputError that names the data sets beside the one at `url` that need it."""
    others = needed_by(url, list_versions(resolve(url, "..")))
    if others:
        names = ", ".join(f"{each.url} (version {each.version.number})" for each in others)
        part = listed.version.part
        raise InputError(f"{url}: {names} need its part {part}. Drop these first, the newest one first.")
