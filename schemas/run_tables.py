"""A run's finished tables of hard negatives."""

from collections.abc import Iterator
from typing import NamedTuple

from schemas import storage
from schemas.layout import RunLayout, epoch_folder, list_numbers
from schemas.table import Table


class RunTable(NamedTuple):
    """A table for the source `queries` or `labels`, which training uses from `epoch` on."""

    epoch: int
    source: str
    table: Table


def run_tables(run: RunLayout, source: str | None = None, before: int | None = None) -> Iterator[RunTable]:
    """Yield the run's finished tables, newest first; if given, only tables of `source`, or of epochs before `before`.

    Raises TableError, StorageError.
    """
    for epoch in reversed(list_numbers(run.negatives_root)):
        if before is not None and epoch >= before:
            continue
        for name in storage.list_names(epoch_folder(run.negatives_root, epoch)) if source is None else [source]:
            if name.startswith("."):  # a claim and candidates of a miner that is working or was killed
                continue
            if (table := Table.find(run.negatives(epoch, name), "negatives")) is not None:
                yield RunTable(epoch, name, table)
