"""Section `classifier`: the vectors of labels and their optimizer."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.options import MOST_RATE, Options


class Classifier(Options):
    """Vectors w_l in R^D, updated on touched rows only."""

    optimizer: Literal["sgd", "adagrad", "adam"] = Field("adagrad", description="of the vectors, touched rows only")
    lr: float = Field(0.1, gt=0, le=MOST_RATE, description="rate of the vectors")
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd, kept by row")
    weight_decay: float = Field(
        0.0, ge=0, lt=1, description="decoupled: a row is multiplied by 1 - lr * weight_decay a step"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of the vectors; the narrower ones are rounded stochastically, computed in float32"
    )
    storage: str = Field(
        "memory",
        description="where vectors and optimizer rows are while training: memory, that of the device; host, main "
        "memory beside a GPU, which gets a step's rows; or a directory on a local disk with room for them, for a file "
        "that is mapped and leaves nothing behind",
    )
    bias: bool = Field(False, description="a last column that x meets with a constant 1")
    initial: Literal["random", "labels"] = Field(
        "random",
        description="the vectors before the first step. random: normal numbers. labels: the untrained encoder's "
        "embeddings of the labels' texts; for a pre-trained encoder, or many labels with few training points",
    )
    initial_scale: float = Field(
        0.0, ge=0, description="standard deviation of random initial vectors; length of those from labels"
    )
    initial_bias: float = Field(0.0, description="bias that each vector begins with")
    normalize: bool = Field(
        False, description="vectors have length 1: at the start, and after a step those that it touches"
    )

    @model_validator(mode="after")
    def _check(self) -> "Classifier":
        if self.normalize and (self.initial_scale != 1 or self.bias or self.dtype != "float32"):
            raise ValueError(
                "classifier.normalize keeps vectors at length 1: it needs classifier.initial_scale = 1, "
                "classifier.bias = false and classifier.dtype = 'float32'"
            )
        if self.initial == "labels" and not self.initial_scale:
            raise ValueError("classifier.initial = 'labels' needs classifier.initial_scale, the length of the vectors")
        return self
