"""The recipe of a run, with checks over its sections."""

from pydantic import Field, SerializeAsAny, model_validator

from schemas import LABEL_TEXTS
from schemas.options import Options
from trainer.config.checkpoint import Checkpoint
from trainer.config.classifier import Classifier
from trainer.config.data import Data
from trainer.config.encoder import EncoderSection
from trainer.config.head import HeadSection
from trainer.config.logging import Logging
from trainer.config.loss import LossSection
from trainer.config.order import Order
from trainer.config.refresh import Refresh
from trainer.config.storage import Storage
from trainer.config.train import Train
from trainer.config.validation import Validation
from trainer.negatives.section import Negatives
from trainer.schedule import SINGLE_ROWS


class Recipe(Options):
    """Everything that decides a run's numbers, besides DATA."""

    method: str = "astra"
    data: Data = Data()
    order: Order = Order()
    storage: Storage = Storage()
    encoder: SerializeAsAny[EncoderSection] = Field(default_factory=lambda: EncoderSection.model_validate({}))
    head: SerializeAsAny[HeadSection] = Field(default_factory=lambda: HeadSection.model_validate({}))
    classifier: Classifier = Classifier()
    negatives: Negatives = Negatives()
    loss: SerializeAsAny[LossSection] = Field(default_factory=lambda: LossSection.model_validate({}))
    refresh: Refresh = Refresh()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    logging: Logging = Logging()

    @model_validator(mode="after")
    def _check_model(self) -> "Recipe":
        encodes, pool, encoder = self.head.encodes_labels, self.negatives.pool, self.encoder
        if pool not in self.head.POOLS:
            raise ValueError(
                f"negatives.pool = {pool!r} is not of head.kind = {self.head.kind!r}: set negatives.pool to one of "
                + ", ".join(map(repr, self.head.POOLS))
            )
        if encodes and (self.indexes or self.negatives.sampled):
            raise ValueError(
                "refresh.source = 'in-trainer', negatives.in_batch and negatives.lsh look at a classifier's vectors: "
                "leave them out for head.kind = 'label-encoder', whose hard negatives come from a table"
            )
        if pool == "batch" and (self.indexes or self.negatives.sampled):
            raise ValueError(
                "negatives.pool = 'batch' has the batch's own labels, and hard negatives of a table: leave out "
                "refresh.source = 'in-trainer', negatives.in_batch and negatives.lsh, or choose another pool"
            )
        if self.head.positives and not encodes and pool != "batch":
            raise ValueError(
                f"head.positives = {self.head.positives} draws positives for negatives.pool = 'batch': with "
                f"negatives.pool = {pool!r} a classifier learns all of them, so leave it out"
            )
        if encodes and self.logging.ranks_every:
            raise ValueError(
                f"logging.ranks_every = {self.logging.ranks_every} ranks labels by a classifier's vectors: leave it "
                "out for head.kind = 'label-encoder', which encodes those of the step alone"
            )
        if encodes and self.train.accumulate > 1:
            raise ValueError(
                f"train.accumulate = {self.train.accumulate} divides the batch of a classifier: for head.kind = "
                "'label-encoder' leave it out and set head.query_batch"
            )
        if self.train.positive_ratio != 1 and self.loss.kind != "bce":
            raise ValueError(
                f"train.positive_ratio = {self.train.positive_ratio:g} weighs the positive part of loss.kind = 'bce': "
                f"leave it out for {self.loss.kind!r}, whose positives and negatives are in one term"
            )
        if self.train.freeze_encoder and encodes:
            raise ValueError(
                "train.freeze_encoder leaves head.kind = 'label-encoder' nothing to learn: set head.kind = 'classifier'"
            )
        labels_unit = encodes or self.classifier.normalize
        self.loss.check_vectors(unit=labels_unit and encoder.normalize and encoder.scale == 1)
        return self

    @model_validator(mode="after")
    def _check_rows(self) -> "Recipe":
        if self.validation.patience and not (self.validation.split or self.data.holdout):
            raise ValueError(
                f"validation.patience = {self.validation.patience} counts validations, and there are none: set "
                "validation.split, or data.holdout"
            )
        if self.train.minutes and self.negatives.curriculum:
            raise ValueError(
                f"train.minutes = {self.train.minutes:g} leaves the number of epochs open, and negatives.curriculum "
                "goes by it: set one of them"
            )
        if self.clusters and self.negatives.hard:
            raise ValueError(
                f"order.cluster makes in-batch negatives hard, and a table's rows are in another order: set "
                f"negatives.hard = 0 (it is {self.negatives.hard}), or order.cluster = 1 and no doubling"
            )
        if self.clusters and (self.data.holdout or self.data.share < 1):
            raise ValueError(
                "order.cluster deals the clusters of all rows of a split: leave out data.holdout and data.share"
            )
        if self.clusters and (self.data.mix or self.data.label_texts):
            raise ValueError(
                "order.cluster deals the clusters of one split: leave out data.mix and data.label_texts, or set "
                "order.cluster = 1 and no doubling"
            )
        thin = [f"{name} = {weight:g}" for name, weight in self.data.mix.items() if weight < 1]
        if self.negatives.hard and thin:
            raise ValueError(
                f"data.mix: {', '.join(thin)} is below 1, so an epoch whose embeddings are mined would leave rows out: "
                "multiply all weights until none is below 1 (and divide train.epochs), or set negatives.hard = 0"
            )
        if self.refresh.by == "labels" and not (self.data.label_texts or LABEL_TEXTS in self.data.mix):
            raise ValueError(
                "refresh.by = 'labels' mines by the embeddings of label texts, which only a run that trains on them "
                "has: set data.label_texts = true"
            )
        return self

    @property
    def clusters(self) -> bool:
        """True: queries are dealt by clusters, from tables that are made and used like those of negatives."""
        return self.order.clusters != SINGLE_ROWS

    @property
    def indexes(self) -> bool:
        """True: hard negatives come from an index within the trainer."""
        return self.negatives.hard > 0 and self.refresh.source == "in-trainer"

    def uses_table(self, epoch: int) -> bool:
        """Tell whether `epoch` trains on a table of hard negatives, or of clusters, by the schedule.

        Clusters may exist earlier: they can be made of any embeddings, and need no model of the run.
        """
        if self.clusters:
            return True
        return self.negatives.hard > 0 and not self.indexes and epoch >= self.refresh.start

    def table_epochs(self) -> list[int]:
        """List the epochs from which a new table is used: start, start + every, ... within the run."""
        if not self.clusters and (not self.negatives.hard or self.indexes):
            return []
        return list(range(self.refresh.start, self.train.epochs, self.refresh.every))
