"""Texts of labels on disk, as an encoder reads them: rows are read by label id, and none stays in memory."""

import numpy as np

from schemas.layout import DataLayout
from schemas.mapped import ScratchFile
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from trainer.inputs import Inputs, Kind, columns_of, require_inputs


def open_label_texts(data: DataLayout, kind: Kind) -> Inputs:
    """Open tokens, features or both of DATA's labels [0, L), decoded once into scratch files that are mapped.

    The system keeps of them in memory what it has room for. They are gone when the process ends. Raises InputError
    where the labels lack what `kind` reads, TableError, StorageError.
    """
    labels = Table.open(data.labels, "labels")
    require_inputs(labels, kind)
    writers = {name: _Writer() for name in columns_of(kind)}
    for group in labels.batches(list(writers)):
        for name, writer in writers.items():
            writer.add(list_column(group, name))
    return Inputs.from_columns({name: writer.mapped() for name, writer in writers.items()})


class _Writer:
    """Lays the row groups of a list column end to end in scratch files."""

    def __init__(self) -> None:
        self._values, self._offsets = ScratchFile("the texts of labels"), ScratchFile("the texts of labels")
        self._count, self._dtype = 0, np.dtype(np.uint16)

    def add(self, rows: Ragged) -> None:
        self._dtype = rows.values.dtype
        self._values.write(np.ascontiguousarray(rows.values).data)
        self._offsets.write((rows.offsets[:-1] + self._count).data)
        self._count += len(rows.values)

    def mapped(self) -> Ragged:
        self._offsets.write(np.array([self._count], np.int64).data)
        return Ragged(np.frombuffer(self._values.map(), self._dtype), np.frombuffer(self._offsets.map(), np.int64))
