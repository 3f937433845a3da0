"""Sources of training rows: a table of points, its positives, and the negatives joined to it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from schemas.errors import InputError, TableError
from schemas.layout import CLUSTERS, LABEL_TEXTS, DataLayout
from schemas.manifest import Manifest, open_manifest, require_parent
from trainer.inputs import Kind, require_inputs
from trainer.schedule import MOST_WEIGHT
from trainer.stream.part import WHOLE, Part


@dataclass(frozen=True)
class Table:
    """A published table and its manifest."""

    url: str
    manifest: Manifest

    @classmethod
    def open(cls, url: str, kind: str) -> "Table":
        """Open the table at `url`. Raises TableError when it is unfinished, foreign or damaged."""
        return cls(url, open_manifest(url, kind))


@dataclass(frozen=True)
class Source:
    """Rows of `table`; a point's positives are its `label_ids`, or, for a labels table, the label itself.

    `negatives` is aligned with `table`: shard by shard, row group by row group, row by row, so the join is a zip.
    An epoch deals each row of `part` `weight` times, rounded up or down (`mixing`). Raises InputError where that
    cannot be.
    """

    name: str  # 'queries', 'labels', or the split's where several are mixed
    table: Table
    negatives: Table | None = None
    weight: float = 1.0
    part: Part = WHOLE

    def __post_init__(self) -> None:
        if not (0 < self.weight <= MOST_WEIGHT and math.isfinite(self.weight)):
            raise InputError(
                f"source {self.name}: a weight of {self.weight:g}; expected one above 0 and up to {MOST_WEIGHT}. "
                "Leave out a source that is not to be dealt."
            )

    @property
    def rows(self) -> int:
        return self.table.manifest.rows

    @property
    def negatives_width(self) -> int:
        """K of the joined negatives; 0 where there are none. Raises TableError."""
        if self.negatives is None:
            return 0
        for column in self.negatives.manifest.columns:
            if column.name == "label_ids":
                return int(column.type.rsplit("[", 1)[1].rstrip("]"))
        raise TableError(f"{self.negatives.url}: a negatives table without label_ids. Mine it again.")

    def with_negatives(self, url: str | None) -> "Source":
        """Join the rows with the table at `url`. Raises TableError when it was made from other rows."""
        if url is None:
            return replace(self, negatives=None)
        negatives = Table.open(url, "negatives")
        require_parent(url, negatives.manifest, "queries", self.table.manifest.digest, self.table.url)
        if negatives.manifest.cut != self.table.manifest.cut:
            raise TableError(f"{url}: its shards or row groups do not line up with {self.table.url}. Mine it again.")
        return replace(self, negatives=negatives)

    def in_clusters(self, url: str) -> "Source":
        """Take the rows in the order of the clustered table at `url`. Raises TableError when it has other rows."""
        table = Table.open(url, "queries")
        require_parent(url, table.manifest, "queries", self.table.manifest.digest, self.table.url)
        if CLUSTERS not in table.manifest.parameters or table.manifest.rows != self.rows:
            raise TableError(
                f"{url}: not the rows of {self.table.url} in cluster order. Make it with extremis cluster."
            )
        return replace(self, table=table, negatives=None)


def open_queries(data: DataLayout, split: str) -> Table:
    """Open the queries of `split`. Raises InputError where DATA has no such split, TableError where unfinished."""
    prefix = "queries/"
    splits = [name.removeprefix(prefix) for name in open_manifest(data.root, "data").parents if name.startswith(prefix)]
    if split not in splits:
        raise InputError(f"{data.root}: no split {split!r}; this data set has {', '.join(sorted(splits))}.")
    return Table.open(data.queries(split), "queries")


def open_sources(
    data: DataLayout,
    split: str,
    label_texts: bool,
    inputs: Kind = "tokens",
    mix: Mapping[str, float] | None = None,
    part: Part = WHOLE,
) -> list[Source]:
    """Open the training points: `split`, and `label_texts` if true; or with `mix` the splits that it weighs, by name.

    `part`: the rows of `split` to train on.
    Raises InputError where there is no such split, or they lack what `inputs` reads; TableError.
    """
    if mix:
        # Sorted, so that a recipe may name them in any order: it decides the row ids.
        splits = sorted(name for name in mix if name != LABEL_TEXTS)
        sources = [Source(name, open_queries(data, name), weight=mix[name]) for name in splits]
    else:
        sources = [Source("queries", Table.open(data.queries(split), "queries"), part=part)]
    if LABEL_TEXTS in mix if mix else label_texts:
        weight = mix[LABEL_TEXTS] if mix else 1.0
        sources.append(Source(LABEL_TEXTS, Table.open(data.labels, "labels"), weight=weight))
    for source in sources:
        require_inputs(source.table.url, source.table.manifest, inputs)
    return sources
