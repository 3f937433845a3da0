"""Options that a command reads before PyTorch is loaded."""

from typing import Literal

from pydantic import Field

from schemas.options import Options

Form = Literal["triplets", "tuples", "pairs", "lists", "tevatron", "flagembedding"]


class TupleOptions(Options):
    """Options of `extremis tuples` and of a `TupleStream`."""

    form: Form = Field("tuples", description="Columns of an example, or the library that reads the file.")
    negatives: int | None = Field(
        None, ge=1, description="Number of negatives per example, best first. Default: 1 in triplets, otherwise all."
    )
    keys: bool = Field(False, description="Write keys instead of texts.")
    each_positive: bool = Field(
        False,
        description=(
            "Write an example for each positive of a row. Default: use one positive of each row, and a different "
            "positive in each epoch."
        ),
    )
    scores: Literal["search", "teacher"] | None = Field(
        None,
        description=("Write scores instead of labels: scores from the search, or from a teacher (null for positives)."),
    )
    seed: int = Field(0, ge=0, lt=1 << 64, description="Seed of the order and of the choice of positives.")
