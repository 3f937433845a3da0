"""Settings and losses that are odd enough to say so, in one line, when they are met."""

import math
from collections import deque
from collections.abc import Iterator

from trainer.config import ClassifierRecipe, Recipe
from trainer.methods import rules
from trainer.methods.rules import Facts, log_odds

_FAR_BIAS = 1.0  # from the prior: half of what halves P@1
_WINDOW = 100  # steps that a loss is compared with
_JUMP = 3.0  # times the largest of them


def odd_settings(recipe: Recipe, facts: Facts) -> Iterator[str]:
    """Yield a line for each setting that cannot be meant so for data of these `facts`."""
    epochs, tables = recipe.train.epochs, recipe.tables
    start = tables.start if tables and not recipe.clusters else recipe.indexed_from
    if start is not None and start >= epochs:
        yield f"negatives.hard is never used: refresh.start = {start} is not below train.epochs = {epochs}"
    if isinstance(recipe, ClassifierRecipe) and recipe.classifier.bias and recipe.loss.kind == "bce":
        prior = log_odds(facts.prior)
        distance = recipe.classifier.initial_bias - prior
        if abs(distance) > _FAR_BIAS:
            yield (
                f"classifier.initial_bias = {recipe.classifier.initial_bias:g} is {abs(distance):.1f} "
                f"{'above' if distance > 0 else 'below'} the prior of this data, {prior:.1f}: set it to 'prior'"
            )
    if facts.points < recipe.order.batch * 10 and recipe.order.batch > int(rules.batch(facts, {}).value):
        steps = math.ceil(facts.points / recipe.order.batch)
        yield (
            f"order.batch = {recipe.order.batch} makes {steps} steps an epoch of {facts.points:,} training points: "
            "set it to 'auto'"
        )


class LossWatch:
    """Notices a loss that jumps: far above the largest of the last steps, whose batches may be of different sources."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)

    def jumped(self, loss: float) -> float | None:
        """Take in the loss of a step; return the largest before it where it jumped, and then begin anew."""
        largest = max(self._losses) if len(self._losses) == _WINDOW else math.inf
        if loss > _JUMP * largest:
            self._losses.clear()
            return largest
        self._losses.append(loss)
        return None
