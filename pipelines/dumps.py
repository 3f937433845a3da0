"""What a trainer has dumped into a run, and for when what is made from it is meant."""

from schemas import storage
from schemas.errors import TableError
from schemas.layout import RunLayout, parse_number
from schemas.manifest import Manifest, is_published, open_manifest


def dump_epochs(run: str) -> list[int]:
    """Epochs that have a dump, complete or not, oldest first."""
    numbers = (parse_number(name) for name in storage.list_names(RunLayout(run).dumps))
    return sorted(number for number in numbers if number is not None)


def open_if_published(url: str, kind: str) -> Manifest | None:
    """The trainer may take a dump back between two looks: it resumed from an earlier checkpoint."""
    try:
        return open_manifest(url, kind) if is_published(url) else None
    except TableError:
        if is_published(url):
            raise
        return None


def say_use(use_from: int | None) -> str:
    """For the end of a line: the first epoch that trains on a table."""
    return "" if use_from is None else f", for use from epoch {use_from}"
