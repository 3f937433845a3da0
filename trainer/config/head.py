"""Section `head`: a vector of a classifier for each label, or its text through an encoder."""

from typing import ClassVar

from pydantic import Field

from trainer.config.kinds import KindSection

HEADS = {
    "classifier": "trainer.heads.classifier:Classifier",
    "label-encoder": "trainer.heads.label_encoder:LabelEncoderHead",
}


class HeadSection(KindSection):
    """Kind of a label: a vector of a classifier, or its text through an encoder (DEXML)."""

    NAME = "head"
    KINDS = HEADS
    POOLS: ClassVar[tuple[str, ...]] = ()  # values of `negatives.pool` that go with this kind
    encodes_labels: ClassVar[bool] = False  # True: labels have texts in place of rows

    positives: int = Field(
        0,
        ge=0,
        description="positives a query, drawn anew each step, that it learns and brings to the pool; 0: all. A "
        "classifier draws them with negatives.pool = 'batch'",
    )

    @property
    def encoders(self) -> int:
        """Encoders of a model."""
        return 1
