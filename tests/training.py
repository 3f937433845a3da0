"""Training step by step, ended wherever a test wants it."""

from collections.abc import Callable, Mapping

import pytest

from trainer.loop import EpochReport, Trainer
from trainer.methods.keys import merge
from trainer.methods.recipe import Recipe


class Killed(Exception):
    """End of the process, simulated."""


def silent(_: str) -> None:
    return None


def with_sections(base: Mapping[str, dict], sections: Mapping[str, dict]) -> Recipe:
    """Return the recipe `base` with some settings of some sections changed; another kind has none of the base's."""
    return Recipe.model_validate(merge(base, sections))


def train(
    trainer: Trainer, stop_after: int | None = None, on_epoch: Callable[[EpochReport], None] | None = None
) -> list[float]:
    """Train; return the losses step by step. Raises Killed after global step `stop_after`."""
    losses: list[float] = []

    def on_step(step: int, total: int, loss: float) -> None:
        losses.append(loss)
        if step == stop_after:
            raise Killed

    for report in trainer.train(on_step):
        if on_epoch is not None:
            on_epoch(report)
    return losses


def assert_resumes(
    data: str, run: str, options: Recipe, losses: list[float], stop: int, resumed_with: Recipe | None = None
) -> int:
    """Train RUN on DATA, end it after global step `stop`, resume it, and check that the rest is that of `losses`.

    `losses`: those of a run that was never stopped. Returns the number of steps of the rest.
    """
    with pytest.raises(Killed):
        train(Trainer.start(data, run, options, silent), stop)
    rest = train(Trainer.resume(data, run, resumed_with or options, silent))
    assert rest == losses[-len(rest) :]
    return len(rest)
