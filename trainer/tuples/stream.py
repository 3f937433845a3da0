"""Stream of examples for any trainer, in the order of `trainer.stream`."""

import contextlib
import os
from collections.abc import Generator, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import IterableDataset

from schemas import PAD
from schemas.errors import InputError
from schemas.options import check
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column, matrix_column
from trainer.stream import JoinedStream
from trainer.stream.processes import slice_of_process
from trainer.tuples.forms import count_examples, make_examples
from trainer.tuples.options import TupleOptions
from trainer.tuples.tables import TupleTables

Place = str | os.PathLike[str]


class TupleStream(IterableDataset):
    """Examples of one rank from a table of negatives, as dictionaries.

    `table`: a table of negatives, the output folder of mined arrays, or a RUN. `data`: the DATA that the table was
    mined from. The stream reads `batch` rows at a time, over all ranks. `options` are options of `TupleOptions` and of
    `StreamOptions` (streams, rank, ranks, threads, tail). Iteration yields the rest of the current epoch; call
    `set_epoch` for the next epoch. Raises InputError, TableError, StorageError.
    """

    def __init__(self, table: Place, data: Place | None = None, *, batch: int = 256, **options: Any) -> None:
        super().__init__()
        own = {name: options.pop(name) for name in TupleOptions.model_fields if name in options}
        self.options = check(TupleOptions, own)
        self._data = None if data is None else os.fspath(data)
        self.tables = TupleTables.open(os.fspath(table), self._data, self.options)
        dealt = {"batch": batch, "streams": 8, "seed": self.options.seed, "inputs": "none", **options}
        self._rows = JoinedStream([self.tables.source], self.tables.labels.rows, **dealt)
        self._ranks = options.get("ranks", 1)
        self._within = 0  # number of examples already dealt from the batch after the state `_at`
        self._at = self._rows.state_dict()

    def __len__(self) -> int:
        """Return the number of examples in an epoch, from the label ids of all rows; approximate on several ranks."""
        return self.counted[0] // self._ranks

    @cached_property
    def counted(self) -> tuple[int, int]:
        """Number of examples per epoch on all ranks, and number of rows without examples.

        Raises InputError if there are no examples.
        """
        examples = left_out = 0
        for _, positives, hard in self._in_order():
            given = count_examples(self.tables, positives.counts, (hard != PAD).sum(axis=1))
            examples, left_out = examples + int(given.sum()), left_out + int((given == 0).sum())
        if not examples:
            raise InputError(
                f"{self.tables.negatives.url}: no row has a positive and enough negatives for {self.options.form}. Ask "
                "for fewer --negatives, or mine the table again with other options."
            )
        return examples, left_out

    @property
    def schema(self) -> pa.Schema:
        """Names and types of the examples' columns."""
        none = np.empty(0, np.int64)
        hard = np.empty((0, self.tables.negatives.width("label_ids")), np.int64)
        return make_examples(self.tables, none, Ragged.empty(0), hard, 0, spread=False).schema

    def set_epoch(self, epoch: int, table: Place | None = None) -> None:
        """Start `epoch` at its first example; if `table` is given, use its negatives from now on.

        Persistent DataLoader workers get the new epoch; a new table needs a new loader.
        """
        if table is not None:
            self.tables = TupleTables.open(os.fspath(table), self._data, self.options)
            self.__dict__.pop("counted", None)
        self._rows.set_epoch(epoch, None if table is None else [self.tables.source])
        self._at, self._within = self._rows.state_dict(), 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state that lets `load_state_dict` continue after the newest example, on the same number of ranks.

        If DataLoader workers deal the examples, only the workers know the newest example: get the state from a
        `StatefulDataLoader`.
        """
        place = {"within": self._within, "ranks": self._ranks} if self._within else {}
        at = self._at if self._within else self._rows.state_dict()
        return {**at, **place, "tuples": self.options.model_dump()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of `state`, without reading earlier rows. Raises InputError for a different order."""
        expected = {"ranks": state.get("ranks", self._ranks), "tuples": state.get("tuples")}
        for name, value in {"ranks": self._ranks, "tuples": self.options.model_dump()}.items():
            if expected[name] != value:
                raise InputError(
                    f"cannot resume the tuples: {name} was {expected[name]!r} in the saved state and is {value!r} now. "
                    "Resume with the same options, or start a new epoch."
                )
        at = {name: value for name, value in state.items() if name not in ("within", "ranks", "tuples")}
        self._rows.load_state_dict(at)
        self._at, self._within = at, state.get("within", 0)

    def __iter__(self) -> Generator[dict[str, Any], None, None]:
        own = slice_of_process()
        if own is not None and own.worker and "worker" not in self._at:
            self._within = 0  # of a batch that the first worker deals
        with contextlib.closing(self._batches()) as batches:
            for at, examples in batches:
                rows = examples.to_pylist()
                for number in range(self._within, len(rows)):
                    self._at, self._within = at, (number + 1) % len(rows)
                    yield rows[number]
                self._within = 0

    def blocks(self, shuffle: bool = True) -> Iterator[pa.Table]:
        """Yield the examples of the current epoch as tables; without `shuffle`, in the order of the table's rows."""
        if shuffle:
            yield from (examples for _, examples in self._batches())
            return
        for rows, positives, hard in self._in_order():
            yield make_examples(self.tables, rows, positives, hard, self._at["epoch"], spread=False)

    def _batches(self) -> Generator[tuple[dict[str, Any], pa.Table], None, None]:
        """Yield the state before each batch of rows, and the batch's examples."""
        with contextlib.closing(iter(self._rows)) as batches:
            while True:
                at = self._rows.state_dict()
                batch = next(batches, None)
                if batch is None:
                    return
                if [*at["negatives"].values()] != [self.tables.negatives.digest]:
                    raise InputError(
                        "set_epoch changed the table: make a new DataLoader, whose workers open the new table."
                    )
                assert isinstance(batch.hard, np.ndarray)
                positives = Ragged(batch.positives, batch.positive_offsets)
                yield at, make_examples(self.tables, batch.rows, positives, batch.hard, batch.epoch, spread=True)

    def _in_order(self) -> Iterator[tuple[np.ndarray, Ragged, np.ndarray]]:
        """Yield ids, positives and negatives of rows, one row group at a time."""
        first = 0
        queries, negatives = (each.batches(["label_ids"]) for each in (self.tables.queries, self.tables.negatives))
        for rows, hard in zip(queries, negatives, strict=True):
            ids = np.arange(first, first + rows.num_rows)
            yield ids, list_column(rows, "label_ids"), matrix_column(hard, "label_ids")
            first += rows.num_rows
