"""Section `head`: a vector of a classifier for each label, or its text through an encoder."""

from typing import Literal

from pydantic import Field

from schemas.options import Options


class Head(Options):
    """What a label is: a vector of a classifier, or its text through an encoder (DEXML)."""

    kind: Literal["classifier", "label-encoder"] = "classifier"
    shared: bool = Field(True, description="of label-encoder: labels go through the encoder of the queries")
    label_batch: int = Field(
        1024, ge=1, description="eta: labels encoded at a time; more of them in a step are encoded twice"
    )
    query_batch: int = Field(0, ge=0, description="queries encoded at a time; 0: those of a rank at once")
    positives: int = Field(
        0,
        ge=0,
        description="of label-encoder: positives a query, drawn anew each step, that it learns and brings to the pool; "
        "0: all",
    )
