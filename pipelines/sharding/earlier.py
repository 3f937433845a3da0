"""The data set that a new version extends: views of its tables for the new version, and its shards by key."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.flow import split_by
from pipelines.formats.base import LABELS, Inputs
from pipelines.options import Again, ShardOptions
from pipelines.sharding.tokenizer import FILE, FrozenTokenizer
from schemas.arrow import DenseModel
from schemas.errors import InputError, TableError, option
from schemas.layout import DataLayout
from schemas.manifest import Manifest, Shard, View
from schemas.storage import join, relative
from schemas.table import Table
from schemas.versions import Version, move_view, open_data, part_name

# Options that determine the content of a row and its split: a version inherits these options.
_INHERITED: tuple[str, ...] = ("tokenizer", "max_tokens", "text", "seed", "propensity_a", "propensity_b", "keep_text")
_INHERITED += ("validation_share", "test_share", "group", "same_key")


@dataclass(frozen=True)
class EarlierData:
    """The data set at `url`, which the version at `data` extends with the part `part`.

    `complete`: whether the input lists all labels; None if the input has a list of labels, but the options do not
    specify whether the list is complete.
    """

    url: str
    data: str
    manifest: Manifest
    part: str
    again: Again
    complete: bool | None
    texts: bool  # whether the input has labels with texts of their own
    tables: Mapping[str, Manifest]  # queries/<split>, labels

    @classmethod
    def open(cls, data: str, inputs: Inputs, options: ShardOptions) -> "EarlierData":
        """Open the data set at `options.onto`. Raises TableError, and InputError if INPUT or options do not fit it."""
        assert options.onto is not None
        url, manifest = options.onto, open_data(options.onto)[0].manifest
        if not inputs.keyed:
            raise InputError(
                f"{option('onto')}: the format {inputs.format} identifies labels by line number, which changes between "
                "versions. Give INPUT in a format with keys, such as JSON lines."
            )
        if "train" not in inputs.splits:
            raise InputError(f"{option('onto')}: INPUT has no points of the split train.")
        version = Version.of(manifest)
        part = options.part or part_name(version.number + 1)
        if part in version.parts:
            raise InputError(f"{option('part', part)}: {url} already has a part with this name. Give another name.")
        names = [name for name in manifest.parents if name == LABELS or name.startswith("queries/")]
        tables = {name: Table.open(join(url, name)).manifest for name in names}
        listed = [part for part in inputs.parts_of(LABELS) if not part.contents.derived]
        complete = None if options.labels is None and listed else bool(listed) and options.labels == "all"
        if options.labels == "all" and not listed:
            raise InputError(f"{option('labels', 'all')}: INPUT has no file of labels.")
        return cls(url, data, manifest, part, options.again, complete, bool(listed), tables)

    @cached_property
    def version(self) -> Version:
        return Version.of(self.manifest)

    @cached_property
    def dense_model(self) -> DenseModel | None:
        """Model that computed the data set's dense vectors; None if there are none, or if they came with the input."""
        return DenseModel.from_parameters(self.manifest.parameters, self.url)

    @property
    def seed(self) -> int:
        """Seed of the hash of keys."""
        return int(self.manifest.parameters["options"]["seed"])

    @property
    def labels(self) -> int:
        """Number of all labels so far, including retired labels: the first id of new labels."""
        return self.tables[LABELS].rows

    def inherit(self, options: ShardOptions) -> ShardOptions:
        """Return `options` with the earlier values of options that affect rows. Raises InputError if values differ."""
        recorded = self.manifest.parameters["options"]
        for name in _INHERITED:
            stated = getattr(options, name)
            if stated not in (ShardOptions.model_fields[name].default, recorded[name]):
                raise InputError(
                    f"{option('onto')}: {name} = {stated!r}, but {self.url} was sharded with {recorded[name]!r}, and "
                    "all versions use the same value. Leave the option out."
                )
        changes = {name: recorded[name] for name in _INHERITED if name != "tokenizer"}
        changes["row_group_rows"] = options.row_group_rows or self.tables["queries/train"].row_group_rows
        return options.model_copy(update=changes)

    def load_tokenizer(self) -> FrozenTokenizer | None:
        """Load the data set's tokenizer; None if the data set has no tokenizer. Raises TableError."""
        if "tokenizer" not in self.manifest.parents:
            return None
        url = DataLayout(self.url).tokenizer
        tokenizer = Table.open(url, "tokenizer")
        files = tokenizer.read_files()
        if FILE not in files:
            raise TableError(f"{url}: {FILE} is missing. Shard the data again.")
        facts = tokenizer.parameters
        return FrozenTokenizer(files, int(facts["vocabulary"]), int(facts["max_tokens"]), {})

    def table_url(self, name: str) -> str:
        """Return the URL of the new version's table `name`."""
        return join(self.data, name)

    @cached_property
    def views(self) -> Mapping[str, tuple[Shard, ...]]:
        """Shards of the earlier tables, as views in the new version's tables, by table name; empty for other names."""
        part, views = self.version.part, defaultdict[str, tuple[Shard, ...]](tuple)
        for name, table in self.tables.items():
            views[name] = views_of(join(self.url, name), self.table_url(name), table, part)
        return views

    def described(self) -> dict[str, Any]:
        """Return the settings that, along with input and options, determine the version's content."""
        return {
            "onto": self.manifest.digest,
            "part": self.part,
            "again": self.again,
            "labels": {None: None, True: "all", False: "new"}[self.complete],
        }


def views_of(before: str, after: str, table: Manifest, part: str) -> tuple[Shard, ...]:
    """Return the non-empty shards of `table` at `before`, which belong to `part`, as views in the table at `after`."""
    shards, place, size = [], relative(after, before), table.row_group_rows or 1
    for entry in table.shards:
        view = entry.view and move_view(entry.view, before, after)
        view = view or View(table=place, part=part, first=0, rows=entry.rows, row_group_rows=size)
        shards.append(entry.model_copy(update={"view": view}))
    return tuple(renumbered(shards))


def renumbered(shards: Sequence[Shard]) -> list[Shard]:
    """Return the non-empty shards, with row ids that start at 0 again."""
    numbered, first = [], 0
    for entry in shards:
        if entry.rows and entry.view is not None:
            numbered.append(entry.model_copy(update={"view": entry.view.model_copy(update={"first": first})}))
            first += entry.rows
    return numbered


@dataclass(frozen=True)
class OlderShards:
    """Shards of an older table of points. A key belongs to shard hash % `count`.

    `numbers`: the position of each shard among all older shards of the split; -1 if the shard has no rows.
    """

    count: int
    numbers: tuple[int, ...]


def older_shards(views: Sequence[Shard]) -> tuple[OlderShards, ...]:
    """Return the tables behind `views`, with their shards' positions: `part-00007-of-00064` is shard 7 of 64."""
    tables: dict[tuple[str, int], dict[int, int]] = {}
    for number, entry in enumerate(views):
        assert entry.view is not None
        _, index, _, count = entry.path.partition(".")[0].split("-")
        tables.setdefault((entry.view.table, int(count)), {})[int(index)] = number
    return tuple(
        OlderShards(count, tuple(numbers.get(index, -1) for index in range(count)))
        for (_, count), numbers in tables.items()
    )


def route_keys(batch: pa.RecordBatch, older: Sequence[OlderShards]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """From rows with `hash` and `key`, yield (number of an older shard, rows whose keys the shard may contain)."""
    keys, hashes = batch.drop_columns(["hash"]), batch["hash"].to_numpy()
    for table in older:
        numbers = np.array(table.numbers, np.int64)[(hashes % np.uint64(table.count)).astype(np.int64)]
        for number, some in split_by(keys, numbers):
            if number >= 0:
                yield number, some
