"""Section `logging`: what is recorded while training."""

from pydantic import Field

from schemas.options import Options


class Logging(Options):
    every_steps: int = Field(20, ge=1)
    ranks_every: int = Field(
        0,
        ge=0,
        description="steps between looks at the ranks that a step's hard negatives have among all labels by the model "
        "as it is; 0: none",
    )
    tensorboard: bool = True
