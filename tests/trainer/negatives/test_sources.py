"""Sources of hard negatives, each against what it should find, and together in a run that is stopped and goes on."""

from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from schemas import PAD
from schemas.errors import InputError
from schemas.layout import RunLayout
from tests.builders import SmallData, batch_of, build_data
from tests.trainer.negatives.label_vectors import LabelVectors
from tests.trainer.test_loop import Killed, recipe, silent, train
from trainer.config import Negatives, load_recipe
from trainer.group import Group
from trainer.loop import Trainer
from trainer.negatives.base import NegativeSources, SourceContext
from trainer.negatives.candidates import join_hard
from trainer.negatives.in_batch import InBatch

LABELS, DIMENSION = 60, 5
POSITIVES = [[3, 9], [], [9, 30, 31], [0]]
WEIGHT = np.random.default_rng(0).standard_normal((LABELS, DIMENSION)).astype(np.float32)
X = torch.from_numpy(np.random.default_rng(1).standard_normal((4, DIMENSION)).astype(np.float32))


VECTORS = LabelVectors(WEIGHT)


def best(scores: np.ndarray, labels: list[int], positives: list[int], k: int) -> set[int]:
    return set(sorted(set(labels) - set(positives), key=lambda label: -scores[label])[:k])


@pytest.mark.parametrize("k", [1, 3, 20])
def test_in_batch_negatives_are_the_hardest_positives_of_the_others(k: int) -> None:
    ids = InBatch(k, VECTORS).find(batch_of(POSITIVES), X).ids
    for query, positives in enumerate(POSITIVES):
        expected = best(
            X[query].numpy() @ WEIGHT.T, sorted({label for row in POSITIVES for label in row}), positives, k
        )
        assert set(ids[query].tolist()) - {PAD} == expected


def test_a_batch_without_positives_has_no_in_batch_negatives() -> None:
    assert InBatch(3, VECTORS).find(batch_of([[], []]), X[:2]).ids.shape == (2, 0)


IDS = st.integers(-1, 9)


@given(st.integers(0, 4), st.integers(0, 4), st.data())
def test_joined_labels_are_the_tables_and_the_found_each_once_without_positives(
    width: int, k: int, data: st.DataObject
) -> None:
    hard = [data.draw(st.lists(IDS, min_size=width, max_size=width)) for _ in POSITIVES]
    others = [data.draw(st.lists(IDS, min_size=k, max_size=k)) for _ in POSITIVES]
    table = np.array(hard, np.int32).reshape(len(POSITIVES), width)
    joined = join_hard(batch_of(POSITIVES, table), np.array(others, np.int64).reshape(len(POSITIVES), k))
    np.testing.assert_array_equal(joined[:, :width], table)
    for query, positives in enumerate(POSITIVES):
        new = [label for label in joined[query, width:].tolist() if label != PAD]
        assert len(new) == len(set(new))
        assert set(new) == set(others[query]) - set(positives) - set(hard[query]) - {PAD}


def test_ranks_find_in_batch_negatives_of_their_labels_alone() -> None:
    (whole,) = (InBatch(20, VECTORS).find(batch_of(POSITIVES), X).ids,)
    parts = [
        InBatch(20, LabelVectors(WEIGHT, *part)).find(batch_of(POSITIVES), X).ids
        for part in ((0, 9), (9, 31), (31, LABELS))
    ]
    for row, ids in zip(whole, np.concatenate(parts, axis=1), strict=True):
        assert sorted(ids[ids != PAD].tolist()) == sorted(row[row != PAD].tolist())


def test_a_recipe_without_them_has_none() -> None:
    assert Negatives().sections == []
    assert [section.hard for section in Negatives(in_batch=3, lsh={"hard": 5}).sections] == [3, 5]


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://sources/data")


NEGATIVES = {
    "random": 4,
    "hard": 0,
    "width": 0,
    "frequency_share": 0.5,
    "in_batch": 3,
    "lsh": {"hard": 5, "bits": 3, "tables": 4, "every": 2, "growth": 1.3},
    "start": 1,
    "warmup": 9,
}


def test_a_run_with_every_source_goes_on_to_the_same_bits(data: SmallData) -> None:
    mixed = recipe(negatives=NEGATIVES, train={"epochs": 4})
    names = count()

    def fresh() -> str:
        return RunLayout(f"memory://sources/run-{next(names)}").root

    losses = train(Trainer.start(data.layout.root, fresh(), mixed, silent))
    steps = len(losses) // 4
    for stop in (2, steps + 1, 2 * steps, 3 * steps + 2):
        run = fresh()
        with pytest.raises(Killed):
            train(Trainer.start(data.layout.root, run, mixed, silent), stop)
        rest = train(Trainer.resume(data.layout.root, run, mixed, silent))
        assert rest == losses[-len(rest) :]
    # What the sources find is scored: without it the same steps have other losses from `start` on.
    plain = recipe(negatives={**NEGATIVES, "in_batch": 1, "lsh": {}}, train={"epochs": 4})
    others = train(Trainer.start(data.layout.root, fresh(), plain, silent))
    assert others[:steps] == losses[:steps]
    assert others[steps] < losses[steps]


def test_sources_with_state_are_refused_on_several_ranks(data: SmallData) -> None:
    class Two(Group):
        ranks = 2
        rank = 0

    with pytest.raises(InputError, match=r"negatives\.lsh on 2 ranks: its state is saved by one rank"):
        Trainer.start(data.layout.root, "memory://sources/two", recipe(negatives=NEGATIVES), silent, Two())
    # One without state is not.
    stateless = recipe(negatives={**NEGATIVES, "lsh": {}})
    context = SourceContext(VECTORS, Two())
    assert not NegativeSources([section.open(context) for section in stateless.negatives.sections]).stateful


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("negatives.pool=all", "scores every label already"),
        ("negatives.lsh.bits=29", "less than or equal to 28"),
        ("negatives.lsh.width=9", r"531,441 buckets .* lower negatives"),
        ("negatives.lsh.tabels=3", "did you mean 'tables'"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("random", ["negatives.lsh.hard=5", change])


def test_start_is_for_sources() -> None:
    with pytest.raises(InputError, match=r"negatives\.start is for"):
        load_recipe("random", ["negatives.start=2"])
