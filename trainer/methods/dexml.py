"""DEXML: dual encoders. Labels do not have learned vectors; the encoder embeds their texts."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from schemas.options import Options, key
from trainer.methods.recipe import NegativesSection, Recipe, SampledNegatives, TableLabels
from trainer.methods.sections import TableSchedule

_BLOCK = 4096  # labels that a loss over all labels scores at a time


class Positives(Options):
    """Positives that a step trains on."""

    positives: int = key(
        0, "number of positives that each step draws per query, for the loss and for the pool; 0: all positives", ge=0
    )


class LabelTexts(Positives):
    """Labels represented by the embeddings of their texts (sections 3 and 5.2)."""

    shared: bool = key(True, "encode labels with the same encoder as queries")
    label_batch: int = key(
        1024, "eta: number of labels that are encoded at once; a step with more labels encodes each label twice", ge=1
    )


class DualEncoder(Recipe):
    """Recipe of a method that encodes label texts."""

    encodes_labels = True

    head: LabelTexts = LabelTexts()

    @property
    def positives(self) -> int:
        return self.head.positives

    @property
    def encoders(self) -> int:
        return 1 if self.head.shared else 2

    @model_validator(mode="after")
    def _check_encoders(self) -> DualEncoder:
        if self.train.freeze_encoder:
            raise ValueError(
                f"train.freeze_encoder leaves method = {self.method!r} with nothing to learn: choose a method with a "
                "classifier"
            )
        if self.logging.ranks_every:
            raise ValueError(
                f"logging.ranks_every = {self.logging.ranks_every} needs label vectors: leave it out for method = "
                f"{self.method!r}, which has no label vectors"
            )
        return self


class Pool(NegativesSection):
    """Labels that a step scores every query against."""

    pool: Literal["all", "batch"] = key("all", "candidates: every label, or the labels of the batch")


class AllTexts(Pool):
    """Every label (section 4), as in the paper's loss, without sampling."""

    all_labels = True

    def scores(self, batch: int, positives: float) -> float:
        return batch * _BLOCK


class BatchLabels(TableLabels, SampledNegatives, Pool):
    """Positives of the batch and, for each query, m = `hard` near labels: B(1 + m) labels (section 5.4, Table 3)."""


class TextTableSchedule(TableSchedule):
    """Tables of each query's nearest labels, found with the embeddings of queries and labels."""

    index: str = key("auto", "'exact', 'auto' or a Faiss factory string")


class Dexml(DualEncoder):
    """One encoder for queries and labels, or one for each; the paper's loss is decoupled softmax (equation 5)."""

    choices = {**Recipe.choices, "negatives": ("pool", {"all": AllTexts, "batch": BatchLabels})}

    negatives: AllTexts | BatchLabels = AllTexts()
    refresh: TextTableSchedule = TextTableSchedule()

    @property
    def tables(self) -> TableSchedule | None:
        return self.refresh if isinstance(self.negatives, BatchLabels) and self.negatives.hard else None

    @property
    def table_parameters(self) -> dict[str, Any]:
        return {"table_width": self.negatives.table_width, "index": self.refresh.index, "by": "classifier"}
