"""Sources of hard negatives, each against what it should find, and together in a run that is stopped and goes on."""

from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import PAD
from schemas.errors import InputError
from schemas.layout import RunLayout
from tests.builders import SmallData, batch_of, build_data
from tests.trainer.test_loop import recipe
from tests.training import assert_resumes, silent, train
from trainer.group import Group
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.negatives.planner import join_hard
from trainer.recipe_files import load_recipe, validate

POSITIVES = [[3, 9], [], [9, 30, 31], [0]]
IDS = st.integers(-1, 9)


@given(st.integers(0, 4), st.integers(0, 4), st.data())
def test_joined_labels_are_the_tables_and_the_found_each_once_without_positives(
    width: int, k: int, data: st.DataObject
) -> None:
    hard = [data.draw(st.lists(IDS, min_size=width, max_size=width)) for _ in POSITIVES]
    others = [data.draw(st.lists(IDS, min_size=k, max_size=k)) for _ in POSITIVES]
    table = np.array(hard, np.int32).reshape(len(POSITIVES), width)
    joined = join_hard(batch_of(POSITIVES), table, np.array(others, np.int64).reshape(len(POSITIVES), k))
    np.testing.assert_array_equal(joined[:, :width], table)
    for query, positives in enumerate(POSITIVES):
        new = [label for label in joined[query, width:].tolist() if label != PAD]
        assert len(new) == len(set(new))
        assert set(new) == set(others[query]) - set(positives) - set(hard[query]) - {PAD}


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://sources/data")


NEGATIVES = {
    "random": 4,
    "frequency_share": 0.5,
    "lsh": {"hard": 5, "bits": 3, "tables": 4, "every": 2},
}


def lns(**lsh: object) -> Recipe:
    """A small recipe with hash tables, and without what `recipe` states of tables."""
    body = recipe(train={"epochs": 4}).model_dump(exclude={"negatives", "refresh"})
    return validate({**body, "method": "lns", "negatives": {**NEGATIVES, "lsh": {**NEGATIVES["lsh"], **lsh}}}, "test")


def test_a_run_with_hash_tables_goes_on_to_the_same_bits(data: SmallData) -> None:
    mixed = lns()
    names = count()

    def fresh() -> str:
        return RunLayout(f"memory://sources/run-{next(names)}").root

    losses = train(Trainer.start(data.layout.root, fresh(), mixed, silent))
    steps = len(losses) // 4
    for stop in (2, steps + 1, 2 * steps, 3 * steps + 2):
        run = fresh()
        assert_resumes(data.layout.root, run, mixed, losses, stop)
    # What the tables find is scored: with fewer tables the same steps have other losses.
    assert train(Trainer.start(data.layout.root, fresh(), lns(tables=1), silent)) != losses


def test_sources_with_state_are_refused_on_several_ranks(data: SmallData) -> None:
    class Two(Group):
        ranks = 2
        rank = 0

    with pytest.raises(InputError, match=r"negatives\.lsh on 2 ranks: this sampler works on a single rank"):
        Trainer.start(data.layout.root, "memory://sources/two", lns(), silent, Two())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("negatives.lsh.bits=29", "less than or equal to 28"),
        ("negatives.lsh.width=30", r"24,300,000 buckets .* lower negatives"),
        ("negatives.lsh.tabels=3", "did you mean 'tables'"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(change: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_recipe("lns", ["negatives.lsh.hard=5", change])
