"""Trials: contenders trained for a short while on a part of the rows, and scored on rows that none of them sees."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from extremis.auto.contenders import Contender
from extremis.evaluating.evaluate import EvaluateOptions, evaluate
from extremis.training.train import train
from schemas.storage import join
from trainer.config import Recipe
from trainer.evaluation.held_out import HOLDOUT
from trainer.settings.facts import Facts
from trainer.settings.resolve import resolve

METRIC = "nDCG@5"  # of P@1 and P@5 at once
QUERIES = 2_000  # that a trial is scored on, at most
_ROWS = 36_000  # of a trial, fewer of long texts
_LONG = 200  # tokens that cost about as much as all else of a row
_EPOCHS = 3
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


def holdout_share(rows: int) -> float:
    """Return the share of `rows` that is held out: QUERIES of them, a twentieth at most."""
    return float(f"{min(0.05, QUERIES / max(1, rows)):.3g}")  # as it is in recipes, of any number of rows


def try_out(data: str, folder: str, contender: Contender, facts: Facts) -> Trial:
    """Train a contender in `folder` on a part of the rows of DATA, without tables, and score it.

    A trial that is there already is not trained again. Raises ExtremisError.
    """
    began = time.perf_counter()
    run = join(folder, contender.name)
    train(data, run, trial_recipe(data, contender, facts), resume=True)
    report = evaluate(data, run, EvaluateOptions(split=HOLDOUT, limit=QUERIES))
    return Trial(contender, report["metrics"], time.perf_counter() - began)


def trial_recipe(data: str, contender: Contender, facts: Facts) -> Recipe:
    """Return the recipe of a trial. Raises InputError, TableError."""
    rows = round(_ROWS / (1 + facts.tokens / _LONG))
    # Texts of many labels would crowd the queries out.
    without_texts = ["data.label_texts=false"] if facts.labels > rows else []
    changes = [
        *contender.changes,
        *without_texts,
        f"data.share={min(1.0, rows / max(1, facts.queries)):.3g}",
        f"data.holdout={holdout_share(facts.queries)}",
        f"train.epochs={_EPOCHS}",
        f"encoder.dimension={_WIDTH}",
        f"encoder.hidden={2 * _WIDTH}",
        "checkpoint.every_epochs=0",
        "validation.every_epochs=1000",
        "logging.tensorboard=false",
        f"refresh.start={_EPOCHS}",  # no table: a miner takes longer to start than a trial to end
    ]
    return resolve(contender.recipe, changes, data).recipe


def best_of(trials: Sequence[Trial]) -> Trial:
    """Return the trial with the best score, the first of equals."""
    return max(trials, key=lambda trial: trial.score)
