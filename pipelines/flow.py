"""A flow is a list of stages. A stage applies a plain function to small elements; bulk data passes through files.

    flow = Flow()
    raw = flow.create("Parts", range(3)).flat_map("Read", read_part, plan)
    parsed = raw.group("By block").map("Parse", parse_block, plan)

A runner executes a flow. Workers receive a function by name, so a function stands at the top level of a module. It
returns small elements instead of rows, because the local runner keeps all elements in the launching process, and Flink
and Spark hold a group as one element in memory. The operator `+` merges collections.

Rows pass through files in staging. A worker writes its messages for all destinations to one file. A message is an Arrow
IPC stream with one record batch. Only a packet is an element: it says where a message is, and has the message's CRC-32,
so that a reader can verify the message.
"""

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa

from schemas import storage
from schemas.errors import StorageError
from schemas.sizes import batch_by_size
from schemas.storage import crc32, join

_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=1))
_HELD_BYTES = 32 << 20  # rows that `send_together` collects before it sends them
_PACKETS = pa.schema([("url", pa.string()), ("start", pa.int64()), ("size", pa.int64()), ("checksum", pa.uint32())])

MAIN = "main"  # tag of elements that are yielded without a tag

Elements = list[Any]
Outputs = dict[str, Elements]  # outputs of a stage, by tag
Packet = tuple[str, int, int, int]  # place of a message: (URL, offset, bytes, CRC-32)
K = TypeVar("K")
WorkKind = Literal["map", "flat_map", "map_partitions"]  # how a function gets elements: see `Work`


class Tagged(NamedTuple):
    """An element for a collection other than the main collection."""

    tag: str
    value: Any


class Output(NamedTuple):
    """One output, by tag, of the stage with the number `stage`."""

    stage: int
    tag: str


@dataclass(frozen=True)
class Work:
    """A function to apply to elements: `map` and `flat_map` pass one element per call, `map_partitions` passes several.

    With `map`, the function returns one element; with `flat_map` and `map_partitions`, the function yields elements.
    arguments: additional arguments, passed after the element.
    """

    kind: WorkKind
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()

    def __call__(self, elements: Iterable[Any]) -> Iterator[Any]:
        """Yield the results of the function for `elements`."""
        if self.kind == "map_partitions":
            yield from self.function(elements, *self.arguments)
            return
        for element in elements:
            made = self.function(element, *self.arguments)
            if self.kind == "map":
                yield made
            else:
                yield from made


@dataclass(frozen=True)
class Stage:
    """A stage of a flow: given elements, a function over the elements of `reads`, or these elements grouped by key.

    sides: maps argument positions of the work to outputs that contain (key, value) pairs. The function receives the
    pairs as dictionaries at these positions.
    """

    name: str
    reads: tuple[Output, ...] = ()
    given: Sequence[Any] | None = None
    work: Work | None = None  # a stage with neither given elements nor work is a grouping
    tags: tuple[str, ...] = (MAIN,)
    sides: Mapping[int, tuple[Output, ...]] = field(default_factory=dict)

    @property
    def inputs(self) -> tuple[Output, ...]:
        """All outputs that the stage reads."""
        return (*self.reads, *(output for outputs in self.sides.values() for output in outputs))

    def with_sides(self, dictionaries: Mapping[int, Mapping[Any, Any]]) -> Work:
        """Return the work with `dictionaries` inserted as arguments at the positions in `sides`."""
        assert self.work is not None
        arguments = [dictionaries.get(place, argument) for place, argument in enumerate(self.work.arguments)]
        return Work(self.work.kind, self.work.function, tuple(arguments))


class Flow:
    """Stages, each after the stages that it reads."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def create(self, name: str, elements: Iterable[Any]) -> "Collection":
        """Add elements that are known in advance; the runner distributes the elements over the workers."""
        return self.add(Stage(name, given=list(elements)))[MAIN]

    def add(self, stage: Stage) -> "dict[str, Collection]":
        """Add a stage. Returns the stage's collections by tag."""
        self.stages.append(stage)
        return {tag: Collection(self, (Output(len(self.stages) - 1, tag),)) for tag in stage.tags}

    def join(self, name: str, collections: "Mapping[str, Collection]") -> "Collection":
        """Group the (key, value) pairs of several collections by key into (key, {collection name: values})."""
        named = [each.map(f"{name}: {of}", _name_value, of) for of, each in collections.items()]
        return flatten(named).group(name).map(f"{name}: together", _values_by_name, tuple(collections))


@dataclass(frozen=True)
class Collection:
    """Elements that stages of a flow produce, in no particular order."""

    flow: Flow
    outputs: tuple[Output, ...]

    def __add__(self, other: "Collection") -> "Collection":
        return Collection(self.flow, self.outputs + other.outputs)

    def map(self, name: str, function: Callable[..., Any], *arguments: Any) -> "Collection":
        """Call `function(element, *arguments)`, which returns one element.

        If an argument is a collection of (key, value) pairs, the function receives all pairs as a dictionary.
        """
        return self._add(name, "map", function, arguments)[MAIN]

    def flat_map(self, name: str, function: Callable[..., Any], *arguments: Any) -> "Collection":
        """Call `function(element, *arguments)`, which yields elements."""
        return self._add(name, "flat_map", function, arguments)[MAIN]

    def map_partitions(self, name: str, function: Callable[..., Any], *arguments: Any) -> "Collection":
        """Call `function(elements, *arguments)`, which takes some of the elements at a time, and yields elements."""
        return self._add(name, "map_partitions", function, arguments)[MAIN]

    def split(
        self, name: str, tags: Sequence[str], function: Callable[..., Any], *arguments: Any, partitions: bool = False
    ) -> "dict[str, Collection]":
        """Like `flat_map` or `map_partitions`, but `function` yields `Tagged` elements. Returns collections by tag."""
        return self._add(name, "map_partitions" if partitions else "flat_map", function, arguments, tags)

    def group(self, name: str) -> "Collection":
        """Group pairs (key, value) into (key, values)."""
        return self.flow.add(Stage(name, self.outputs))[MAIN]

    def _add(
        self,
        name: str,
        kind: WorkKind,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        tags: Sequence[str] = (),
    ) -> "dict[str, Collection]":
        sides = {n: given.outputs for n, given in enumerate(arguments) if isinstance(given, Collection)}
        work = Work(kind, function, tuple(None if n in sides else given for n, given in enumerate(arguments)))
        return self.flow.add(Stage(name, self.outputs, work=work, tags=(MAIN, *tags), sides=sides))


def flatten(collections: Sequence[Collection]) -> Collection:
    """Merge one or more collections into one collection."""
    return Collection(collections[0].flow, tuple(output for each in collections for output in each.outputs))


def by_tag(made: Iterable[Any], tags: Iterable[str]) -> Outputs:
    """Group the results of a stage's work by tag."""
    outputs: Outputs = {tag: [] for tag in tags}
    for element in made:
        if isinstance(element, Tagged):
            outputs[element.tag].append(element.value)
        else:
            outputs[MAIN].append(element)
    return outputs


def group_by_key(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Elements]]:
    """Group pairs (key, value) into (key, values), in the order of arrival."""
    groups: defaultdict[Any, Elements] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return list(groups.items())


def _name_value(element: tuple[Any, Any], name: str) -> tuple[Any, tuple[str, Any]]:
    return element[0], (name, element[1])


def _values_by_name(element: tuple[Any, Iterable[tuple[str, Any]]], names: Sequence[str]) -> tuple[Any, Outputs]:
    return element[0], {name: [] for name in names} | dict(group_by_key(element[1]))


@dataclass(frozen=True)
class FileExchange:
    """Exchange through files under a prefix that every worker can read. Work that is tried again writes a new file."""

    prefix: str

    def send(self, batches: Iterable[tuple[K, pa.RecordBatch]]) -> Iterator[tuple[K, Packet]]:
        """Convert (destination, batch) to (destination, packet) that any worker can `receive`. Raises StorageError."""
        out = pa.BufferOutputStream()
        places: list[tuple[K, int, int]] = []
        for destination, batch in batches:
            start = out.tell()
            with pa.ipc.new_stream(out, batch.schema, options=_OPTIONS) as stream:
                stream.write_batch(batch)
            places.append((destination, start, out.tell() - start))
        if not places:
            return
        url = join(self.prefix, f"{uuid.uuid4().hex}.arrow")
        content = memoryview(out.getvalue())
        storage.write_bytes(url, content, durable=False)
        for destination, start, size in places:
            yield destination, (url, start, size, crc32(content[start : start + size]))


def send_together(exchange: FileExchange, batches: Iterable[tuple[K, pa.RecordBatch]]) -> Iterator[tuple[K, Packet]]:
    """Send (destination, batch) as a few long messages instead of many short messages. Raises StorageError."""
    for held in batch_by_size(batches, lambda pair: pair[1].nbytes, _HELD_BYTES):
        yield from exchange.send((destination, pa.concat_batches(some)) for destination, some in group_by_key(held))
        del held  # frees memory before the next batches arrive


def split_by(batch: pa.RecordBatch, by: np.ndarray) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield (value, rows with this value in order) for each value of `by` [B], one a row, in ascending order."""
    if not len(by):
        return
    order = np.argsort(by, kind="stable")
    values, starts = np.unique(by[order], return_index=True)
    batch = batch.take(pa.array(order))
    for value, start, stop in zip(values.tolist(), starts.tolist(), [*starts[1:].tolist(), len(by)], strict=True):
        yield value, batch.slice(start, stop - start)


def receive(packets: Iterable[Packet], fields: Sequence[int] | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the batches of `packets` in order; if `fields` is given, read only the columns with these numbers.

    Raises StorageError if a file is missing or permanently damaged.
    """
    options = pa.ipc.IpcReadOptions(included_fields=fields)
    for url, start, size, checksum in packets:
        try:
            content = storage.read_range(url, start, start + size, checksum=checksum)
        except FileNotFoundError:
            raise StorageError(
                f"{url}: this temporary file is missing; perhaps another command removed the file. Run the same "
                "command again."
            ) from None
        with pa.ipc.open_stream(pa.py_buffer(content), options=options) as stream:
            yield stream.read_next_batch()


def gather(packets: Iterable[Packet], schema: pa.Schema, columns: Sequence[str] | None = None) -> pa.Table:
    """Return the rows of all packets in order of arrival; an empty table if there are no packets.

    columns: names of the columns of `schema` to decode; None: all columns.
    """
    fields = None if columns is None else sorted(schema.get_field_index(name) for name in columns)
    if fields is not None:
        schema = pa.schema([schema.field(number) for number in fields])
    return pa.Table.from_batches(receive(packets, fields), schema)


def pack_locations(packets: Iterable[Packet]) -> pa.RecordBatch:
    """Return packets as rows, sorted: with many packets, the list is itself a message, and its packet an element."""
    rows = [dict(zip(_PACKETS.names, packet, strict=True)) for packet in sorted(packets)]
    return pa.RecordBatch.from_pylist(rows, _PACKETS)


def read_locations(packet: Packet | None) -> list[Packet]:
    """Read a message of `pack_locations`: its packets; an empty list if `packet` is None. Raises StorageError."""
    batches = receive([] if packet is None else [packet])
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def to_record_batch(table: pa.Table) -> pa.RecordBatch:
    """Return all rows of a table as one batch, which can be sent."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)
