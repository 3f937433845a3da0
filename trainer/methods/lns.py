"""LNS: hard negatives from hash tables over the classifier's vectors, and random negatives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.methods.astra import RandomNegatives, settle_random
from trainer.methods.recipe import ClassifierRecipe
from trainer.methods.settling import Draft, settle_classifier, settle_encoder, settle_length
from trainer.negatives.base import MOST_FRESH
from trainer.negatives.lsh_section import LshSection

if TYPE_CHECKING:
    from trainer.negatives.base import NegativeSource, SourceContext


class LshNegatives(RandomNegatives):
    """Labels that share a bucket with the query, with weight 1, and random labels (section 1.2)."""

    lsh: LshSection = LshSection()

    @property
    def max_hard(self) -> int:
        return self.lsh.most


class Lns(ClassifierRecipe):
    """Negatives from hash tables that rehash changed vectors; the paper's loss is softmax over sampled labels."""

    negatives: LshNegatives = LshNegatives()

    @classmethod
    def settle(cls, draft: Draft) -> None:
        settle_length(draft)
        settle_encoder(draft)
        labels, pool = draft.statistics.labels, settle_random(draft)
        settle_classifier(draft, pool == "own" and labels <= MOST_FRESH, f"negatives.pool = {pool}, {labels:,} labels")

    def open_sources(self, context: SourceContext) -> list[NegativeSource]:
        from trainer.negatives.lsh import HashedNegatives  # imported at first use: it compiles loops

        return [HashedNegatives(self.negatives.lsh, context.vectors, context.seed)]
