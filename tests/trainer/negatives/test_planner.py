"""Plans: how many negatives are random, pairs that hold every label once, and what ranks send each other."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.mining.inputs import equal_ranges
from schemas import PAD
from schemas.ragged import Ragged
from tests.builders import batch_of
from trainer.group import Group
from trainer.methods.astra import AllLabels, Negatives
from trainer.methods.ngame import InBatchNegatives
from trainer.negatives.planner import Planner, draw_positives
from trainer.stream.batch import Candidates


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        (Negatives(random=30, hard=3), 33, 30),  # Algorithm 1, step 8
        (Negatives(random=0, hard=3, warmup=50), 50, 0),
        (Negatives(random=30, hard=0), 30, 30),
    ],
)
def test_how_many_negatives_are_random_before_and_with_a_table(options: Negatives, before: int, after: int) -> None:
    labels = 10_000
    for hard, size in ((None, before), (np.full((2, 3), 9), after)):
        batch = batch_of([[1], [2]], hard if options.hard else None)
        (candidates,) = Planner(options, labels).chunks(batch)
        draws = candidates.pool_weight * size / labels  # each draw weighs L / k_r
        assert draws.sum() == pytest.approx(size)


LABELS = 40
MARGINS: Any = {"pool_margin": 0.5, "hard_margin": 2.0}
LISTS = st.lists(st.sets(st.integers(0, LABELS - 1), max_size=4).map(sorted), min_size=1, max_size=6)


@given(LISTS, st.integers(0, 2), st.sampled_from([(0, LABELS), (0, 13), (13, 29), (29, LABELS)]), st.integers(0, 9))
def test_the_pool_of_a_batch_is_what_its_queries_bring(
    positives: list[list[int]], drawn: int, part: tuple[int, int], step: int
) -> None:
    whole = batch_of(positives)
    batch = replace(whole, step=step)
    weight = np.linspace(1, 2, LABELS).astype(np.float32)
    parts = tuple(itertools.pairwise(sorted({0, *part, LABELS})))
    planner = Planner(InBatchNegatives(), LABELS, 3, weight, parts, parts.index(part), positives=drawn)
    (candidates,) = planner.chunks(batch)
    mask = draw_positives(batch, drawn, 3)
    ends = batch.positive_offsets
    learnt = [
        [label for at, label in enumerate(own, int(ends[query])) if mask is None or mask[at]]
        for query, own in enumerate(positives)
    ]
    inside = range(*part)
    pool = sorted({label for own in learnt for label in own} & set(inside))
    assert (candidates.ids + part[0]).tolist() == pool
    pairs = {
        (int(query), int(candidates.ids[place]) + part[0], float(pair_weight))
        for query, place, pair_weight in zip(
            candidates.pair_query, candidates.pair_label, candidates.pair_weight, strict=True
        )
    }
    assert candidates.pair_positive.all()
    assert pairs == {
        (query, label, float(weight[label])) for query, own in enumerate(learnt) for label in own if label in inside
    }
    # A query's own positive is no negative of it, drawn or not.
    masked = zip(
        candidates.masked_query.tolist(), (candidates.ids + part[0])[candidates.masked_pool].tolist(), strict=True
    )
    assert set(masked) == {(query, label) for query, own in enumerate(positives) for label in own if label in pool}
    assert (candidates.pool_weight == 1).all()


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[int]], np.ndarray]:
    """Positives of queries, and hard negatives with padding, of which none is a positive."""
    positives = draw(LISTS)
    rows = [draw(st.permutations(sorted({*range(LABELS)} - {*own})))[:3] for own in positives]
    return positives, np.where(draw(st.booleans()), np.array(rows), PAD).reshape(len(rows), 3).astype(np.int32)


class Together(Group):
    """One of several ranks, whose messages wait for those of the others."""

    def __init__(self, rank: int, ranks: int, sent: dict[int, Any]) -> None:
        self.rank, self.ranks, self._sent = rank, ranks, sent

    def all_to_all(self, messages: Any) -> list[list[np.ndarray]]:
        self._sent[self.rank] = messages
        return [self._sent.get(rank, messages)[self.rank] for rank in range(self.ranks)]


def pairs_of(candidates: Candidates, first: int) -> set[tuple[int, int, bool, float, float]]:
    """(query, label, if it is positive, weight, margin) of every pair and mask (0, 0), and of the pool as query -1."""
    ids, margins = candidates.ids + first, candidates.pair_margin
    margins = margins if len(margins) else np.zeros(len(candidates.pair_label), np.float32)
    columns = candidates.pair_query, ids[candidates.pair_label], candidates.pair_positive, candidates.pair_weight
    weights = zip(ids, candidates.pool_weight, strict=False)
    pool = ((-1, int(label), False, float(weight), float(candidates.pool_margin)) for label, weight in weights)
    masks = [*zip(candidates.masked_query.tolist(), ids[candidates.masked_pool].tolist(), strict=True)]
    assert len({*masks}) == len(masks)
    rows = zip(*columns, margins, strict=True)
    pairs = {(int(q), int(label), bool(p), float(w), float(m)) for q, label, p, w, m in rows}
    assert all(margin == 0 for _, _, is_positive, _, margin in pairs if is_positive)
    return pairs | {*pool} | {(query, label, False, 0.0, 0.0) for query, label in masks}


def filters_of(positives: list[list[int]], seed: int) -> Ragged:
    """Some labels of each query, positives among them."""
    draw = np.random.default_rng(seed)
    rows = [
        np.unique([*own[: draw.integers(0, 2)], *draw.integers(0, LABELS, draw.integers(0, 12))]) for own in positives
    ]
    return Ragged.from_counts(np.concatenate(rows).astype(np.int32), np.array([len(row) for row in rows]))


@settings(max_examples=20)
@given(tables(), st.sampled_from(["own", "shared", "batch", "all"]), st.integers(0, 99))
def test_filtered_labels_are_no_negatives_whatever_brings_them(
    table: tuple[list[list[int]], np.ndarray], pool: str, seed: int
) -> None:
    batch = batch_of(*table)
    filtered = filters_of(table[0], seed)
    pairs_filtered = {*zip(filtered.row_of().tolist(), filtered.entries.tolist(), strict=True)}
    options = {"batch": InBatchNegatives(), "all": AllLabels(chunk=7)}.get(pool) or Negatives(
        pool=pool, random=30, hard=2, reweight=False, **MARGINS
    )
    planner = Planner(options, LABELS, seed)
    for before, after in zip(planner.chunks(batch), planner.chunks(replace(batch, filtered=filtered)), strict=True):
        pool_labels = {*before.ids[: len(before.pool_weight)].tolist()}
        kept = {pair for pair in pairs_of(before, 0) if pair[2] or pair[:2] not in pairs_filtered or pair[3] == 0}
        own = {(query, label) for query, own in enumerate(table[0]) for label in own}
        masks = {(q, label, False, 0.0, 0.0) for q, label in pairs_filtered if label in pool_labels}
        assert pairs_of(after, 0) == kept | masks
        assert own & {pair[:2] for pair in kept if pair[2]} == own & {
            pair[:2] for pair in pairs_of(after, 0) if pair[2]
        }
    if pool == "own":  # for a device that merges: the weight of a draw is 0
        (drawn,) = (c.drawn for c in replace(planner, merges=False).chunks(replace(batch, filtered=filtered)))
        assert drawn is not None
        pairs = zip((drawn.use >> 1).tolist(), drawn.label.tolist(), strict=True)
        assert all((pair in pairs_filtered) <= (weight <= 0) for pair, weight in zip(pairs, drawn.weight, strict=True))


@given(tables(), st.sampled_from(["own", "shared", "batch"]), st.integers(1, 5), st.integers(1, 3), st.integers(0, 9))
def test_ranks_plan_their_part_of_what_one_plans(
    table: tuple[list[list[int]], np.ndarray], pool: str, ranks: int, hard: int, step: int
) -> None:
    positives, negatives = table
    positives, negatives = positives * 5, np.tile(negatives, (5, 1))
    filtered = filters_of(positives, step)
    whole = replace(batch_of(positives, negatives), step=step, filtered=filtered)
    options = InBatchNegatives() if pool == "batch" else Negatives(pool=pool, random=7, hard=hard, **MARGINS)
    build = partial(Planner, options, LABELS, 3, positives=int(pool == "batch"))
    (expected,) = build().chunks(whole)
    cuts, sent, made = equal_ranges(0, len(whole), ranks), {}, set()
    parts = [
        replace(
            batch_of(positives[low:high], negatives[low:high]),
            step=step,
            rows=np.arange(low, high),
            filtered=filtered.slice(low, high),
        )
        for low, high in cuts
    ]
    planners = [build(label_ranges=tuple(equal_ranges(0, LABELS, ranks)), rank=rank) for rank in range(ranks)]
    for _ in range(2):  # in the second round all have sent
        gathered = [
            planner.gather(part, Together(rank, ranks, sent), stop_requested=rank == 1)
            for rank, (planner, part) in enumerate(zip(planners, parts, strict=True))
        ]
    for planner, batch in zip(planners, gathered, strict=True):
        assert (batch.sizes, batch.stop_requested) == ([high - low for low, high in cuts], ranks > 1)
        np.testing.assert_array_equal(batch.gathered.rows, whole.rows)
        (candidates,) = planner.chunks(batch.gathered)
        made |= pairs_of(candidates, planner.label_range[0] if planner.label_range else 0)
    assert made == pairs_of(expected, 0)
