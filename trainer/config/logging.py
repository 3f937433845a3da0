"""Section `logging`: what is recorded while training."""

from pydantic import Field

from schemas.options import Options

# By option: where the numbers of a run are sent to while it trains.
WATCHERS = {
    "tensorboard": "trainer.tracking.tensorboard:TensorBoard",
    "wandb": "trainer.tracking.weights_and_biases:WeightsAndBiases",
    "mlflow": "trainer.tracking.ml_flow:MLflow",
}


class Logging(Options):
    """Records of a run."""

    every_steps: int = Field(20, ge=1, description="steps between two records in metrics.jsonl")
    ranks_every: int = Field(
        0,
        ge=0,
        description="steps between measurements of the ranks that a step's hard negatives have among all labels by the "
        "present model; 0: none",
    )
    tensorboard: bool = Field(True, description="also write RUN/tensorboard")
    wandb: str = Field("", max_length=128, description="project of Weights & Biases to send numbers to; empty: none")
    mlflow: str = Field("", max_length=256, description="experiment of MLflow to send numbers to; empty: none")
