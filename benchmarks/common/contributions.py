"""Contributions of test queries to metrics, for paired intervals of two runs."""

from collections.abc import Mapping, Sequence

import numpy as np

from schemas.layout import DataLayout, RunLayout
from scoring.fitting import open_fused, scores_of
from trainer.checkpoints import best_step
from trainer.evaluation.evaluate import SplitScorer
from trainer.evaluation.metrics import Contributions, bootstrap, value
from trainer.evaluation.ranking import Ranking
from trainer.model import load_model

COMPARED_METRICS = "P@1", "P@5", "PSP@5"


def contributions(data: str, run: str) -> tuple[dict[str, Contributions], np.ndarray | None]:
    """Return the contributions to COMPARED_METRICS, with the scores that represent the run, and the queries' texts."""
    layout = DataLayout(data)
    _, model, checkpoint = load_model(layout, RunLayout(run), best_step(RunLayout(run)))
    fused = open_fused(data, run, checkpoint, model, "test") if scores_of(run, checkpoint.step) == "fused" else None
    metrics = SplitScorer.open(layout, model, "test", ranking=Ranking.of(model, rerank=fused)).score().metrics
    found = metrics.contributions()
    return {name: found[name] for name in COMPARED_METRICS}, metrics.texts


def mean(runs: Sequence[Mapping[str, Contributions]]) -> dict[str, Contributions]:
    """Return the mean contributions over runs with different seeds on the same queries."""
    first = runs[0]
    return {name: first[name]._replace(achieved=np.mean([run[name].achieved for run in runs], 0)) for name in first}


def gains(
    of: Mapping[str, Contributions], over: Mapping[str, Contributions], texts: np.ndarray | None
) -> dict[str, list[float]]:
    """Return the gain of a run over another run, and the ends of the paired 95 % interval, by metric.

    `texts` [N]: a number of each point's text (None: all differ); points with one text are drawn together.
    """
    differences = {name: of[name]._replace(achieved=of[name].achieved - over[name].achieved) for name in of}
    ends = bootstrap(differences, texts=texts)
    return {name: [round(each, 2) for each in (value(differences[name]), *ends[name])] for name in of}
