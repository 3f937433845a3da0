"""Contenders: the few recipes that could be best on a data set."""

import math
from typing import NamedTuple

from extremis.auto.survey import Survey

_EVERY_LABEL = 8_000  # up to so many, scoring every label costs about as much as a shared pool
_NGRAM_WEIGHTS = (0.1, 0.4, 1.0)
_LEAST_WEIGHT = 0.01
# On WordNet 10 a query instead of 2 gain 0.3 P@5, and double the time: each is one more label to encode.
_FEW_MINED = "negatives.hard=2"
_NO_TEXTS = "data.label_texts=false"  # of labels that are queries too: each would be a point twice


class Contender(NamedTuple):
    """A recipe by name, and what is changed in it."""

    recipe: str
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of its trial: the recipe and the values that are changed."""
        return "-".join([self.recipe, *(change.partition(".")[2].replace("=", "-") for change in self.changes)])

    def changed(self, *changes: str) -> "Contender":
        """Return the same recipe with more changes."""
        return self._replace(changes=(*self.changes, *changes))


def contenders(survey: Survey) -> list[Contender]:
    """List one contender of each kind that the data allows: one-vs-all, decoupled softmax, a dual encoder."""
    sampled = survey.facts.labels > _EVERY_LABEL
    texts = "true" if survey.labels_have_texts else "false"
    kinds = [Contender("astra" if sampled else "renee", (f"data.label_texts={texts}",))]
    if survey.labels_have_texts:
        changes = (_FEW_MINED, _NO_TEXTS) if survey.is_symmetric else (_FEW_MINED,)
        kinds += [Contender("decoupled"), Contender("dexml-sampled", changes)]
    read = () if survey.inputs == "tokens" else (f"encoder.inputs={survey.inputs}",)
    return [kind.changed(*read) for kind in kinds]


def variations(best: Contender, weight: float) -> list[Contender]:
    """List the best contender with other weights of n-grams than its own, which decide most of what words are like."""
    nearest = min(_NGRAM_WEIGHTS, key=lambda value: abs(math.log(value / max(weight, _LEAST_WEIGHT))))
    return [best.changed(f"encoder.ngram_weight={value:g}") for value in _NGRAM_WEIGHTS if value != nearest]
