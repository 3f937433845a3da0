"""Section `encoder`: options of every kind of encoder, and the kinds."""

from typing import ClassVar, Literal

from pydantic import Field

from schemas.options import MOST_RATE
from trainer.config.kinds import KindSection

ENCODERS = {
    "bag": "trainer.encoders.bag_encoder:BagEncoder",
    "transformer": "trainer.encoders.transformer:TransformerEncoder",
}


class EncoderSection(KindSection):
    """Text or sparse features to x in R^D."""

    NAME = "encoder"
    KINDS = ENCODERS
    # Options that may differ between an encoder and the one whose parameters it takes.
    FREE: ClassVar[set[str]] = {"dropout", "normalize", "scale", "lr", "weight_decay"}

    inputs: Literal["tokens", "features", "both"] = Field(
        "tokens", description="what is read of a row: its token ids, its sparse features with values, or both"
    )
    dimension: int = Field(256, ge=1, le=1 << 24, description="D; for a transformer the bottleneck, 0 < D")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on x")
    normalize: bool = Field(False, description="L2-normalise x")
    scale: float = Field(1.0, gt=0, description="x is multiplied by it after normalising")
    lr: float = Field(0.01, gt=0, le=MOST_RATE, description="rate of the encoder: of a bag its rows")
    weight_decay: float = Field(
        0.0, ge=0, lt=1, description="decoupled; not of biases and norms, and of a bag's rows in steps that touch them"
    )

    @property
    def token_limit(self) -> int | None:
        """Tokens of a row that the encoder reads, at most; None: all."""
        return None

    def at_folder(self, folder: str) -> "EncoderSection":
        """Return the section of the same encoder whose files are at `folder`, as `Encoder.write` made them."""
        return self

    def differences(self, other: "EncoderSection") -> list[str]:
        """Say which options keep this encoder from taking the parameters of `other`."""
        options, others = self.model_dump(exclude=self.FREE), other.model_dump()
        return [
            f"encoder.{name} is {others[name]!r} there, {value!r} here"
            for name, value in options.items()
            if name in others and value != others[name]
        ]
