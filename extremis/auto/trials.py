"""Trials: contenders trained for a short while on an excerpt of the data, and scored on rows that none of them sees."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from extremis.auto.excerpt import write_excerpt
from extremis.auto.survey import Contender, Survey
from extremis.evaluation import EvaluateOptions, evaluate
from extremis.supervisor import train
from schemas.layout import DataLayout
from schemas.storage import join
from trainer.config import Recipe
from trainer.config.load import applicable_overrides
from trainer.evaluation.baselines import measure_baselines
from trainer.evaluation.split import HOLDOUT
from trainer.methods.sections import Data
from trainer.settings.facts import measure
from trainer.settings.resolve import resolve
from trainer.stream.sources import ALL_ROWS

METRIC = "nDCG@5"  # of P@1 and P@5 at once
QUERIES = 2_000  # that a trial is scored on, at most
BASELINE_QUERIES = 500  # a long text takes tens of milliseconds
_ROWS = 100_000  # of a trial, fewer of long texts
_LONG = 200  # tokens that cost about as much as all else of a row
_EPOCHS = 2, 4  # until a trial has passed over twice as many rows
_WIDTH = 128  # D of a trial: an order of recipes shows at a quarter of the cost


@dataclass(frozen=True)
class Trial:
    """A contender's score on the rows that are held out, and the seconds that it took."""

    contender: Contender
    metrics: dict[str, float]
    seconds: float

    @property
    def score(self) -> float:
        return self.metrics[METRIC]

    def facts(self) -> dict[str, Any]:
        """Return what a run records of it."""
        metrics = {name: round(self.metrics[name], 2) for name in ("P@1", "P@5", METRIC)}
        return {"recipe": self.contender.recipe, "changes": list(self.contender.changes), **metrics}


@dataclass(frozen=True)
class TrialData:
    """Rows that all trials of a data set are trained and scored on: a `share` of the `rows` at `data`.

    Each passes over them `epochs` times on `device`, and is kept in `folder`.
    """

    data: str
    rows: int
    share: float
    epochs: int
    folder: str
    device: str

    @classmethod
    def prepare(cls, data: str, survey: Survey, folder: str, device: str) -> "TrialData":
        """Write the excerpt of DATA that is small enough into `folder`, if DATA itself is not. Raises ExtremisError."""
        facts = survey.facts
        rows, share = round(_ROWS / (1 + facts.tokens / _LONG)), 1.0
        epochs = min(max(round(2 * rows / max(1, facts.queries)), _EPOCHS[0]), _EPOCHS[1])
        if facts.queries <= rows:
            return cls(data, facts.queries, share, epochs, folder, device)
        if survey.is_symmetric:
            return cls(data, facts.queries, float(f"{rows / facts.queries:.3g}"), epochs, folder, device)
        excerpt = join(folder, "data")
        write_excerpt(DataLayout(data), excerpt, rows)
        drawn = measure(DataLayout(excerpt), "train", ALL_ROWS, label_texts=False).queries
        return cls(excerpt, drawn, share, epochs, folder, device)

    def try_out(self, contender: Contender) -> Trial:
        """Train a contender without tables, and score it.

        A trial that is there already is not trained again. Raises ExtremisError.
        """
        began = time.perf_counter()
        run = join(self.folder, contender.name)
        train(self.data, run, self.recipe(contender), resume=True)
        report = evaluate(self.data, run, EvaluateOptions(split=HOLDOUT, limit=QUERIES), device=self.device)
        return Trial(contender, report["metrics"], time.perf_counter() - began)

    def recipe(self, contender: Contender) -> Recipe:
        """Return the recipe of a trial. Raises InputError, TableError."""
        changes = [
            *contender.changes,
            f"data.share={self.share}",
            f"data.holdout={holdout_share(self.rows)}",
            f"train.epochs={self.epochs}",
            f"encoder.dimension={_WIDTH}",
            f"encoder.hidden={2 * _WIDTH}",
            f"train.device={self.device}",
            "checkpoint.every_epochs=0",
            "validation.every_epochs=1000",
            "logging.tensorboard=false",
            "logging.wandb=",
            "logging.mlflow=",
            f"refresh.start={self.epochs}",  # no table: a miner takes longer to start than a trial to end
        ]
        return resolve(contender.recipe, applicable_overrides(contender.recipe, changes), self.data).recipe

    def baselines(self) -> dict[str, dict[str, float]]:
        """Return the metrics of baselines on the first of the rows that trials are scored on, by name."""
        held_out = Data(holdout=holdout_share(self.rows))
        return measure_baselines(DataLayout(self.data), HOLDOUT, held_out, BASELINE_QUERIES, ranker=False)


def holdout_share(rows: int, queries: int = QUERIES) -> float:
    """Return the share of `rows` that is held out: `queries` of them, a twentieth at most."""
    return float(f"{min(0.05, queries / max(1, rows)):.3g}")  # as it is in recipes, of any number of rows


def best_of(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the best score, the first of equals."""
    return max(trials, key=lambda trial: trial.score)
