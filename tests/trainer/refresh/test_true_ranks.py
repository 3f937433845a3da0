"""True ranks of hard negatives: against sorting every label, however the labels are dealt and cut."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InputError
from tests.builders import SmallData, build_data
from tests.ranks import on_ranks
from tests.training import silent, train, with_sections
from trainer.group import ALONE, Group, label_range
from trainer.inputs import Inputs
from trainer.loop import Trainer
from trainer.negatives.planner import restrict_ids
from trainer.recipe_files import load_recipe
from trainer.refresh import hardness
from trainer.stream import Batch
from trainer.tracking import read_metrics

BASE: dict[str, dict] = {
    "order": {"batch": 16, "streams": 4},
    "encoder": {"dimension": 4, "buckets": 64},
    "classifier": {"initial_scale": 0.5, "bias": True},
    "negatives": {"random": 4, "hard": 3},
    "refresh": {"source": "in-trainer", "start": 1, "every_steps": 3, "index": "exact"},
    "train": {"epochs": 3},
    "logging": {"tensorboard": False},
}


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://true-ranks/data", rows={"train": 90, "test": 5})


def drawn(seed: int, rows: int, labels: int, width: int) -> tuple[torch.Tensor, torch.Tensor, Batch]:
    """(vectors, x, a batch with hard negatives that are no positives): scores are whole numbers, many of them equal."""
    draw = np.random.default_rng(seed)
    vectors = torch.from_numpy(draw.integers(-3, 4, (labels, 2)).astype(np.float32))
    x = torch.from_numpy(draw.integers(-3, 4, (rows, 2)).astype(np.float32))
    orders = [draw.permutation(labels) for _ in range(rows)]
    counts = draw.integers(0, 3, rows)
    positives = np.concatenate([np.sort(order[:count]) for order, count in zip(orders, counts, strict=True)])
    hard = np.stack([order[count : count + width] for order, count in zip(orders, counts, strict=True)])
    hard[draw.random(hard.shape) < 0.2] = -1
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return vectors, x, Batch(0, 0, np.arange(rows), Inputs(), positives, offsets, hard)


def by_hand(vectors: torch.Tensor, x: torch.Tensor, batch: Batch, rows: int) -> list[int]:
    assert batch.hard is not None
    scores, measured = (x @ vectors.T).numpy(), []
    for row in range(min(rows, len(batch))):
        mine = batch.positives[batch.positive_offsets[row] : batch.positive_offsets[row + 1]]
        others = np.delete(scores[row], mine)
        measured += [int((others > scores[row, label]).sum()) for label in batch.hard[row] if label >= 0]
    return sorted(measured)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 9), st.integers(8, 60), st.integers(1, 6), st.integers(1, 70))
def test_they_are_those_of_sorting_every_label(seed: int, rows: int, labels: int, width: int, at_a_time: int) -> None:
    vectors, x, batch = drawn(seed, rows, labels, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardness, "LABELS", at_a_time)
        patch.setattr(hardness, "ROWS", 5)
        measured = hardness.measure_true_ranks(vectors, 0, x, batch, batch.hard, ALONE)
    expected = by_hand(vectors, x, batch, 5)
    assert measured.tolist() == expected
    if len(measured):
        facts = hardness.describe(measured)
        assert facts["within_10"] == np.mean([rank < 10 for rank in expected])
        assert facts["negatives"] == len(expected)


def of_part(group: Group) -> list[int]:
    vectors, x, batch = drawn(3, 20, 50, 4)
    part = label_range(50, group.rank, group.ranks)
    assert batch.hard is not None
    hard = restrict_ids(batch.hard, *part)
    measured = hardness.measure_true_ranks(vectors[slice(*part)], part[0], x, batch, hard, group)
    return measured.tolist()


def test_ranks_that_hold_parts_of_the_labels_find_the_same() -> None:
    vectors, x, batch = drawn(3, 20, 50, 4)
    assert on_ranks(2, of_part) == [by_hand(vectors, x, batch, 20)] * 2


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"negatives": {"pool": "own"}},
        {"method": "lns", "negatives": {"lsh": {"hard": 2}}},
    ],
)
def test_looking_changes_nothing(data: SmallData, changed: dict) -> None:
    losses, trainers = [], []
    for every in (0, 1):
        recipe = with_sections(BASE, {**changed, "logging": {"tensorboard": False, "ranks_every": every}})
        run = f"memory://true-ranks/{len(str(changed))}-{every}"
        trainers.append(Trainer.start(data.layout.root, run, recipe, silent))
        losses.append(train(trainers[-1]))
    assert losses[0] == losses[1]
    told = [[line for line in read_metrics(trainer.run) if line["kind"] == "hard"] for trainer in trainers]
    assert not told[0]
    begins = 0 if "method" in changed else 1  # hash tables serve from the first epoch on
    steps = len(losses[0]) // 3
    assert [line["step"] for line in told[1]] == list(range(begins * steps + 1, 3 * steps + 1))
    assert all(0 <= line["rank_p10"] <= line["rank_p50"] <= line["rank_p90"] < line["of"] for line in told[1])


def test_an_index_of_this_very_step_gives_the_first_ranks(data: SmallData) -> None:
    changed = {"refresh": {"every_steps": 1, "index": "exact"}, "logging": {"tensorboard": False, "ranks_every": 1}}
    trainer = Trainer.start(data.layout.root, "memory://true-ranks/fresh", with_sections(BASE, changed), silent)
    train(trainer)
    told = [line for line in read_metrics(trainer.run) if line["kind"] == "hard"]
    assert told
    assert all((line["index_age"], line["rank_p90"]) == (0, 2) for line in told)  # three a query


def test_an_older_index_tells_its_age(data: SmallData) -> None:
    changed = {"logging": {"tensorboard": False, "ranks_every": 1}}
    trainer = Trainer.start(data.layout.root, "memory://true-ranks/aged", with_sections(BASE, changed), silent)
    train(trainer)
    ages = [line["index_age"] for line in read_metrics(trainer.run) if line["kind"] == "hard"]
    assert ages[:6] == [0, 1, 2, 0, 1, 2]


def test_a_dual_encoder_is_refused() -> None:
    with pytest.raises(InputError, match=r"logging\.ranks_every = 5 needs label vectors"):
        load_recipe("dexml", ["logging.ranks_every=5"])
