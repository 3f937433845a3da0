"""ASTRA, Algorithm 1: one-vs-all over all labels, estimated from stale hard negatives and fresh uniform negatives.

Labels and weights, the source of hard negatives, the method and its settling; Renée, the exact sum, comes last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import model_validator

from schemas import LABEL_TEXTS
from schemas.options import Options, key
from trainer.methods.kinds import LossSection
from trainer.methods.recipe import MOST, ClassifierRecipe, NegativesSection, Recipe, SampledNegatives, TableLabels
from trainer.methods.sections import LEAD, TableSchedule
from trainer.methods.settling import Draft, settle_classifier, settle_encoder, settle_length
from trainer.negatives.base import FRESH, MIPS, MOST_FRESH, used_sections

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainer.negatives.base import NegativeSource, Sampled, SourceContext, SourceSection
    from trainer.negatives.planner import Planner
    from trainer.stream.batch import Batch, Candidates

SHARED_DRAWS, OWN_DRAWS = 3200, 400
SHARED_HARD, OWN_HARD = 40, 100
# Each draw of a shared pool represents L / k_r labels. Above this limit, a label is drawn in so few steps that its
# gradient is mostly noise, and a separate pool for each query is better. On WordNet, where a draw represents 31 labels,
# a shared pool lowers P@1 by 9.
HEAVIEST_DRAW = 8


# The labels that a query is scored against, and their weights.


def settle_random(draft: Draft) -> str:
    """Choose the pool of random negatives, and k_r per query or per batch; return the pool.

    One pool per batch is cheaper, unless its draws would weigh so much that they are mostly noise.
    """
    weight = draft.statistics.labels / SHARED_DRAWS
    few = weight <= HEAVIEST_DRAW
    represents = "draws represents" if few else "shared draws would represent"
    why = f"each of {SHARED_DRAWS:,} {represents} {weight:.1f} labels"
    draft.fill("negatives.pool", "shared" if few else "own", why)
    pool = str(draft["negatives.pool"])
    draft.fill("negatives.random", OWN_DRAWS if pool == "own" else SHARED_DRAWS, f"negatives.pool = {pool}")
    return pool


class RandomNegatives(SampledNegatives):
    """Uniform negatives, whose weighted sum estimates the sum over all labels without bias (equation 2, lemma 4.1)."""

    pool: Literal["shared", "own"] = key(
        "shared", "shared: a pool of random negatives for each batch; own: a pool for each query, as in the paper"
    )
    random: int = key(
        SHARED_DRAWS, "k_r, the number of labels drawn uniformly, with replacement, from [0, L)", ge=0, le=MOST
    )
    reweight: bool = key(
        True,
        "weight random negatives by 1 / (k_r q_l), which makes the loss unbiased; q_l is the probability of drawing "
        "label l (1 / L for uniform draws)",
    )
    frequency_share: float = key(
        0.0, "fraction of the random negatives that are drawn by training frequency instead of uniformly", ge=0, le=1
    )

    hard_margin: float = key(
        0.0, "nats that are added to the scores of hard negatives, in addition to pool_margin", ge=-20, le=20
    )

    @property
    def by_frequency(self) -> float:
        return self.frequency_share

    @property
    def margins(self) -> tuple[float, float]:
        return self.pool_margin, self.pool_margin + self.hard_margin

    def draws(self, batch: int) -> int:
        return self.random * (batch if self.pool == "own" else 1)

    def pool_size(self, batch: int, positives: float, labels: int) -> float:
        return 0 if self.pool == "own" else self.random

    def scores(self, batch: int, positives: float) -> float:
        candidates = self.candidates_of(batch, positives)
        return candidates if self.pool == "own" else batch * candidates

    def candidates(self, planner: Planner, batch: Batch, sampled: list[Sampled]) -> Candidates:
        """Merge positives P, hard negatives H and random negatives R; a label is in one of them per query (step 16)."""
        # The paper draws outside H, with p = 1 / (L - k_h). Here draws in P or H are dropped, so the weight is L / k_r.
        own, count = self.pool == "own", self.random_in(planner, batch.epoch, bool(sampled))
        drawn, weight = planner.draw(batch, count, own, self.reweight)  # steps 8 and 15: R with weight L / k_r
        return planner.merge(batch, sampled, drawn, weight)  # steps 13 and 14: H, k_h per row, with weight 1

    def random_in(self, planner: Planner, epoch: int, has_hard: bool) -> int:
        """Return k_r for `epoch`; `has_hard`: whether the queries of the epoch have hard negatives."""
        return self.random


class Negatives(TableLabels, RandomNegatives):
    """Hard and random negatives: k_h and k_r per query."""

    warmup: int = key(
        0, "number of random negatives before the first table; 0: random + hard (Algorithm 1, step 8)", ge=0, le=MOST
    )
    curriculum: bool = key(
        False,
        "between the first epoch with hard negatives and the last epoch, gradually raise the number of hard negatives "
        "from 0 to `hard`, and change the number of random negatives to `random`",
    )

    @property
    def sections(self) -> list[SourceSection]:
        """Sections of the sources in use, except tables."""
        return used_sections(self)

    def columns(self, planner: Planner, epoch: int) -> int:
        """Return k_h for `epoch`: how many of the K labels found for a query a step uses."""
        return planner.negative_counts[epoch][0] if planner.negative_counts else self.hard

    def random_in(self, planner: Planner, epoch: int, has_hard: bool) -> int:
        """Return k_r for `epoch`; before the first table, all k_h + k_r negatives are random (step 8)."""
        if not has_hard:
            return self.before_tables
        return planner.negative_counts[epoch][1] if planner.negative_counts else self.random

    @property
    def before_tables(self) -> int:
        """Number of random negatives per query until hard negatives are available."""
        return self.warmup or self.random + self.hard

    @model_validator(mode="after")
    def _check(self) -> Negatives:
        if not (self.random or self.hard or self.sections):
            raise ValueError("no negatives at all: set negatives.random or negatives.hard, or method = 'renee'")
        if self.curriculum and not self.hard:
            raise ValueError("negatives.curriculum needs negatives.hard > 0")
        if self.warmup and not (self.hard or self.sections):
            raise ValueError(
                "negatives.warmup applies to epochs before the first hard negatives: set negatives.hard > 0"
            )
        return self


# The source of hard negatives: requested tables, or a search in each step.


class Refresh(Options):
    """Where hard negatives come from."""

    source: Literal["table", "in-trainer"] = key(
        "table", "table: tables of a miner that runs alongside the trainer; in-trainer: an index inside the trainer"
    )


class MinedTableSchedule(TableSchedule, Refresh):
    """Tables of nearest labels; a table for epoch e is mined in e - 1 from vectors dumped in e - 2 (section 3.2)."""

    by: Literal["classifier", "labels"] = key(
        "classifier",
        "vectors used to find the nearest labels: classifier vectors (w-hard) or label embeddings (theta-hard)",
    )
    index: str = key("auto", "'exact', 'auto' or a Faiss factory string")

    @model_validator(mode="after")
    def _check_index(self) -> MinedTableSchedule:
        if self.index in (MIPS, FRESH):
            raise ValueError(
                f"refresh.index = {self.index!r} needs an index inside the trainer: set refresh.source = 'in-trainer'"
            )
        return self


class OwnIndex(Refresh):
    """An index inside the trainer that every step searches with fresh query embeddings."""

    start: int = key(5, "the first epoch with hard negatives", ge=0)
    every_steps: int = key(
        1000, "number of steps after which the index is rebuilt from a new copy of the vectors", ge=1
    )
    rebuild_steps: int = key(
        0,
        "number of steps between copying the vectors and first using the new index, which is built in the background; "
        "0: training waits until the index is built",
        ge=0,
    )
    index: str = key(
        "auto",
        f"'fresh': score every label with its current vector ('auto' does this up to {MOST_FRESH:,} labels); 'exact'; "
        "a Faiss factory string; or 'mips': spherical k-means with sqrt(L) clusters, where a search visits 64 clusters",
    )

    def open(self, width: int, context: SourceContext) -> NegativeSource:
        """Open the index of a rank's labels, which finds `width` labels per query."""
        from trainer.negatives.indexes import CopiedIndex, FreshIndex

        labels = context.vectors.stop - context.vectors.start
        few = max(context.group.all_gather_objects(labels)) <= MOST_FRESH  # the same on all ranks
        if self.index == FRESH or (self.index == "auto" and few):
            return FreshIndex(width, self.start, context)
        return CopiedIndex(width, self.start, context, self.index, self.every_steps, self.rebuild_steps)

    @model_validator(mode="after")
    def _check_steps(self) -> OwnIndex:
        if self.rebuild_steps >= self.every_steps:
            raise ValueError(
                f"refresh.rebuild_steps = {self.rebuild_steps} is not below refresh.every_steps = {self.every_steps}: "
                "the next index would be due before the current index is used; lower refresh.rebuild_steps"
            )
        return self


class Astra(ClassifierRecipe):
    """Hard negatives from tables or an index, and random negatives; any loss (the paper uses binary cross-entropy)."""

    choices = {**Recipe.choices, "refresh": ("source", {"table": MinedTableSchedule, "in-trainer": OwnIndex})}

    method: str = "astra"
    negatives: Negatives = Negatives()
    refresh: MinedTableSchedule | OwnIndex = MinedTableSchedule()

    @classmethod
    def settle(cls, draft: Draft) -> None:
        settle_length(draft)
        settle_encoder(draft)
        labels, pool = draft.statistics.labels, settle_random(draft)
        own, why = pool == "own", f"negatives.pool = {pool}"
        # k_h is higher if a query has fewer random negatives; before tables, there are as many as both kinds later.
        draft.fill("negatives.hard", OWN_HARD if own else SHARED_HARD, why)
        draft.fill("negatives.warmup", OWN_DRAWS + OWN_HARD if own else SHARED_DRAWS + SHARED_HARD, why)
        # With own pools, the loss is mostly of hard negatives: they are fresh if there are few labels, else a table is
        # used as soon as it can exist (tau_s), and a new one in each epoch (tau_r).
        source = "in-trainer" if own and labels <= MOST_FRESH else "table"
        draft.fill("refresh.source", source, f"{why}, {labels:,} labels")
        if draft["refresh.source"] == "in-trainer":
            draft.fill("refresh.start", 0, "refresh.source = in-trainer")
            settle_classifier(draft, True, "refresh.source = in-trainer")
        else:
            draft.fill("refresh.start", LEAD if own else LEAD + 1, why)
            draft.fill("refresh.every", 1 if own else 3, why)
            settle_classifier(draft, False, "refresh.source = table")

    @property
    def tables(self) -> TableSchedule | None:
        """Schedule of mined tables; None without hard negatives, or if an index inside the trainer finds them."""
        return self.refresh if self.negatives.hard and isinstance(self.refresh, MinedTableSchedule) else None

    @property
    def table_parameters(self) -> dict[str, Any]:
        """K, and the kinds of index and vectors used to find the nearest labels (section 3.1)."""
        assert isinstance(self.refresh, MinedTableSchedule)
        return {"table_width": self.negatives.table_width, "index": self.refresh.index, "by": self.refresh.by}

    @property
    def first_indexed_epoch(self) -> int | None:
        return self.refresh.start if self.negatives.hard and isinstance(self.refresh, OwnIndex) else None

    def negative_counts(self) -> tuple[tuple[int, int], ...]:
        """Return (k_h, k_r) for each epoch with a curriculum (Table 5).

        Before epoch `refresh.start`, all negatives are random. Then the numbers change by an equal step in each epoch,
        so that the last epoch uses exactly `hard` and `random`.
        """
        if not self.negatives.curriculum:
            return ()
        assert isinstance(self.refresh, (MinedTableSchedule, OwnIndex))
        own, start, before = self.negatives, self.refresh.start, self.negatives.before_tables
        course = []
        for epoch in range(self.train.epochs):
            share = min(1.0, max(0, epoch - start + 1) / max(1, self.train.epochs - start))
            hard = max(1, round(share * own.hard)) if share else 0
            course.append((hard, round(before + share * (own.random - before))))
        return tuple(course)

    @property
    def keeps_negatives_on_device(self) -> bool:
        return self.negatives.pool == "own" and not self.negatives.sections

    def open_sources(self, context: SourceContext) -> list[NegativeSource]:
        own = [self.refresh.open(self.negatives.table_width, context)] if isinstance(self.refresh, OwnIndex) else []
        return [*(own if self.negatives.hard else []), *(each.open(context) for each in self.negatives.sections)]

    @model_validator(mode="after")
    def _check_astra(self) -> Astra:
        if self.train.minutes and self.negatives.curriculum:
            raise ValueError(
                f"train.minutes = {self.train.minutes:g} leaves the number of epochs open, but negatives.curriculum "
                "depends on that number: set only one of the two options"
            )
        by_labels = isinstance(self.refresh, MinedTableSchedule) and self.refresh.by == "labels"
        if by_labels and not (self.data.label_texts or LABEL_TEXTS in self.data.mix):
            raise ValueError(
                "refresh.by = 'labels' mines with embeddings of label texts, so the run must also train on label "
                "texts: set data.label_texts = true"
            )
        return self


# The reference: the exact sum over all labels, without an estimate.


class AllLabels(NegativesSection):
    """Every label for every query, one chunk of labels at a time (equation 1)."""

    all_labels = True
    chunk: int = key(4096, "number of labels that are scored at once", ge=1)

    def scores(self, batch: int, positives: float) -> float:
        return batch * self.chunk

    def candidates(self, planner: Planner, batch: Batch, sampled: list[Sampled]) -> None:
        """Return None, because there are too many labels to make all of them candidates at once."""

    def chunks(self, planner: Planner, batch: Batch) -> Iterator[Candidates]:
        start, stop = planner.label_range or (0, planner.labels)
        for first in range(0, stop - start, self.chunk):
            yield planner.range_candidates(batch, first, min(first + self.chunk, stop - start))


class Renee(ClassifierRecipe):
    """Full one-vs-all, the exact reference for ASTRA's sampling, at a cost that is linear in the number of labels."""

    negatives: AllLabels = AllLabels()

    def negatives_of(self, labels: int) -> AllLabels:
        """Return the section `negatives`: a loss that is no sum over labels needs all labels in a single chunk."""
        whole = self.loss != LossSection()
        return self.negatives.model_copy(update={"chunk": max(1, labels)}) if whole else self.negatives
