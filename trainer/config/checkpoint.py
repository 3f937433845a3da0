"""Section `checkpoint`: when checkpoints are written, and how many are kept."""

from pydantic import Field

from schemas.options import Options


class Checkpoint(Options):
    """Checkpoints of a run."""

    every_epochs: int = Field(1, ge=0, description="0: only the last")
    every_steps: int = Field(0, ge=0, description="also within epochs; 0: not")
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept, besides the best")
    background: bool = Field(
        True, description="written while training goes on, from a copy of the encoder and of the rows that change"
    )
