"""Section `loss`: options of every kind of loss, and the kinds."""

from pydantic import Field

from trainer.config.kinds import KindSection

LOSSES = {
    "bce": "trainer.losses.binary:OneVsAll",  # DEXML's equation 2
    "softmax": "trainer.losses.contrastive:SoftmaxCrossEntropy",  # 3
    "infonce": "trainer.losses.contrastive:InfoNCE",  # 4
    "decoupled": "trainer.losses.contrastive:DecoupledSoftmax",  # 5
    "softtopk": "trainer.losses.soft_top_k:SoftTopK",  # 6
    "triplet": "trainer.losses.triplet:Triplet",
}


class LossSection(KindSection):
    """The loss over any candidates (DEXML, sections 3 and 4); scores are x.w / temperature."""

    NAME = "loss"
    KINDS = LOSSES

    kind: str = "bce"
    temperature: float = Field(1.0, gt=0, description="tau: scores are divided by it")
    chunk: int = Field(
        0,
        ge=0,
        description="labels scored at a time, anew in every pass; 0: all scores of the rank are kept, [B, L / G]",
    )

    def check_vectors(self, unit: bool) -> None:
        """Raise ValueError for options that the vectors rule out; `unit`: all of them have length 1."""
