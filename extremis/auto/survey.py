"""Survey of a data set, and the contenders: the few recipes that may be the best for this data set."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import pyarrow.compute as pc

from extremis.inspecting.data_summary import repeated, texts_of
from schemas.layout import DataLayout
from schemas.shares import ALL_ROWS
from schemas.table import Table
from schemas.text_model import DENSE
from trainer.input_kinds import InputKind, input_names, kind_of
from trainer.inputs import require_inputs
from trainer.methods.sections import Data
from trainer.model import DataSizes
from trainer.settings.data_statistics import DataStatistics, describe_textless_labels, measure
from trainer.stream import open_queries

_ROWS = 200_000  # rows of queries and of labels to compare
_ONE_VS_ALL_LABELS = 8_000  # up to this many labels, scoring all labels costs about as much as a shared pool
_NGRAM_WEIGHTS = (0.1, 0.4, 1.0)
VARIATIONS = len(_NGRAM_WEIGHTS) - 1  # number of variations of the best contender: all weights but the nearest weight
_LEAST_WEIGHT = 0.01
# On WordNet, 10 mined negatives per query instead of 2 gain 0.3 P@5 and double the time: each negative is one more
# label to encode.
_FEW_MINED = "negatives.hard=2"
# A shared pool draws an eighth of this number of labels per step. Mined negatives added at most 0.2 P@1, for half
# more time, on artworks with 9,315 and 15,562 labels.
_FEW_LABELS, _NONE_MINED = 25_600, "negatives.hard=0"
_NO_TEXTS = "data.label_texts=false"  # for labels that are also queries: each would be a training point twice


@dataclass(frozen=True)
class Survey:
    """Statistics of DATA, and the `inputs` that an encoder can read.

    `texts`: fraction of labels that have a text. `symmetric`: fraction of these texts that are also queries.
    `textless`: trained labels without a text, in words, and whether there are too many for a recipe with texts.
    """

    facts: DataStatistics
    inputs: InputKind
    texts: float = 0.0
    symmetric: float = 0.0
    textless: tuple[str, bool] = "", False

    @classmethod
    def of(cls, data: DataLayout) -> "Survey":
        """Survey the training split. Raises InputError, TableError."""
        facts = measure(data, "train", ALL_ROWS, label_texts=False)
        sizes, tables = DataSizes.of(data), (Table.open(data.labels, "labels"), open_queries(data, "train"))
        has_dense = DENSE in tables[1].columns
        inputs = kind_of({"tokens": bool(sizes.vocabulary), "features": bool(sizes.features), "dense": has_dense})
        if inputs == "none":
            require_inputs(tables[1], "tokens")
        if not sizes.vocabulary or (has_dense and DENSE not in tables[0].columns):  # these labels cannot be encoded
            return cls(facts, inputs)
        labels, queries = (texts_of(table, _ROWS) for table in tables)
        filled = pc.sum(pc.greater(pc.binary_length(labels), 0)).as_py() or 0
        too = pc.sum(repeated(labels, queries)).as_py() or 0
        texts, symmetric = filled / max(1, len(labels)), too / max(1, filled)
        return cls(facts, inputs, texts, symmetric, describe_textless_labels(data, inputs, Data()))

    @property
    def labels_have_texts(self) -> bool:
        """True if most labels can be encoded, and a recipe that encodes texts is not refused."""
        return self.texts > 0.5 and not self.textless[1]

    @property
    def is_symmetric(self) -> bool:
        """True if most labels are also queries. Pairs may then have reverse pairs, which an excerpt would lose."""
        return self.labels_have_texts and self.symmetric > 0.5

    def lines(self) -> Iterator[str]:
        """Describe the survey, one fact per line."""
        facts = self.facts
        named = {"tokens": f"{facts.tokens:.0f} tokens", "features": "sparse features", "dense": "a dense vector"}
        read = " and ".join(named[part] for part in input_names(self.inputs))
        yield f"{facts.queries:,} queries of {read}, {facts.labels:,} labels"
        each = facts.pairs / max(1, facts.queries)
        yield f"{each:.1f} labels per query, median number of training points per label: {facts.median_frequency:g}"
        yield f"{self.texts:.0%} of the labels have a text" + (
            f", {self.symmetric:.0%} of these texts are also queries" if self.texts else ""
        )
        if self.textless[1]:
            yield f"odd: {self.textless[0]}: recipes that encode texts of labels are not tried"


class Contender(NamedTuple):
    """A recipe's name, and changes to the recipe."""

    recipe: str
    changes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Name of the contender's trial: the recipe's name and the changed values."""
        stated = (change.partition(".")[2].split("=", 1) for change in self.changes)
        return "-".join([self.recipe, *(f"{name}-{value.rstrip('/').rpartition('/')[2]}" for name, value in stated)])

    @property
    def is_dual_encoder(self) -> bool:
        """True if the recipe is a dual encoder."""
        return _FEW_MINED in self.changes

    def changed(self, *changes: str) -> "Contender":
        """Return the same recipe with more changes."""
        return self._replace(changes=(*self.changes, *changes))


def contenders(survey: Survey, pretrained: str = "") -> list[Contender]:
    """List one contender of each kind that is possible for the data: one-vs-all, decoupled softmax, dual encoder.

    With `pretrained`, a model with token vectors, each contender is listed twice: with and without these vectors.
    """
    sampled, few = survey.facts.labels > _ONE_VS_ALL_LABELS, survey.facts.labels <= _FEW_LABELS
    texts = f"data.label_texts={'true' if survey.labels_have_texts else 'false'}"
    mined = (_NONE_MINED,) if few else ()
    kinds = [Contender("astra", (texts, *mined)) if sampled else Contender("renee", (texts,))]
    if survey.labels_have_texts:
        changes = (_FEW_MINED, _NO_TEXTS) if survey.is_symmetric else (_FEW_MINED,)
        kinds += [Contender("decoupled", mined), Contender("dexml-sampled", changes)]
    read = () if survey.inputs == "tokens" else (f"encoder.inputs={survey.inputs}",)
    starts = [(f"encoder.pretrained={pretrained}",), ()] if pretrained else [()]
    return [kind.changed(*read, *start) for start in starts for kind in kinds]


def variations(best: Contender, weight: float) -> list[Contender]:
    """List variations of the best contender with other n-gram weights, which affect word vectors the most."""
    nearest = min(_NGRAM_WEIGHTS, key=lambda value: abs(math.log(value / max(weight, _LEAST_WEIGHT))))
    return [best.changed(f"encoder.ngram_weight={value:g}") for value in _NGRAM_WEIGHTS if value != nearest]
