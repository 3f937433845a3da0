"""Options of a Hugging Face model used as an encoder; imports no PyTorch."""

from typing import Literal

from pydantic import Field, model_validator

from trainer.methods.kinds import EncoderSection


class TransformerSection(EncoderSection):
    """Options of a Hugging Face model."""

    FREE = EncoderSection.FREE | {"max_tokens", "precision", "compile"}

    BUILT_BY = "trainer.encoders.transformer_encoder:TransformerEncoder"

    kind: Literal["transformer"] = "transformer"
    model: str = Field("", description="the model: a local directory or hub name")
    pooling: Literal["mean", "cls"] = Field(
        "mean", description="vector of a text: the mean of the last hidden states, or the state of the first token"
    )
    bottleneck: bool = Field(False, description="project the model's output to `dimension`")
    max_tokens: int = Field(128, ge=1, description="maximum number of tokens per text")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description=(
            "number type for matrix products (automatic mixed precision); parameters are float32. auto: bfloat16 on a "
            "GPU, float32 on a CPU"
        ),
    )
    compile: bool = Field(
        False, description="compile the model (torch.compile): the first steps take minutes, later steps can be faster"
    )

    @property
    def token_limit(self) -> int:
        return self.max_tokens

    def at_folder(self, folder: str) -> "TransformerSection":
        return self.model_copy(update={"model": folder})

    @model_validator(mode="after")
    def _check(self) -> "TransformerSection":
        if not self.model:
            raise ValueError("encoder.kind = 'transformer' needs encoder.model (a local directory or a hub name)")
        if self.inputs != "tokens":
            raise ValueError(
                f"encoder.inputs = {self.inputs!r}: a transformer reads token ids only; set encoder.kind = 'bag', "
                "or encoder.inputs = 'tokens'"
            )
        return self
