"""Mined negatives as examples for others' trainers: tables, forms of examples, a stream, and files."""

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from torch.utils.data import IterableDataset

from schemas import PAD, storage
from schemas.errors import InputError, TableError, option
from schemas.layout import DataLayout
from schemas.manifest import Manifest, columns_of, is_published
from schemas.mapped import ScratchRows
from schemas.options import check
from schemas.owners import building, clean_up, require_output_file, require_output_folder
from schemas.ragged import Ragged, offsets_of
from schemas.randomness import Purpose, generator
from schemas.shard_files.parquet import list_column, matrix_column, string_bytes, writing_shard
from schemas.storage import join
from schemas.table import Request, Table, find_reusable
from scoring.options import TupleOptions
from trainer.negatives.draws import splitmix64
from trainer.stream import JoinedStream, Source
from trainer.stream.dataset import slice_of_process


@dataclass(frozen=True)
class TupleTables:
    """Queries, their negatives and the labels of `data`; for mined arrays, `place` is the output folder."""

    place: str
    data: str
    queries: Table
    negatives: Table
    labels: Table
    options: TupleOptions
    _held: dict[tuple[str, str], Any] = field(default_factory=dict, compare=False)  # mapped columns by table and name

    @classmethod
    def open(cls, url: str, data: str | None, options: TupleOptions) -> "TupleTables":
        """Open a table with its DATA; `url` is a table, the output folder of mined arrays, or a RUN.

        Raises InputError if no DATA is given, DATA has no texts, more negatives are requested than the table has, or
        scores are missing; TableError if there is no such table, or the table was mined from other data.
        """
        place, mining = url, not is_published(url) and is_published(join(url, "data"))
        if mining:
            url, data = join(url, "queries"), data or join(url, "data")
        if data is None:
            Table.open(url, "negatives")  # a missing place has its own error message
            raise InputError(f"{url}: {option('data')} is missing: give the DATA that this table was mined from.")
        whole, layout, table = Table.open(data, "data"), DataLayout(data), Table.find(url, "negatives")
        splits = {digest: name[8:] for name, digest in whole.parents.items() if name.startswith("queries/")}
        split = "train" if table is None else splits.get(table.parents.get("queries", ""))
        if split is None:
            raise TableError(
                f"{url}: not mined from the queries of {data} ({', '.join(sorted(splits.values()))}). Give the DATA "
                f"that this table was mined from with {option('data')}."
            )
        queries = Table.open(layout.queries(split), "queries")
        negatives = Source("queries", queries).with_negatives(url).negatives
        assert negatives is not None
        width = negatives.width("label_ids")
        if (options.negatives or 0) > width:
            raise InputError(
                f"{option('negatives', options.negatives)}: {negatives.url} has {width} negatives per row. Ask for "
                f"fewer, or mine the table again with {option('width', options.negatives)}."
            )
        if not options.keys and "text" not in queries.columns:
            raise InputError(
                f"{queries.url}: the queries of this DATA have no texts. Shard the data again with "
                f"{option('keep_text', True)}, or give {option('keys', True)} to write keys instead of texts."
            )
        if options.scores == "search" and not mining:
            raise InputError(
                f"{option('scores', 'search')}: positives have scores only in the output of mining arrays. Give the "
                f"output folder of mined arrays, or leave {option('scores')} out."
            )
        if options.scores == "teacher" and "teacher" not in negatives.columns:
            raise InputError(f"{option('scores', 'teacher')}: no teacher has scored {negatives.url}. Leave it out.")
        return cls(place, data, queries, negatives, Table.open(layout.labels, "labels"), options)

    @property
    def source(self) -> Source:
        return Source("queries", self.queries, self.negatives)

    @property
    def width(self) -> int:
        return self.options.negatives or (1 if self.options.form == "triplets" else self.negatives.width("label_ids"))

    def texts(self, table: Table, rows: np.ndarray) -> pa.Array:
        """Return the texts, or keys, for `rows` of queries or labels. Raises InputError, TableError, StorageError."""
        return self.strings(table, "key" if self.options.keys else "text", rows)

    def strings(self, table: Table, column: str, rows: np.ndarray) -> pa.Array:
        """Return strings of a column for `rows` [n]. Raises InputError if all are empty; TableError, StorageError."""
        held = self._held.get((table.url, column))
        if held is None:
            texts = ScratchRows("texts")
            for group in table.batches([column]):
                chunks = group[column].cast(pa.large_string()).chunks
                texts.add(string_bytes(pa.concat_arrays([pa.array([], pa.large_string()), *chunks])))
            values, offsets = texts.mapped()
            held = pa.LargeStringArray.from_buffers(table.rows, pa.py_buffer(offsets), pa.py_buffer(values))
            self._held[table.url, column] = held
        if not held.buffers()[2].size and table.rows:
            raise InputError(f"{table.url}: the table has no {column}. Give {option('keys', True)} to write keys.")
        return held.take(pa.array(rows)).cast(pa.string())

    def numbers(self, table: Table, column: str, rows: np.ndarray) -> np.ndarray:
        """Return lists of K numbers for `rows` [n] of a table, float32 [n, K]. Raises TableError, StorageError."""
        held = self._held.get((table.url, column))
        if held is None:
            lists = ScratchRows("scores and vectors")
            for group in table.batches([column]):
                lists.add(Ragged.from_matrix(matrix_column(group, column)))
            held = lists.mapped().values.reshape(table.rows, table.width(column))
            self._held[table.url, column] = held
        return held[rows].astype(np.float32)

    def positive_scores(self, rows: np.ndarray, positives: Ragged) -> np.ndarray:
        """Return scores of the positives of `rows` [B], float32, one per positive.

        A teacher does not score positives, so with `scores` = "teacher" the scores are NaN. Raises TableError,
        StorageError.
        """
        if self.options.scores == "teacher":
            return np.full(len(positives.entries), np.nan, np.float32)
        vectors = []
        for table, ids in zip(self._mined, (rows[positives.row_of()], positives.entries), strict=True):
            vectors.append(self.numbers(table, "vector", ids))
        return np.einsum("pd,pd->p", *vectors)

    @cached_property
    def _mined(self) -> tuple[Table, Table]:
        """The vectors of queries and labels. Raises InputError if their files are gone; TableError if they differ."""
        from pipelines.arrays import open_mined  # only scores need the readers of vectors

        tables = open_mined(self.place)
        for table in tables:
            self.negatives.require_made_from(table.kind, table)
        return tables

    def __reduce__(self) -> tuple[Any, ...]:
        own = self.place, self.data, self.queries, self.negatives, self.labels, self.options
        return TupleTables, own  # without maps


Columns = dict[str, pa.Array]
Count = Callable[[np.ndarray, np.ndarray, int], np.ndarray]  # number of examples, from positives, negatives and n


@dataclass(frozen=True)
class Examples:
    """E examples: example e is number `number[e]` among the examples of row `row[e]`.

    `labels`, and their scores if requested, are indexed by place; `positive` [E]: places of the positives; `negative`
    [E, n]: places of the negatives, best first; only the first `found` [E] of the negatives are valid.
    """

    tables: TupleTables
    rows: np.ndarray
    positives: Ragged
    labels: np.ndarray
    scores: np.ndarray | None
    row: np.ndarray
    number: np.ndarray
    positive: np.ndarray
    negative: np.ndarray
    found: np.ndarray

    def anchors(self, name: str = "anchor") -> Columns:
        return {name: self.tables.texts(self.tables.queries, self.rows[self.row])}

    def texts(self, places: np.ndarray) -> pa.Array:
        return self.tables.texts(self.tables.labels, self.labels[places])

    def both(self) -> dict[str, Ragged]:
        """For each example, return the places of all positives and of the negatives of the example's row."""
        positives = Ragged(np.arange(len(self.positives.values)), self.positives.offsets).take(self.row)
        kept = np.arange(self.negative.shape[1]) < self.found[:, None]
        return {"pos": positives, "neg": Ragged.from_counts(self.negative[kept], self.found)}


def count_examples(tables: TupleTables, positives: np.ndarray, negatives: np.ndarray) -> np.ndarray:
    """Return the number of examples per row, [R], from the numbers of positives and negatives per row."""
    each = positives if tables.options.each_positive else np.minimum(positives, 1)
    return _FORMS[tables.options.form][0](each, np.minimum(negatives, tables.width), tables.width)


def make_examples(
    tables: TupleTables, rows: np.ndarray, positives: Ragged, hard: np.ndarray, epoch: int, spread: bool
) -> pa.Table:
    """Make the examples of `rows` [R], with their positives and negatives [R, K]. Raises TableError, StorageError.

    `spread`: examples of one row are not adjacent.
    """
    options, width, counts = tables.options, tables.width, positives.counts
    several = len(tables.negatives.parameters.get("ranges", ())) > 1  # ranges of labels, each range best first
    order_by = -tables.numbers(tables.negatives, "scores", rows) if several else hard == PAD
    best = np.argsort(order_by, axis=1, kind="stable")[:, :width]
    negatives, scores = np.take_along_axis(hard, best, axis=1), None
    found = (negatives != PAD).sum(axis=1)
    if options.scores:
        column = "teacher" if options.scores == "teacher" else "scores"
        of_negatives = np.take_along_axis(tables.numbers(tables.negatives, column, rows), best, axis=1)
        scores = np.concatenate([tables.positive_scores(rows, positives), of_negatives.reshape(-1)])
    given = count_examples(tables, counts, found)
    row = np.repeat(np.arange(len(rows)), given)
    number = np.arange(len(row)) - offsets_of(given)[row]
    if spread:
        order = np.argsort(number, kind="stable")
        row, number = row[order], number[order]
    key = generator(options.seed, Purpose.POSITIVES, epoch, 0, 1).integers(0, 1 << 64, dtype=np.uint64)
    # The uncompiled function takes all rows at once, with NumPy.
    numbers = splitmix64.py_func(key, rows.astype(np.uint64), np.uint64(0))  # type: ignore[arg-type]
    drawn = (numbers % np.maximum(counts, 1).astype(np.uint64)).astype(np.int64)
    chosen = number // found[row] if options.form == "triplets" else np.minimum(number, counts[row] - 1)
    positive = positives.offsets[row] + (chosen if options.each_positive else drawn[row])
    negative = len(positives.values) + row[:, None] * width + np.arange(width)
    labels = np.concatenate([positives.values, negatives.reshape(-1)]).astype(np.int64)
    some = Examples(tables, rows, positives, labels, scores, row, number, positive, negative, found[row])
    return pa.table(_FORMS[options.form][1](some))


def _tuples(some: Examples) -> Columns:
    """Make triplets or tuples: one positive, and one or n negatives."""
    if some.tables.options.form == "triplets":
        negatives = {"negative": some.negative[np.arange(len(some.row)), some.number % some.found]}
    else:
        negatives = {f"negative_{number}": places for number, places in enumerate(some.negative.T, 1)}
    places = {"positive": some.positive, **negatives}
    columns = some.anchors() | {name: some.texts(each) for name, each in places.items()}
    if some.scores is None:
        return columns
    flat = np.column_stack([*places.values()]).reshape(-1)
    return columns | {"scores": _lists(some.scores[flat], np.full(len(some.row), len(places)))}


def _pairs(some: Examples) -> Columns:
    counts = some.positives.counts[some.row]
    first = counts if some.tables.options.each_positive else np.minimum(counts, 1)
    is_positive = some.number < first
    negative = some.negative[np.arange(len(some.row)), np.maximum(some.number - first, 0)]
    places = np.where(is_positive, some.positive, negative)
    columns = some.anchors() | {"other": some.texts(places)}
    if some.scores is None:
        return columns | {"label": is_positive.astype(np.int64)}
    return columns | {"score": pa.array(some.scores[places], from_pandas=True)}


def _one_list(some: Examples) -> Columns:
    places = np.column_stack([some.positive, some.negative])
    kept = np.arange(places.shape[1]) <= some.found[:, None]
    flat, counts = places[kept], kept.sum(axis=1)
    columns = some.anchors() | {"documents": _lists(some.texts(flat), counts)}
    if some.scores is not None:
        return columns | {"scores": _lists(some.scores[flat], counts)}
    return columns | {"labels": _lists((flat < len(some.positives.values)).astype(np.int64), counts)}


def _tevatron(some: Examples) -> Columns:
    tables, columns = some.tables, some.anchors("query")
    for name, (places, offsets) in some.both().items():
        keys = tables.strings(tables.labels, "key", some.labels[places])
        parts = [keys, pa.array([""] * len(keys), pa.string()), some.texts(places)]
        passages = pa.StructArray.from_arrays(parts, ["docid", "title", "text"])
        columns[{"pos": "positive_passages", "neg": "negative_passages"}[name]] = _lists(passages, np.diff(offsets))
    return {"query_id": tables.strings(tables.queries, "key", some.rows[some.row]), **columns}


def _flagembedding(some: Examples) -> Columns:
    columns, scores = some.anchors("query"), {}
    for name, (places, offsets) in some.both().items():
        columns[name] = _lists(some.texts(places), np.diff(offsets))
        if some.scores is not None:
            scores[f"{name}_scores"] = _lists(some.scores[places], np.diff(offsets))
    return columns | scores


def _lists(values: pa.Array | np.ndarray, counts: np.ndarray) -> pa.ListArray:
    flat = pa.array(values, from_pandas=True) if isinstance(values, np.ndarray) else values  # NaN becomes null
    return pa.ListArray.from_arrays(pa.array(offsets_of(counts).astype(np.int32)), flat)


_FORMS: dict[str, tuple[Count, Callable[[Examples], Columns]]] = {
    "triplets": (lambda positives, negatives, n: positives * negatives, _tuples),
    "tuples": (lambda positives, negatives, n: positives * (negatives == n), _tuples),
    "pairs": (lambda positives, negatives, n: positives + negatives * (positives > 0), _pairs),
    "lists": (lambda positives, negatives, n: positives * (negatives > 0), _one_list),
    "tevatron": (lambda positives, negatives, n: np.minimum(positives, 1) * (negatives > 0), _tevatron),
    "flagembedding": (lambda positives, negatives, n: np.minimum(positives, 1) * (negatives > 0), _flagembedding),
}

Place = str | os.PathLike[str]


class TupleStream(IterableDataset):
    """Examples of one rank from a table of negatives, as dictionaries.

    `table`: a table of negatives, the output folder of mined arrays, or a RUN. `data`: the DATA that the table was
    mined from. The stream reads `batch` rows at a time, over all ranks. `options` are options of `TupleOptions` and of
    `StreamOptions` (streams, rank, ranks, threads, tail). Iteration yields the rest of the current epoch; call
    `set_epoch` for the next epoch. Raises InputError, TableError, StorageError.
    """

    def __init__(self, table: Place, data: Place | None = None, *, batch: int = 256, **options: object) -> None:
        super().__init__()
        own = {name: options.pop(name) for name in TupleOptions.model_fields if name in options}
        self.options = check(TupleOptions, own)
        self._data = None if data is None else os.fspath(data)
        self.tables = TupleTables.open(os.fspath(table), self._data, self.options)
        dealt: dict[str, Any] = {"batch": batch, "streams": 8, "seed": self.options.seed, "inputs": "none", **options}
        self._rows = JoinedStream([self.tables.source], self.tables.labels.rows, **dealt)
        self._ranks = dealt.get("ranks", 1)
        self._within = 0  # number of examples already dealt from the batch after the state `_at`
        self._at = self._rows.state_dict()

    def __len__(self) -> int:
        """Return the number of examples in an epoch, from the label ids of all rows; approximate on several ranks."""
        return self.counted[0] // self._ranks

    @cached_property
    def counted(self) -> tuple[int, int]:
        """Numbers of examples per epoch on all ranks, and of rows without any. Raises InputError without examples."""
        examples = left_out = 0
        for _, positives, hard in self._in_order():
            given = count_examples(self.tables, positives.counts, (hard != PAD).sum(axis=1))
            examples, left_out = examples + int(given.sum()), left_out + int((given == 0).sum())
        if not examples:
            raise InputError(
                f"{self.tables.negatives.url}: no row has a positive and enough negatives for {self.options.form}. Ask "
                f"for fewer {option('negatives')}, or mine the table again with other options."
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
        ranks, options = state.get("ranks", self._ranks), state.get("tuples")
        own = self.options.model_dump()
        for name, before, now in (("ranks", ranks, self._ranks), ("tuples", options, own)):
            if before != now:
                raise InputError(
                    f"cannot resume the tuples: {name} was {before!r} in the saved state and is {now!r} now. Resume "
                    "with the same options, or start a new epoch."
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


KIND, _DOING = "tuples", "handed over"
_ENDS = {".jsonl": None, ".json": None, ".jsonl.gz": "gzip", ".jsonl.bz2": "bz2", ".jsonl.zst": "zstd"}
_SHARD = 1_000_000  # maximum number of examples in a shard, if the number of shards is not stated


def is_file(out: str) -> bool:
    """Return whether `out` is a file of JSON lines. Raises InputError for an unsupported type of file."""
    if out.endswith((".parquet", ".csv", ".tsv", ".arrow", ".npz", ".gz", ".zst")) and not out.endswith((*_ENDS,)):
        raise InputError(f"{out}: expected a file that ends in {', '.join(_ENDS)}, or a folder for Parquet shards.")
    return out.endswith((*_ENDS,))


def write_tuples(
    stream: TupleStream,
    out: str,
    shuffle: bool = False,
    shards: int | None = None,
    overwrite: bool = False,
    on_examples: Callable[[int], None] = lambda examples: None,
) -> Manifest | None:
    """Write the stream's current epoch to `out`, a file of JSON lines or a table; return the manifest of a table.

    Examples are in the order of the table's rows, or shuffled. Files and tables are published when complete; if a table
    of the same input exists, its manifest is returned. `on_examples(number)` is called with the number of examples
    written. Raises InputError if OUT has other contents; StorageError.
    """
    tables, remedy = stream.tables, f"Give {option('overwrite', True)} to replace it, or another OUT."
    reads = [tables.place, tables.data]
    if is_file(out):
        if shards is not None:
            raise InputError(f"{option('shards')} works only with a folder, but OUT is a file. Leave it out.")
        require_output_file(out, reads, remedy, overwrite)
        end = next(end for end in _ENDS if out.endswith(end))
        with storage.writing(out) as path, pa.output_stream(path, compression=_ENDS[end]) as file:
            for examples in stream.blocks(shuffle):
                file.write(b"".join(orjson.dumps(example) + b"\n" for example in examples.to_pylist()))
                on_examples(examples.num_rows)
        return None
    require_output_folder(out, _DOING, reads)
    rows, left_out = stream.counted
    count = min(rows, shards or -(-rows // _SHARD))
    order = {"shuffle": shuffle, "epoch": stream.state_dict()["epoch"], "shards": count}
    digests = {name: getattr(tables, name).digest for name in ("queries", "negatives", "labels")}
    request = Request(KIND, digests, {**stream.options.model_dump(), **order})
    finished = find_reusable(out, request, remedy, overwrite=overwrite)
    if finished is not None:
        clean_up(out, _DOING)
        return finished
    group = 1024 if rows < 1_000_000 else 8192
    with building(out, _DOING) as build:
        entries, schema, blocks = [], stream.schema, stream.blocks(shuffle)
        rest = schema.empty_table()
        for shard in range(count):
            left = rows * (shard + 1) // count - rows * shard // count
            with writing_shard(build.url, shard, count, schema, group) as file:
                while left:
                    rest = rest if rest.num_rows else next(blocks)
                    examples, rest = rest.slice(0, left), rest.slice(left)
                    file.write(examples)
                    on_examples(examples.num_rows)
                    left -= examples.num_rows
            entries.append(file.entry)
        return build.publish(
            Manifest(
                kind=KIND,
                columns=columns_of(schema),
                shards=tuple(entries),
                rows=rows,
                row_group_rows=group,
                parents=digests,
                parameters=dict(request.parameters),
                counters={"examples": rows, "rows_left_out": left_out},
            )
        )
