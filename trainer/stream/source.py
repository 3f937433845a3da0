"""Sources of training rows: a table of points, its positives, and the negatives joined to it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from schemas.errors import InputError, TableError
from schemas.layout import CLUSTERS, LABEL_TEXTS, DataLayout
from schemas.table import Table
from trainer.inputs import Kind, require_inputs
from trainer.schedule import MOST_WEIGHT
from trainer.stream.part import WHOLE, Part


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
        return self.table.rows

    @property
    def negatives_width(self) -> int:
        """K of the joined negatives; 0 where there are none. Raises TableError."""
        return 0 if self.negatives is None else self.negatives.width("label_ids")

    def with_negatives(self, url: str | None) -> "Source":
        """Join the rows with the table at `url`. Raises TableError when it was made from other rows."""
        if url is None:
            return replace(self, negatives=None)
        negatives = Table.open(url, "negatives")
        negatives.require_aligned(self.table, "Mine it again.")
        return replace(self, negatives=negatives)

    def in_clusters(self, url: str) -> "Source":
        """Take the rows in the order of the clustered table at `url`. Raises TableError when it has other rows."""
        table = Table.open(url, "queries")
        table.require_made_from("queries", self.table)
        if CLUSTERS not in table.parameters or table.rows != self.rows:
            raise TableError(
                f"{url}: not the rows of {self.table.url} in cluster order. Make it with extremis cluster."
            )
        return replace(self, table=table, negatives=None)


def open_queries(data: DataLayout, split: str) -> Table:
    """Open the queries of `split`. Raises InputError where DATA has no such split, TableError where unfinished."""
    prefix = "queries/"
    splits = [name.removeprefix(prefix) for name in Table.open(data.root, "data").parents if name.startswith(prefix)]
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
