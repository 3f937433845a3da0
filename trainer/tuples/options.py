"""Options of tuples. A field's description is the option's help, here and in Python."""

from typing import Literal

from pydantic import Field

from schemas.options import Options

Form = Literal["triplets", "tuples", "pairs", "lists", "tevatron", "flagembedding"]


class TupleOptions(Options):
    """Options of `extremis tuples` and of a `TupleStream`."""

    form: Form = Field("tuples", description="Columns of an example, or the library that reads it.")
    negatives: int | None = Field(
        None, ge=1, description="Negatives of an example, best first. Default: 1 in triplets, else all."
    )
    keys: bool = Field(False, description="Keys in the place of texts.")
    each_positive: bool = Field(
        False, description="Examples for each positive of a row. Default: one positive, another each epoch."
    )
    scores: Literal["search", "teacher"] | None = Field(
        None, description="Scores in the place of labels: the search's, or a teacher's (null of positives)."
    )
    seed: int = Field(0, ge=0, lt=1 << 64, description="Seed of the order and of the choice of positives.")
