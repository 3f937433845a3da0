"""Workload to plan: size of the data, recipe, machines."""

from dataclasses import dataclass

from schemas.errors import InputError
from trainer.config import Recipe
from trainer.model import has_bias


@dataclass(frozen=True)
class Workload:
    """Size of the data, recipe and machines. Tokens, characters and labels are averages. Raises InputError."""

    queries: int
    labels: int
    recipe: Recipe
    tokens: float = 32.0  # per query
    label_tokens: float = 8.0
    labels_per_query: float = 5.0
    key_bytes: float = 12.0
    text_bytes: float = 40.0  # of a label's text
    vocabulary: int = 30_000
    ranks: int = 1
    workers: int = 1  # pipeline workers, of one core each
    memory: int = 8 << 30  # bytes of each process

    def __post_init__(self) -> None:
        for name in ("queries", "labels", "ranks", "workers", "memory"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name} must be at least 1; got {getattr(self, name):,}.")
        if self.recipe.data.mix:
            raise InputError("data.mix: a mix cannot be planned; plan with data.split and data.label_texts instead.")
        for name in ("tokens", "label_tokens", "labels_per_query", "key_bytes", "text_bytes"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"--{name.replace('_', '-')} must be above 0; got {getattr(self, name):g}.")
        if self.labels_per_query > self.labels:
            raise InputError(f"--labels-per-query {self.labels_per_query:g}: there are only {self.labels:,} labels.")

    @property
    def columns(self) -> int:
        """Count the columns of embeddings and vectors: D, and one for a bias."""
        return self.recipe.encoder.dimension + int(has_bias(self.recipe))

    @property
    def sources(self) -> dict[str, int]:
        """Count the rows of dumps and negative tables, by source."""
        return {"queries": self.queries, **({"labels": self.labels} if self.recipe.data.label_texts else {})}

    @property
    def trained_queries(self) -> int:
        """Count the queries to train on, without those held out."""
        return self.recipe.data.trained.rows(self.queries)

    @property
    def rows(self) -> int:
        """Count the rows of all sources."""
        return sum(self.sources.values())

    @property
    def steps(self) -> int:
        """Count the steps of the whole run."""
        rows = self.trained_queries + self.sources.get("labels", 0)
        return -(-rows // self.recipe.order.batch) * self.recipe.train.epochs

    @property
    def dumps(self) -> int:
        """Count the dumps of the whole run, and the tables mined from them or put into cluster order by them."""
        return len(self.recipe.table_epochs())
