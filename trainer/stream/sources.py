"""Sources of training rows: a table of points, or a share of its rows, joined with negatives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import CLUSTERS, LABEL_TEXTS, DataLayout, RunLayout, source_of_part
from schemas.options import is_number
from schemas.shares import ALL_ROWS, RowShare
from schemas.table import PartTable, Table, run_tables
from trainer.input_kinds import InputKind
from trainer.inputs import open_queries, require_inputs
from trainer.schedule import MOST_WEIGHT

_WITHOUT_LABELS = (
    "set data.label_texts = false (and leave labels out of data.mix), or shard data that has these columns for labels"
)


@dataclass(frozen=True)
class Source:
    """Rows of `table`; a point's positives are its `label_ids`, or, for a labels table, the label itself.

    `negatives` is aligned with `table`, row group by row group and row by row, so the join is a zip. An epoch deals
    each row of `share` `weight` times, rounded up or down (see `order`). Raises InputError for an invalid weight.
    """

    name: str  # 'queries', 'labels', or the split's name if several are mixed
    table: Table
    negatives: Table | None = None
    weight: float = 1.0
    share: RowShare = ALL_ROWS

    def __post_init__(self) -> None:
        if not (is_number(self.weight) and 0 < self.weight <= MOST_WEIGHT):
            raise InputError(
                f"source {self.name}: a weight of {self.weight!r:.80}; expected a number above 0 and up to "
                f"{MOST_WEIGHT}. Leave out sources that are not used."
            )
        if not (all(map(is_number, self.share)) and 0 <= self.share.start <= self.share.stop <= 1):
            raise InputError(f"source {self.name}: {self.share}; expected 0 <= start <= stop <= 1. Correct the share.")

    @property
    def rows(self) -> int:
        return self.table.rows

    def with_negatives(self, url: str | None, ids_of: str | None = "labels") -> "Source":
        """Join the rows with the table at `url`, or with the newest finished table of the run at `url`.

        Raises TableError if there is no table of these rows whose ids are `ids_of` (None: any ids).
        """
        if url is None:
            return replace(self, negatives=None)
        negatives, run = Table.find(url, "negatives"), RunLayout(url)
        if negatives is None and storage.exists(run.config):
            newest = next(run_tables(run, self.name), None)
            if newest is None:
                raise TableError(
                    f"{url}: this run has no finished table of negatives for {self.name}. Mine a table (extremis "
                    "mine), or train with random negatives only."
                )
            negatives = newest.table
        negatives = negatives or Table.open(url, "negatives")  # which says what is missing
        negatives.require_ids_of(ids_of or negatives.ids_of)
        negatives.require_aligned(self.table, "Mine the table again.")
        return replace(self, negatives=negatives)

    def with_clusters(self, url: str) -> "Source":
        """Take the rows in the order of the clustered table at `url`. Raises TableError if the table has other rows."""
        table = Table.open(url, "queries")
        table.require_made_from("queries", self.table)
        if CLUSTERS not in table.parameters or table.rows != self.rows:
            raise TableError(
                f"{url}: this table does not have the rows of {self.table.url} in cluster order. Make the table with "
                "extremis cluster."
            )
        return replace(self, table=table, negatives=None)

    def require_inputs(self, kind: InputKind) -> None:
        """Refuse rows that lack columns that `kind` reads. Raises InputError with a remedy."""
        require_inputs(self.table, kind, _WITHOUT_LABELS if self.name == LABEL_TEXTS else None)


def open_sources(
    data: DataLayout,
    split: str,
    label_texts: bool,
    inputs: InputKind = "tokens",
    mix: Mapping[str, float] | None = None,
    share: RowShare = ALL_ROWS,
) -> list[Source]:
    """Open the training points: `split`, and label texts if `label_texts`; or the splits in `mix`, sorted by name.

    `share`: the rows of `split` to train on. Raises InputError for an unknown split or missing `inputs`; TableError.
    """
    if mix:
        # Sorted, because the order decides the row ids, and a recipe may list splits in any order.
        splits = sorted(name for name in mix if name != LABEL_TEXTS)
        sources = [Source(name, open_queries(data, name), weight=mix[name]) for name in splits]
    else:
        sources = [Source("queries", Table.open(data.queries(split), "queries"), share=share)]
    if LABEL_TEXTS in mix if mix else label_texts:
        weight = mix[LABEL_TEXTS] if mix else 1.0
        sources.append(Source(LABEL_TEXTS, Table.open(data.labels, "labels"), weight=weight))
    for source in sources:
        source.require_inputs(inputs)
    return sources


def by_shares(sources: Sequence[Source]) -> list[Source]:
    """Return `sources` with weights in proportion to which an epoch deals rows; the least weight is 1.

    Raises InputError if rows of another source would be dealt too often.
    """
    rows = [max(1, source.share.rows(source.table)) for source in sources]
    times = [source.weight * count**-1.0 for source, count in zip(sources, rows, strict=True)]
    least = min(times, default=1.0)
    for source, count, each in zip(sources, rows, times, strict=True):
        if each > MOST_WEIGHT * least:
            other = sources[times.index(least)].name
            raise InputError(
                f"source {source.name}: with this share, an epoch uses each of its {count:,} rows {each / least:,.0f} "
                f"times, and each row of {other} once; expected at most {MOST_WEIGHT} times. Lower this share, or "
                f"raise the share of {other}."
            )
    return [replace(source, weight=each / least) for source, each in zip(sources, times, strict=True)]


class Replay(NamedTuple):
    """Parts that an earlier run was trained on, and how often an epoch deals their rows; other rows are dealt once."""

    trained: frozenset[str]
    times: float


def select_window(sources: list[Source], window: str | Sequence[str], replay: Replay | None = None) -> list[Source]:
    """Return `sources` with the parts of the window in place of the queries, oldest first; raises InputError without
    one.

    Rows of an earlier run, including label texts, are dealt `replay.times` times as often.
    """
    if not window and replay is None:
        return sources

    def of_part(source: Source, part: PartTable) -> Source:
        times = replay.times if replay and part.name in replay.trained else 1.0
        name, table = source_of_part(source.name, part.name), source.table.of_parts([part])
        return Source(name, table, weight=source.weight * times, share=source.share)

    queries, *others = sources
    dealt = [of_part(queries, part) for part in queries.table.choose_parts(window)]
    for source in others:
        dealt += [of_part(source, part) for part in source.table.parts if replay] or [source]
    return [source for source in dealt if source.rows] or dealt[:1]


def clusters_per_group(group_rows: np.ndarray, rows: int, halvings: int) -> np.ndarray:
    """Count the clusters of each row group [M]; a cluster of at most `rows` rows is dealt as 2**halvings parts."""
    return np.minimum(group_rows, -(-group_rows // rows) << halvings)


def count_clusters(sources: Sequence[Source], size: int) -> np.ndarray | None:
    """Count the clusters of about `size` rows in each row group, [M]; None if a source has none. Raises InputError."""
    counts = []
    for source in sources:
        table = source.table
        made: Mapping[str, int] | None = table.parameters.get(CLUSTERS)
        if made is None:
            return None
        halvings = (made["size"] // size).bit_length() - 1
        if size << max(halvings, 0) != made["size"] or size < made["smallest"]:
            raise InputError(
                f"{table.url}: the clusters of {made['size']} rows can be halved down to {made['smallest']} rows, but "
                f"never have {size} rows. Make the table again with `extremis cluster --size N --smallest {size}`, "
                f"where N is {size} times a power of two, or set order.cluster to a size that the table has."
            )
        counts.append(clusters_per_group(np.diff(table.groups.first), made["rows"], halvings))
    return np.concatenate(counts) if counts else None
