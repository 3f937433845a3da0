"""Section `validation`: the split that is scored while training; and the metrics."""

from pydantic import Field

from schemas.options import Options

# Families of metrics at k, by name: "module:function" from Rankings to Contributions.
METRICS = {
    "P": "trainer.evaluation.metrics:precision",
    "nDCG": "trainer.evaluation.metrics:ndcg",
    "R": "trainer.evaluation.metrics:recall",
    "PSP": "trainer.evaluation.metrics:psp",
    "PSnDCG": "trainer.evaluation.metrics:psndcg",
}


class Validation(Options):
    """Scoring of a split while training."""

    split: str = Field(
        "",
        description="a split to score while training; where nothing is stated, the newest part of `val` of a version "
        "that has such a split; empty: none",
    )
    parts: str | list[str] = Field(
        "", description="of a version of data, the parts of the split to score, as data.parts names them; empty: all"
    )
    every_epochs: int = Field(1, ge=1, description="epochs between two scorings")
    queries: int = Field(5000, ge=1, description="its first rows only (shards are pre-shuffled)")
    metric: str = Field(
        "P@1",
        pattern=rf"^({'|'.join(METRICS)})@[1-9]\d{{0,2}}$",
        description="the checkpoint with the best value of it is kept beside the newest",
    )
    patience: int = Field(
        0,
        ge=0,
        description="validations in a row without a better value of `metric` after which the run ends; 0: no limit",
    )
