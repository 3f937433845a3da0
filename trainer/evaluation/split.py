"""Data for an evaluation: the rows of a split, label frequencies, propensities and retired labels."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from schemas.errors import InputError, TableError
from schemas.layout import DataLayout
from schemas.shard_files.parquet import list_column
from schemas.shard_files.viewed import RETIRED
from schemas.shares import ALL_ROWS, RowShare
from schemas.table import Table
from schemas.version import Version
from trainer.methods.sections import Data, Train
from trainer.stream import open_queries

HOLDOUT = "holdout"


def open_split(
    data: DataLayout, split: str, training_data: Data, window: str | Sequence[str] = "", queries: int | None = None
) -> tuple[Table, RowShare]:
    """Open the queries of `split`, and the share of rows to score; `training_data`: the training rows of the run.

    `window`: score only these parts of a version. `queries`: of the held-out rows, about this number. Raises
    InputError if the split does not exist, or if no rows were held out. Raises TableError.
    """
    if split != HOLDOUT:
        table = open_queries(data, split)
        return table.of_parts(table.choose_parts(window)) if window else table, ALL_ROWS
    if not training_data.holdout:
        raise InputError(
            f"split {HOLDOUT!r}: this run trains on all rows of {training_data.split}. Name a split of {data.root}, or "
            "train with --set data.holdout=0.02."
        )
    table, share = open_queries(data, training_data.split), training_data.held_out_rows
    table = table.of_parts(table.choose_parts(training_data.parts)) if training_data.parts else table
    return table, share if queries is None else share.first(table, queries)


def open_held_out(data: DataLayout, split: str | None, training_data: Data, what: str) -> tuple[str, Table, RowShare]:
    """Open rows that a run was not trained on, like `open_split`: `split` if given, else the held-out rows, else `val`.

    `what`: name of the result to fit on these rows. Raises InputError if the split does not exist or is empty. Raises
    TableError.
    """
    split = split or (HOLDOUT if training_data.holdout else "val")
    try:
        table, share = open_split(data, split, training_data)
    except InputError as error:
        raise InputError(
            f"{error} {what} is fitted on queries that the run was not trained on. Train with --set data.holdout=0.02, "
            "create a split val with `extremis shard --validation 0.05`, or name another split."
        ) from None
    if not share.rows(table):
        raise InputError(f"{table.url}: this split has no queries to fit {what.lower()} on. Name another split.")
    return split, table, share


def inverse_propensity(frequency: np.ndarray, points: int, a: float, b: float) -> np.ndarray:
    """Return inverse propensities q_l = 1 + C (N_l + B)^-A with C = (ln N - 1)(B + 1)^A; natural logarithm.

    `frequency` [L] int64: N_l, the training points of each label; `points`: N, the number of training points. Returns
    float64 [L]. Raises InputError if N training points cannot have these frequencies. Jain et al. (2016), section 4.
    """
    if points < 1:
        raise InputError(f"propensities need training points; got N = {points}. Compute N from the train split.")
    if frequency.size and not 0 <= frequency.min() <= frequency.max() <= points:
        raise InputError(
            f"training frequencies must be in [0, N]; got {frequency.min()} to {frequency.max()} with N = {points}. "
            "Take the frequencies and N from the same train split."
        )
    scale = (math.log(points) - 1) * (b + 1) ** a
    return 1 + scale * (frequency.astype(np.float64) + b) ** -a


@functools.lru_cache(maxsize=2)
def _count_points(
    data: DataLayout, split: str, digest: str, parts: tuple[str, ...], labels: int
) -> tuple[np.ndarray, int]:
    """Count the points of `parts`, per label and in total; cached per `digest`, because the data may change."""
    table = open_queries(data, split)
    rows = table.of_parts(table.choose_parts(parts))
    frequency = np.zeros(labels, np.int64)
    for group in rows.batches(["label_ids"]):
        frequency += np.bincount(list_column(group, "label_ids").entries, minlength=labels)
    return frequency, rows.rows


def retired_labels(data: DataLayout) -> np.ndarray | None:
    """Return a mask of the retired labels, bool [L]; None if no label is retired. Raises TableError."""
    if not Version.of(Table.open(data.root, "data").manifest).retired:
        return None
    groups = [group.column(RETIRED).to_numpy() for group in Table.open(data.labels, "labels").batches([RETIRED])]
    return np.concatenate([np.zeros(0, bool), *groups])


@dataclass(frozen=True)
class LabelStatistics:
    """`frequency` [L]: training points of each label; `inverse_propensity` [L]: None if A and B are not specified.

    `retired` [L] bool: labels that are not candidates; None: no labels are retired. `trained_labels`: number of labels
    at training time; later labels are not candidates.
    """

    frequency: np.ndarray
    inverse_propensity: np.ndarray | None
    retired: np.ndarray | None = None
    trained_labels: int | None = None

    def candidates(self, seen_only: bool = False) -> np.ndarray | None:
        """Return the labels [C] that may be predicted, ascending; None: all.

        `seen_only`: only labels with training points.
        """
        if self.retired is None and self.trained_labels is None:
            return np.flatnonzero(self.frequency) if seen_only else None
        kept = np.ones(len(self.frequency), bool) if self.retired is None else ~self.retired
        if seen_only:
            kept = kept & (self.frequency > 0)
        return np.flatnonzero(kept[: self.trained_labels])


def label_statistics(data: DataLayout, training_data: Data | None = None) -> LabelStatistics:
    """Read frequencies from the labels table, and A and B from the data's manifest; A and B are never guessed.

    If `training_data` is a window of parts, frequencies and propensities are computed from the window. Raises
    InputError if a part does not exist. Raises TableError.
    """
    labels = Table.open(data.labels, "labels")
    points: Any
    if training_data is not None and training_data.parts:
        queries = open_queries(data, training_data.split)
        parts = tuple(part.name for part in queries.choose_parts(training_data.parts))
        frequency, points = _count_points(data, training_data.split, queries.digest, parts, labels.rows)
    else:
        groups = [group.column("frequency").to_numpy() for group in labels.batches(["frequency"])]
        frequency = np.concatenate(groups) if groups else np.empty(0, np.int64)
        points = labels.parameters.get("training_points")
    retired = retired_labels(data)
    propensity = Table.open(data.root, "data").parameters.get("propensity")
    if propensity is None:
        return LabelStatistics(frequency, None, retired)
    try:
        points = int(points)
        a, b = float(propensity["a"]), float(propensity["b"])
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"{data.root}: cannot read the propensity constants: {error}. Shard the data again.") from None
    return LabelStatistics(frequency, inverse_propensity(frequency, points, a, b), retired)


def trained_frequency(data: DataLayout, training_data: Data) -> np.ndarray:
    """Count the points of each label that a run on `training_data` trains on, int64 [L]. Raises InputError, TableError.

    Reads the labels of the rows that the run leaves out.
    """
    frequency, stop = label_statistics(data, training_data).frequency, training_data.training_rows.stop
    table = open_queries(data, training_data.split)
    table = table.of_parts(table.choose_parts(training_data.parts)) if training_data.parts else table
    for rows in RowShare(stop, 1.0).batches(table, ["label_ids"]):
        frequency = frequency - np.bincount(list_column(rows, "label_ids").entries, minlength=len(frequency))
    return frequency


def positive_weights(
    data: DataLayout, options: Train, say: Callable[[str], None], training_data: Data | None = None
) -> np.ndarray | None:
    """Return positive_ratio x q_l ** positive_weight, [L] float32, for a run on `training_data`; None if all are 1.

    The factor q_l ** positive_weight is scaled to mean 1 over training pairs. If the data specifies no A and B, the
    factor is omitted and `say` reports the omission; A and B are never guessed.
    """
    if options.positive_weight:
        statistics = label_statistics(data, training_data)
        if statistics.inverse_propensity is not None:
            weight = statistics.inverse_propensity**options.positive_weight
            mean = np.average(weight, weights=statistics.frequency)
            return (options.positive_ratio * weight / mean).astype(np.float32)
        say(
            f"{data.root} has no propensity constants, so all positives have the same weight (set constants with "
            "extremis shard --propensity A,B, or set train.positive_weight = 0 to silence this line)"
        )
    if options.positive_ratio == 1:
        return None
    labels = Table.open(data.labels, "labels").rows
    return np.full(labels, options.positive_ratio, np.float32)
