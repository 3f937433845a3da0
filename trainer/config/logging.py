"""Section `logging`: what is recorded while training."""

from pydantic import Field

from schemas.options import Options


class Logging(Options):
    """Records of a run."""

    every_steps: int = Field(20, ge=1)
    ranks_every: int = Field(
        0,
        ge=0,
        description="steps between measurements of the ranks that a step's hard negatives have among all labels by the "
        "present model; 0: none",
    )
    tensorboard: bool = True
