"""Score a model on a split: its rows, the statistics of its labels, the scoring, and validation during training."""

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import torch

from schemas.errors import InputError, TableError, option
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of, list_column
from schemas.shard_files.shards import RETIRED
from schemas.shares import ALL_ROWS, RowShare
from schemas.table import PartTable, Table
from schemas.versions import Version
from trainer.evaluation.metrics import LabelGroups, Metrics, Weakest, ZeroShot, label_groups, paired_difference
from trainer.evaluation.ranking import Ranked, Ranking
from trainer.group import ALONE, Group, label_range
from trainer.input_kinds import InputKind
from trainer.inputs import Inputs, require_inputs, scored_columns
from trainer.methods.sections import Data, Train, Validation
from trainer.model import Model
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
            f"train with {option('set', {'data.holdout': 0.02})}."
        )
    table, share = _of_training(data, training_data), training_data.held_out_rows
    return table, share if queries is None else share.first(table, queries)


def _of_training(data: DataLayout, training_data: Data) -> Table:
    """Open the queries, held-out rows included, that a run on `training_data` takes its rows from."""
    table = open_queries(data, training_data.split)
    return table.of_parts(table.choose_parts(training_data.parts)) if training_data.parts else table


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
            f"{error} {what} is fitted on queries that the run was not trained on. Create a split val with `extremis "
            f"shard --validation 0.05`, train with {option('set', {'data.holdout': 0.02})}, or name another split."
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
def _count_points(data: DataLayout, split: str, digest: str, parts: tuple[str, ...]) -> tuple[np.ndarray, int]:
    """Count the points of `parts`, per label and in total; cached per `digest`, because the data may change."""
    table = open_queries(data, split)
    rows = table.of_parts(table.choose_parts(parts))
    frequency = np.zeros(Table.open(data.labels, "labels").rows, np.int64)
    for group in rows.batches(["label_ids"]):
        frequency += np.bincount(list_column(group, "label_ids").entries, minlength=len(frequency))
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
        if self.retired is None and self.trained_labels is None and not seen_only:
            return None
        kept = np.ones(len(self.frequency), bool) if self.retired is None else ~self.retired
        if seen_only:
            kept = kept & (self.frequency > 0)
        return np.flatnonzero(kept[: self.trained_labels])


def label_statistics(data: DataLayout, training_data: Data | None = None) -> LabelStatistics:
    """Read frequencies from the labels table, and A and B from the data's manifest; A and B are never guessed.

    If `training_data` is a window of parts, frequencies and propensities are computed from the window. Raises
    InputError if a part does not exist. Raises TableError.
    """
    points: Any
    if training_data is not None and training_data.parts:
        queries = open_queries(data, training_data.split)
        parts = tuple(part.name for part in queries.choose_parts(training_data.parts))
        frequency, points = _count_points(data, training_data.split, queries.digest, parts)
    else:
        labels = Table.open(data.labels, "labels")
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
    for rows in RowShare(stop, 1.0).batches(_of_training(data, training_data), ["label_ids"]):
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


KS = (1, 3, 5, 10)


@dataclass
class SplitScores:
    """Results of scoring `rows` rows of a split; `filtered`: pairs (query, label) that the filter removes.

    The metrics contain all rows, except rows without active labels if labels are retired. `ids` [n]: ids of these rows
    in the table; `counted` [n]: their places among the rows that were read.
    """

    metrics: Metrics
    weakest: Weakest
    groups: dict[str, LabelGroups]
    zero_shot: ZeroShot | None
    parts: Sequence[PartTable]
    rows: int
    filtered: int
    ids: np.ndarray
    counted: np.ndarray

    @property
    def queries(self) -> int:
        """Number of queries in the metrics."""
        return len(self.counted)

    def report(self, resamples: int = 1000) -> dict:
        """Return metrics x 100 with 95 % intervals, and further results.

        The further results are the weakest queries, recall per training frequency, metrics per part, and zero-shot
        metrics if measured.
        """
        report = {
            "queries": self.queries,
            "without_active_labels": self.rows - self.queries,
            "filter_pairs": self.filtered,
            **self.metrics.report(resamples),
            "weakest": self.weakest.report(),
            **{name: groups.recall() for name, groups in self.groups.items()},
        }
        if len(self.parts) > 1:
            report["parts"] = self.metrics.by_part(self.parts, self.ids)
        if self.zero_shot is not None:
            report["zero_shot"] = self.zero_shot.report(resamples)
        return report


@dataclass(frozen=True)
class SplitScorer:
    """Scores a model on one split of DATA.

    Each rank of `group` embeds a part of the queries, and scores all queries against the labels of the rank. All ranks
    get the same scores.
    """

    model: Model
    queries: Table
    labels: Table
    statistics: LabelStatistics
    group: Group
    ranking: Ranking
    share: RowShare

    @classmethod
    def open(
        cls,
        data: DataLayout,
        model: Model,
        split: str,
        group: Group = ALONE,
        ranking: Ranking | None = None,
        statistics: LabelStatistics | None = None,
        training_data: Data | None = None,
        window: str | Sequence[str] = "",
        queries: int | None = None,
    ) -> "SplitScorer":
        """Open a split. `ranking`: by default, the model's vectors. `statistics`: label statistics, if already read.

        `training_data`: the rows that the model was trained on, which determine the held-out rows. `window` and
        `queries`: as in `open_split`. Raises InputError for a missing split, or a split without the columns that the
        model reads; TableError if the split is damaged.
        """
        table, share = open_split(data, split, training_data or Data(), window, queries)
        require_inputs(table, model.inputs)
        labels, statistics = Table.open(data.labels, "labels"), statistics or label_statistics(data, training_data)
        return cls(model, table, labels, statistics, group, ranking or Ranking.of(model, group), share)

    @property
    def rows(self) -> int:
        """Number of queries of the split."""
        return self.share.rows(self.queries)

    def score(
        self,
        limit: int | None = None,
        on_rows: Callable[[int], None] | None = None,
        filter: bool = True,
        ks: Sequence[int] = (),
        seen_only: bool = False,
        zero_shot: bool = False,
        collect: Callable[[np.ndarray, np.ndarray, Ragged, Inputs], None] | None = None,
    ) -> SplitScores:
        """Score `limit` queries of all parts (by default all) at each k of KS and `ks`; `filter=False`: without filter.

        `seen_only`: labels without training points are not candidates. `zero_shot`: also report metrics for labels
        without training points. `collect` gets the best labels and their scores [B, K], the positives and the inputs of
        each batch of queries in the metrics. Raises InputError if `seen_only` and `zero_shot` are given, and for
        `zero_shot` if every label has training points.
        """
        frequency = self.statistics.frequency
        ks = sorted({*KS, *ks})
        unseen = ZeroShot(frequency, ks, self.statistics.candidates()) if zero_shot else None
        if zero_shot and seen_only:
            raise InputError(f"{option('zero_shot', True)} and {option('seen_only', True)}: give only one of the two.")
        candidates = self.statistics.candidates(seen_only)
        metrics, weakest = Metrics(ks, self.statistics.inverse_propensity), Weakest()
        groups = label_groups(self.labels, frequency, ks)
        counted, retired = [np.zeros(0, np.int64)], self.statistics.retired
        seen = filtered = 0
        tokens = {"input_ids"} & {*self.queries.columns}
        columns = sorted({*scored_columns(self.queries, self.model.columns), *tokens})
        for rows in self.share.batches(self.queries, columns, limit):
            filters = filters_of(rows) if filter else Ragged.empty(rows.num_rows)
            filtered += len(filters.values)
            x, inputs = self._embed(rows), Inputs.of(rows, self.model.columns)
            scores, top = self.ranking.top_k(x, max(ks), filters, candidates, inputs)
            positives = list_column(rows, "label_ids")
            numbers = seen + np.arange(rows.num_rows)
            texts = _number(list_column(rows, "input_ids")) if tokens else None
            if retired is not None:
                positives = positives.keep(~retired[positives.values])
            weakest.update(top, positives)
            if retired is not None:  # without active labels a query has no label to find
                labelled = np.flatnonzero(positives.counts)
                numbers, x, top, scores = numbers[labelled], x[labelled], top[labelled], scores[labelled]
                filters, positives = filters.take(labelled), positives.take(labelled)
                inputs, texts = inputs.take(labelled), texts[labelled] if texts is not None else None
            counted.append(numbers)
            if collect is not None:
                collect(top, scores, positives, inputs)
            metrics.update(top, positives, texts)
            for counter in groups.values():
                counter.update(top, positives)
            if unseen is not None:
                labels = unseen.labels

                def rank(some: np.ndarray) -> np.ndarray:
                    return self.ranking.top_k(x[some], max(ks), filters.take(some), labels, inputs.take(some))[1]

                unseen.update(top, positives, texts, rank)
            seen += rows.num_rows
            if on_rows is not None:
                on_rows(seen)
        places, parts = np.concatenate(counted), self.queries.parts
        ids = self.share.ids(self.queries, limit)[places]
        return SplitScores(metrics, weakest, groups, unseen, parts, seen, filtered, ids, places)

    def _embed(self, rows: pa.Table) -> torch.Tensor:
        group = self.group
        parts = [label_range(rows.num_rows, rank, group.ranks) for rank in range(group.ranks)]
        start, stop = parts[group.rank]
        part = self.model.embed_table(rows.slice(start, stop - start))
        return group.all_gather(part, [stop - start for start, stop in parts])


@dataclass(frozen=True, eq=False)
class PopularLabels:
    """Ranks labels by `frequency` [L], alike for every row; takes the places of a model and of its `Ranking`."""

    frequency: np.ndarray
    inputs: ClassVar[InputKind] = "none"
    columns: ClassVar[tuple[str, ...]] = ()

    def embed_table(self, rows: pa.Table) -> torch.Tensor:
        """Return no numbers for each row, [B, 0]."""
        return torch.zeros(rows.num_rows, 0)

    def top_k(self, x: torch.Tensor, k: int, filters: Ragged, candidates: np.ndarray | None = None, *_: Any) -> Ranked:
        """Return the same as `Ranking.top_k`."""
        labels = np.arange(len(self.frequency)) if candidates is None else candidates
        best = labels[np.argsort(-self.frequency[labels], kind="stable")[: k + filters.longest]]
        ranking = np.tile(best, (len(x), 1))
        ids, scores = filters.filter_ranking(ranking, self.frequency[ranking].astype(np.float64), k)
        return scores, ids


def measure_popularity(
    data: DataLayout,
    split: str,
    training_data: Data,
    queries: int,
    ks: Sequence[int] = (),
    window: str | Sequence[str] = "",
) -> dict[str, float]:
    """Return metrics of predicting the most frequent labels, on the first `queries` of `split` or of parts in `window`.

    Raises InputError if the split does not exist. Raises TableError.
    """
    statistics = label_statistics(data, training_data)
    popular: Any = PopularLabels(statistics.frequency)
    scorer = SplitScorer.open(data, popular, split, ALONE, popular, statistics, training_data, window, queries)
    return scorer.score(queries, ks=ks).metrics.result()


def _number(texts: Ragged) -> np.ndarray:
    """Return a number of each text, uint64 [B], by which equal texts are known."""
    rows = np.split(texts.entries, texts.offsets[1:-1] - texts.offsets[0])
    digests = b"".join(hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows)
    return np.frombuffer(digests, "<u8")


@dataclass(frozen=True)
class Validator:
    """Scores `options.split`, or else the rows that `training_data` leaves out, as often as `options` requests."""

    options: Validation
    training_data: Data
    data: DataLayout
    group: Group

    def check(self, inputs: InputKind) -> None:
        """Check that the split exists and has the necessary columns, and that the data supports the metric.

        `inputs`: the inputs of the encoder. Raises InputError, TableError.
        """
        if not self._split:
            return
        table, share = open_split(self.data, self._split, self.training_data, self.options.parts)
        require_inputs(table, inputs)
        if not share.rows(table):
            raise InputError(
                f"{table.url}: no rows of {self._split} to validate on. Raise data.holdout, or set validation.split to "
                "a split with rows."
            )
        name = self.options.metric
        if name.startswith("PS") and Table.open(self.data.root, "data").parameters.get("propensity") is None:
            raise InputError(
                f"validation.metric = {name!r}: {self.data.root} has no propensity constants (extremis shard "
                f"--propensity A,B). Choose another metric, such as {name.removeprefix('PS')!r}."
            )

    def is_due(self, epochs: int, last: bool) -> bool:
        """Return whether to validate after `epochs` epochs; `last`: whether the run ends here."""
        return bool(self._split) and (last or epochs % self.options.every_epochs == 0)

    def measure(self, model: Model) -> Metrics:
        """Score the split's first rows, the same on every rank. Raises InputError for a missing split."""
        window, queries = self.options.parts, self.options.queries
        scorer = SplitScorer.open(
            self.data, model, self._split, self.group, training_data=self.training_data, window=window, queries=queries
        )
        return self.group.broadcast(scorer.score(queries, ks=[self._k]).metrics)

    def fell(self, scored: Metrics, best: float | None) -> str:
        """Return a description if the metric is below `best` by more than its standard error over texts; else ""."""
        own = scored.contributions()[self.options.metric]
        metric, error = paired_difference([own], [own._replace(achieved=np.zeros_like(own.achieved))], scored.texts)
        if best is None or metric >= best - error:
            return ""
        return (
            f"{self.options.metric} on {self._split} fell from {best:.2f} to {metric:.2f}, by more than its standard "
            f"error of {error:.2f}: the learning rates are too high, or there are too many epochs"
        )

    def odd(self, metrics: dict[str, float]) -> str:
        """Return a description if the metric is below that of the most frequent labels on the same rows; else ""."""
        name = self.options.metric
        popular = self._popular.get(name, 0.0)
        if metrics.get(name, popular) >= popular:
            return ""
        return (
            f"{name} on {self._split} is {metrics[name]:.2f}; predicting the most popular labels for every query gives "
            f"{popular:.2f}"
        )

    @functools.cached_property
    def _popular(self) -> dict[str, float]:
        """Metrics of always predicting the most frequent labels, on the scored rows; computed once, on rank 0."""
        rows = self.data, self._split, self.training_data, self.options.queries
        return self.group.decide(lambda: measure_popularity(*rows, [self._k], self.options.parts))

    @property
    def _k(self) -> int:
        return int(self.options.metric.partition("@")[2])

    @property
    def _split(self) -> str:
        return self.options.split or (HOLDOUT if self.training_data.holdout else "")
