"""Statistics of a data set: rows and lengths of points for each split, and the tail of the label frequencies."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from extremis.inspecting.data_summary import summarize
from extremis.inspecting.examples import splits_of
from extremis.inspecting.inspect import sharding_command
from pipelines.formats.names import say_names
from schemas.layout import DataLayout
from schemas.manifest import Manifest
from schemas.shard_files.parquet import list_column
from schemas.table import Table

SAMPLED_GROUPS = 32  # row groups for histograms, spread evenly over a split
RANKS = 200  # points of the tail curve


@dataclass(frozen=True)
class SplitStatistics:
    """Statistics of a split: the numbers of tokens and labels of `sampled` rows, [sampled] each; [0] without tokens."""

    name: str
    manifest: Manifest
    tokens: np.ndarray
    labels: np.ndarray

    @property
    def sampled(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class LabelTail:
    """Training points per label, with the most frequent label at rank 1: `points` [n] for the ranks `rank` [n]."""

    rank: np.ndarray
    points: np.ndarray
    labels: int
    unseen: int
    head_share: float  # share of all training pairs in the most frequent 1 % of the labels


@dataclass(frozen=True)
class DataStatistics:
    """Information about DATA for the page."""

    url: str
    manifest: Manifest
    splits: list[SplitStatistics]
    tail: LabelTail
    rejected: int
    command: str  # command that makes DATA
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # counts of each split, as in `summarize`

    @property
    def files(self) -> str:
        """Names of the first input files."""
        return say_names(sorted(str(entry["file"]) for entry in self.manifest.parameters["input"].values()))


def describe(data: DataLayout) -> DataStatistics:
    """Describe DATA, from manifests, label frequencies and a sample of row groups. Raises TableError."""
    manifest = Table.open(data.root, "data").manifest
    splits = [_split(data, name) for name in splits_of(data)]
    rejected = Table.open(data.rejects, "rejects").rows if manifest.parents.get("rejects") else 0
    counts = summarize(data.root)["splits"]
    command = sharding_command(data.root, manifest)
    return DataStatistics(data.root, manifest, splits, tail_of(frequencies(data)), rejected, command, counts)


def _split(data: DataLayout, name: str) -> SplitStatistics:
    table = Table.open(data.queries(name), "queries")
    counts = {column: np.empty(0, np.int64) for column in ("input_ids", "label_ids")}
    columns, groups = [column for column in counts if column in table.columns], len(table.groups)
    sampled = np.unique(np.linspace(0, groups - 1, min(SAMPLED_GROUPS, groups)).astype(int)).tolist()
    for _, group in table.read_groups(sampled, columns):
        for column in columns:
            counts[column] = np.append(counts[column], list_column(group, column).counts)
    return SplitStatistics(name, table.manifest, *counts.values())


def histograms(counts: Sequence[np.ndarray], bins: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Count the rows of each of S arrays by value, in the same bins of equal width, at most `bins`.

    Returns (lower end [n], rows [S, n]).
    """
    values = np.concatenate(counts)
    if not len(values):
        return np.empty(0, np.int64), np.empty((len(counts), 0), np.int64)
    low, high = int(values.min()), int(values.max())
    width = -(-(high - low + 1) // bins)
    ends = low + width * np.arange((high - low) // width + 1)
    return ends, np.stack([np.bincount((each - low) // width, minlength=len(ends)) for each in counts])


def frequencies(data: DataLayout) -> tuple[np.ndarray, np.ndarray]:
    """Count labels per frequency: (ascending frequency [n], labels [n]). Memory depends on n, not on L."""
    labels: Counter[int] = Counter()
    for group in Table.open(data.labels, "labels").batches(["frequency"]):
        values, counts = np.unique(group.column("frequency").to_numpy(), return_counts=True)
        labels.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
    ascending = np.asarray(sorted(labels.items()), np.int64).reshape(-1, 2)
    return ascending[:, 0], ascending[:, 1]


def tail_of(frequencies: tuple[np.ndarray, np.ndarray]) -> LabelTail:
    """Sample the frequencies of labels with training points at RANKS ranks, evenly spaced on a logarithmic scale."""
    values, labels = frequencies[0][::-1], frequencies[1][::-1]
    last = np.cumsum(labels)  # the last rank with each value
    total = int(last[-1]) if len(last) else 0
    unseen = int(labels[values == 0].sum())
    seen = total - unseen
    if not seen:
        return LabelTail(np.empty(0, np.int64), np.empty(0, np.int64), total, unseen, 0.0)
    rank = np.unique(np.geomspace(1, seen, RANKS).round().astype(np.int64))
    position = np.searchsorted(last, rank)
    head = max(1, total // 100)
    before = np.concatenate([[0], np.cumsum(values * labels)])
    full = int(np.searchsorted(last, head))
    held = before[full] + (head - (last[full - 1] if full else 0)) * values[full]
    return LabelTail(rank, values[position], total, unseen, float(held / before[-1]))
