"""Section `train`: the length of a run, its rates and its random numbers."""

from typing import Literal

from pydantic import Field

from schemas.options import DEVICES, MOST_THREADS, Options


class Train(Options):
    """Length of a run, its rates and its random numbers."""

    epochs: int = Field(
        20, ge=1, le=1_000_000, description="passes over the training split; with minutes the most that there may be"
    )
    minutes: float = Field(
        0.0,
        ge=0,
        description="end after about so many minutes of training: before each epoch but the first it is decided, and "
        "recorded, how many more fit at the pace of the last, and rates fall to that end; 0: as long as epochs take",
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="of the order and of all draws")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of all steps with a rising rate")
    decay: Literal["cosine", "linear"] = Field("cosine", description="how rates fall after the warm-up")
    final_lr: float = Field(0.0, ge=0, le=1, description="share of the rate left at the end of the decay")
    positive_weight: float = Field(
        0.0,
        ge=0,
        le=1,
        description="exponent of the inverse propensity that weighs positives; 0, or A and B unknown: all the same",
    )
    positive_ratio: float = Field(
        1.0,
        gt=0,
        description="of bce: weight of every positive over a negative's, the eta+ / eta- with which the hardest "
        "negatives alone train from scratch (MIPS-s, section 3.1: 50)",
    )
    device: str = Field(
        "auto",
        pattern=DEVICES,
        description="cpu, cuda, cuda:N, or auto: a GPU where there is one; a resumed run may have another",
    )
    threads: int = Field(0, ge=0, le=MOST_THREADS, description="torch threads; 0: torch's own choice")
    clip: float = Field(0.0, ge=0, description="greatest norm of the encoder's gradient of a step; 0: any")
    start_from: str = Field(
        "",
        description="a run on an earlier version of the data, whose encoder and vectors, by label id, this one begins "
        "with; epochs, rates and negatives that are not stated are then those of a refresh",
    )
    start_optimizer: bool = Field(False, description="with start_from: take the state of its optimizers too")
    new_labels: Literal["points", "texts", "initial"] = Field(
        "points",
        description="with start_from, where the vectors of new labels begin: as trained ones are to the mean of their "
        "points' embeddings (labels without points: to their text's); all of them so to their texts'; or as in any run",
    )
    encoder_from: str = Field(
        "", description="a run on the same data whose encoder, as its newest checkpoint has it, this one begins with"
    )
    freeze_encoder: bool = Field(
        False, description="the encoder stays as it begins, and encodes without dropout; only the classifier learns"
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=1 << 20,
        description="encode a batch, or a rank's part of it, in so many parts one after the other: the same step, in "
        "less memory, for a second forward pass",
    )
