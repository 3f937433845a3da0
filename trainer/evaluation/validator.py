"""Validation while a run trains: a part of a split is scored after some epochs, and the best step remembered."""

from dataclasses import dataclass

from schemas.errors import InputError
from schemas.layout import DataLayout
from trainer.config import Validation
from trainer.config.data import Data
from trainer.evaluation.evaluate import Scorer
from trainer.evaluation.held_out import HOLDOUT
from trainer.group import Group
from trainer.model import Model


@dataclass(frozen=True)
class Validator:
    """Scores `options.split`, or else the rows that `trained` leaves out, as often as `options` say."""

    options: Validation
    trained: Data
    data: DataLayout
    group: Group

    def is_due(self, epochs: int, last: bool) -> bool:
        """Tell whether to validate after `epochs` epochs, of which the latest may be the run's `last`."""
        return bool(self._split) and (last or epochs % self.options.every_epochs == 0)

    def measure(self, model: Model) -> dict[str, float]:
        """Return metrics of the split's first rows, the same on every rank. Raises InputError: no such split."""
        options = self.options
        scorer = Scorer.open(self.data, model, self._split, self.group, trained=self.trained)
        scores = scorer.score(options.queries, ks=[int(options.metric.partition("@")[2])])
        return self.group.broadcast(scores.metrics.result())

    @property
    def _split(self) -> str:
        return self.options.split or (HOLDOUT if self.trained.holdout else "")

    def is_best(self, metrics: dict[str, float], best: float | None) -> bool:
        """Compare the metric that decides with the `best` so far. Raises InputError where it is not measured."""
        name = self.options.metric
        if name not in metrics:
            raise InputError(f"validation.metric = {name!r} is not measured on this data; known: {', '.join(metrics)}.")
        return best is None or metrics[name] > best
