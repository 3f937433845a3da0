"""Validation during training: scores part of a split after some of the epochs."""

import functools
from dataclasses import dataclass

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.table import Table
from trainer.evaluation.evaluate import SplitScorer, measure_popularity
from trainer.evaluation.metrics import half_interval
from trainer.evaluation.split import HOLDOUT, open_split
from trainer.group import Group
from trainer.input_kinds import InputKind
from trainer.inputs import require_inputs
from trainer.methods.sections import Data, Validation
from trainer.model import Model


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

    def measure(self, model: Model) -> dict[str, float]:
        """Return metrics on the split's first rows, the same on every rank. Raises InputError for a missing split."""
        window, queries = self.options.parts, self.options.queries
        scorer = SplitScorer.open(
            self.data, model, self._split, self.group, training_data=self.training_data, window=window, queries=queries
        )
        return self.group.broadcast(scorer.score(queries, ks=[self._k]).metrics.result())

    def fell(self, metric: float, best: float | None) -> str:
        """Return a description if `metric` is below `best` by more than the 95 % interval of `metric`; else ""."""
        interval = half_interval(metric, self._rows)
        if best is None or metric >= best - interval:
            return ""
        return (
            f"{self.options.metric} on {self._split} fell from {best:.2f} to {metric:.2f}, by more than its confidence "
            f"interval of {interval:.2f}: the learning rates are too high, or there are too many epochs"
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
    def _rows(self) -> int:
        queries = self.options.queries
        table, share = open_split(self.data, self._split, self.training_data, self.options.parts, queries)
        return min(share.rows(table), queries)

    @functools.cached_property
    def _popular(self) -> dict[str, float]:
        """Metrics of always predicting the most frequent labels, on the scored rows; computed once, on rank 0."""
        options = self.options
        ask = functools.partial(measure_popularity, self.data, self._split, self.training_data, options.queries)
        return self.group.decide(lambda: ask([self._k], options.parts))

    @property
    def _k(self) -> int:
        return int(self.options.metric.partition("@")[2])

    @property
    def _split(self) -> str:
        return self.options.split or (HOLDOUT if self.training_data.holdout else "")
