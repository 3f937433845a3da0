"""Finished tables of hard negatives of a run."""

from collections.abc import Iterator
from dataclasses import dataclass

from schemas import storage
from schemas.layout import RunLayout, epoch_of, numbered
from schemas.manifest import Manifest, open_if_published


@dataclass(frozen=True)
class RunTable:
    """A table of the source `queries` or `labels`, made for training from `epoch` on."""

    epoch: int
    source: str
    url: str
    manifest: Manifest


def run_tables(run: RunLayout) -> Iterator[RunTable]:
    """Yield the run's finished tables, newest first. Raises TableError, StorageError."""
    for epoch in reversed(numbered(run.negatives_root)):
        for name in storage.list_names(epoch_of(run.negatives_root, epoch)):
            if name.startswith("."):  # a claim and candidates, of a miner at work or one that was killed
                continue
            url = run.negatives(epoch, name)
            if (manifest := open_if_published(url, "negatives")) is not None:
                yield RunTable(epoch, name, url, manifest)
