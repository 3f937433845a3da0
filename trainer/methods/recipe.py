"""The recipe of a run: shared sections, and the choice of a method."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ModelWrapValidatorHandler, SerializeAsAny, ValidationInfo, field_validator, model_validator

from schemas.options import Options, key
from trainer.methods.keys import METHODS
from trainer.methods.kinds import ENCODERS, LOSSES, BagSection, EncoderSection, Entry, LossSection, options_of
from trainer.methods.sections import (
    LEAD,
    Checkpoint,
    Classifier,
    Data,
    Logging,
    Order,
    Storage,
    TableSchedule,
    Train,
    Validation,
)
from trainer.methods.settling import Draft, settle_classifier, settle_encoder, settle_length
from trainer.schedule import SINGLE_ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from schemas.layout import RunLayout
    from trainer.negatives.base import NegativeSource, Sampled, SourceContext
    from trainer.negatives.planner import Planner
    from trainer.second_loss import SecondLoss
    from trainer.stream.batch import Batch, Candidates


MOST = 1 << 24  # maximum number of labels of a query or of a pool


class NegativesSection(Options):
    """Labels that a query is scored against in addition to its positives; base class of all sections `negatives`."""

    all_labels: ClassVar[bool] = False  # True: every query is scored against every label

    @property
    def margins(self) -> tuple[float, float]:
        """Numbers that are added to the scores of random and of hard negatives, after the temperature."""
        return 0.0, 0.0

    @property
    def table_width(self) -> int:
        """K, the number of labels per row of the requested table; 0: the method requests no table."""
        return 0

    @property
    def by_frequency(self) -> float:
        """Fraction of the random draws that are made in proportion to training frequency."""
        return 0.0

    def draws(self, batch: int) -> int:
        """Return the number of labels that are drawn for a step of `batch` queries."""
        return 0

    @property
    def max_hard(self) -> int:
        """Maximum number of labels per query, not counting positives and drawn labels."""
        return 0

    def candidates_of(self, batch: int, positives: float) -> float:
        """Estimate the number of candidates in a step of `batch` queries with `positives` positives each."""
        return batch * (self.max_hard + positives) + self.draws(batch)

    def pool_size(self, batch: int, positives: float, labels: int) -> float:
        """Estimate how many of the `labels` labels are scored for every query in a step of `batch` queries."""
        return labels if self.all_labels else min(labels, batch * (self.max_hard + positives))

    def scores(self, batch: int, positives: float) -> float:
        """Estimate how many scores a step of `batch` queries keeps in memory at once."""
        return batch * self.candidates_of(batch, positives)

    def columns(self, planner: Planner, epoch: int) -> int:
        """Return k_h, the number of labels that a step of `epoch` uses from each ranked row."""
        return 0

    def candidates(self, planner: Planner, batch: Batch, sampled: list[Sampled]) -> Candidates | None:
        """Return the candidates of each query, with weights; None if only `chunks` provides candidates.

        The default candidates are the positives and hard negatives of all queries in the batch. `sampled`: labels that
        sources, including tables, found for the batch.
        """
        return planner.batch_candidates(batch)

    def chunks(self, planner: Planner, batch: Batch) -> Iterator[Candidates]:
        """Yield candidates of a batch, one chunk of labels at a time."""
        raise NotImplementedError


class SampledNegatives(NegativesSection):
    """Negatives that stand for more labels than they are, with a margin: an addend to scores, a weight in a softmax."""

    pool_margin: float = key(
        0.0,
        "nats that are added to the scores of all negatives, after the temperature; in the losses softmax, infonce and "
        "decoupled, a negative then counts e^pool_margin times",
        ge=-20,
        le=20,
    )

    @property
    def margins(self) -> tuple[float, float]:
        return self.pool_margin, self.pool_margin


class TableLabels(NegativesSection):
    """Labels from the query's row of the requested table; each step uses `hard` of the K columns."""

    hard: int = key(
        0,
        "k_h, the number of hard negatives per query, drawn from the K labels in the query's row of the table",
        ge=0,
        le=MOST,
    )
    width: int = key(0, "K, the number of labels per query in the mined table; 0: the same as hard", ge=0, le=MOST)

    @property
    def table_width(self) -> int:
        return self.width or self.hard

    @property
    def max_hard(self) -> int:
        return self.hard

    def columns(self, planner: Planner, epoch: int) -> int:
        return self.hard

    @model_validator(mode="after")
    def _check_width(self) -> TableLabels:
        if self.width and self.width < self.hard:
            raise ValueError(f"negatives.width = {self.width} is below negatives.hard = {self.hard}: raise the width")
        return self


class Recipe(Options):
    """All options that, together with DATA, determine a run's results; the `method` adds further options.

    `Recipe.model_validate` reads options with the class of their method.
    """

    encodes_labels: ClassVar[bool] = False  # True: labels are encoded from their texts, and have no learned vectors
    # Sections that have a class a kind: the key that names the kind, and the classes by kind, the default first.
    choices: ClassVar[dict[str, tuple[str, Mapping[str, Entry]]]] = {
        "encoder": ("kind", ENCODERS),
        "loss": ("kind", LOSSES),
    }

    name: str = key("", "name of the recipe; default: the name of its file")
    method: str
    data: Data = Data()
    order: SerializeAsAny[Order] = Order()
    storage: Storage = Storage()
    encoder: SerializeAsAny[EncoderSection] = BagSection()
    negatives: SerializeAsAny[NegativesSection]
    loss: SerializeAsAny[LossSection] = LossSection()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    logging: Logging = Logging()

    @classmethod
    def settle(cls, draft: Draft) -> None:
        """Fill in, top to bottom, what a recipe of this method leaves to the data."""
        settle_length(draft)
        settle_encoder(draft)

    @model_validator(mode="wrap")
    @classmethod
    def _of_its_method(cls, values: Any, handler: ModelWrapValidatorHandler[Recipe]) -> Recipe:
        if cls is Recipe and isinstance(values, Mapping):
            method = options_of(METHODS, values.get("method", next(iter(METHODS))), "method")
            return method.model_validate(values)
        return handler(values)

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_kind(cls, values: Any, info: ValidationInfo) -> Any:
        section = str(info.field_name)
        if section not in cls.choices or isinstance(values, Options):
            return values
        key, table = cls.choices[section]
        kind = values.get(key, next(iter(table))) if isinstance(values, Mapping) else next(iter(table))
        return options_of(table, kind, f"{section}.{key}").model_validate(values)

    @property
    def title(self) -> str:
        """Name of the recipe; by default the name of its method."""
        return self.name or self.method

    @property
    def tables(self) -> TableSchedule | None:
        """Schedule of the tables that the method requests; None if the method requests no tables."""
        return None

    @property
    def table_parameters(self) -> dict[str, Any]:
        """Parameters that a dump records to specify which kind of table the method requests."""
        return {}

    @property
    def is_clustered(self) -> bool:
        """Whether the tables contain clusters and batches consist of clusters of queries."""
        return self.order.clusters != SINGLE_ROWS

    @property
    def first_indexed_epoch(self) -> int | None:
        """First epoch with hard negatives from an index inside the trainer; None: no such epoch."""
        return None

    @property
    def positives(self) -> int:
        """Number of positives per query that a step trains on; 0: all."""
        return 0

    @property
    def encoders(self) -> int:
        """Number of encoders of the model."""
        return 1

    def uses_table(self, epoch: int) -> bool:
        """Return whether `epoch` trains on a table, according to the schedule.

        A table of clusters may exist earlier, because clusters can be built from any embeddings, without a model of the
        run.
        """
        return self.is_clustered or (self.tables is not None and epoch >= self.tables.start)

    def table_epochs(self) -> list[int]:
        """List the epochs that begin to use a new table: start, start + every, ..., within the run.

        The table of epoch 0 comes from the earlier run; every other table is used at least LEAD epochs after its dump.
        """
        epochs = range(self.tables.start, self.train.epochs, self.tables.every) if self.tables else ()
        return [epoch for epoch in epochs if epoch == 0 or epoch >= LEAD]

    def negative_counts(self) -> tuple[tuple[int, int], ...]:
        """Return the numbers of hard and random negatives for each epoch; empty if the numbers do not change."""
        return ()

    def negatives_of(self, labels: int) -> NegativesSection:
        """Return the section `negatives` for a run with `labels` labels."""
        return self.negatives

    @property
    def keeps_negatives_on_device(self) -> bool:
        """Whether labels from a source may stay on a device, which then merges the labels of each query."""
        return False

    def open_sources(self, context: SourceContext) -> list[NegativeSource]:
        """Open the sources of negatives that need embeddings."""
        return []

    def second_loss(self, run: RunLayout) -> SecondLoss | None:
        """Open a second loss of the method, on the embeddings of queries alone; RUN's files are not read yet."""
        return None

    @model_validator(mode="after")
    def _check(self) -> Recipe:
        if self.train.positive_ratio != 1 and self.loss.kind != "bce":
            raise ValueError(
                f"train.positive_ratio = {self.train.positive_ratio:g} works only with loss.kind = 'bce': leave it out "
                f"for {self.loss.kind!r}, because this loss does not separate positives from negatives"
            )
        if self.loss.kind == "triplet" and any(self.negatives.margins):
            raise ValueError("loss.kind = 'triplet' has loss.margin: leave out negatives.pool_margin and hard_margin")
        unit_labels = self.classifier.normalize if isinstance(self, ClassifierRecipe) else self.encodes_labels
        self.loss.check_vectors(unit=unit_labels and self.encoder.normalize and self.encoder.scale == 1)
        if self.validation.patience and not (self.validation.split or self.data.holdout):
            raise ValueError(
                f"validation.patience = {self.validation.patience} needs validations, but this recipe has none: set "
                "validation.split or data.holdout"
            )
        start = self.tables.start if self.tables else LEAD
        if start < LEAD and (start or self.is_clustered or not self.train.start_from):
            raise ValueError(
                f"refresh.start = {start} is too early: the first table is mined from the dump of epoch 0, for epoch "
                f"{LEAD}. Set {LEAD} or more, or 0 with train.start_from, which mines the earlier run before epoch 0"
            )
        thin = [f"{name} = {weight:g}" for name, weight in self.data.mix.items() if weight < 1]
        if self.tables and thin and self.data.mix_by == "rows":
            raise ValueError(
                f"data.mix: {', '.join(thin)} is below 1, so a dump would lack embeddings of some rows: multiply all "
                "weights by a factor that makes each at least 1 (and divide train.epochs by the factor), or set "
                "negatives.hard = 0"
            )
        return self


class ClassifierRecipe(Recipe):
    """Recipe of a method that learns a vector per label."""

    classifier: Classifier = Classifier()

    @classmethod
    def settle(cls, draft: Draft) -> None:
        super().settle(draft)
        settle_classifier(draft)
