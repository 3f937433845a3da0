"""Batches of all ranks that threads gather and plan ahead are those made in line, wherever the steps on them end."""

import dataclasses
from itertools import islice
from typing import Any

import numpy as np
import pytest

from tests.builders import SmallData, build_data
from tests.ranks import on_ranks
from trainer.group import ALONE, Group, RankLostError
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.negatives.planner import GlobalBatch
from trainer.step import GlobalBatches

RECIPE: dict[str, dict[str, Any]] = {
    "data": {"label_texts": True},
    "order": {"batch": 24, "streams": 6, "window_groups": 2, "threads": 2},
    "encoder": {"dimension": 4, "buckets": 32},
    "train": {"epochs": 2, "threads": 1},
    "logging": {"tensorboard": False},
}
POOLS: dict[str, dict[str, Any]] = {
    "shared": {"method": "astra", "negatives": {"pool": "shared", "random": 12, "hard": 0}},
    "own": {"method": "astra", "negatives": {"pool": "own", "random": 12, "hard": 0}},
    "all": {"method": "renee"},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("ranks") / "data"), rows={"train": 150, "test": 9})


def open_batches(group: Group, data: str, run: str, pool: str) -> GlobalBatches:
    recipe = Recipe.model_validate({**RECIPE, **POOLS[pool]})
    return Trainer.start(data, run, recipe, print, group).context.batches


def taken_by_a_step(batch: GlobalBatch) -> tuple[Any, ...]:
    """Return all that a step takes from the batch, to be compared."""
    part, whole = batch.local, batch.gathered
    arrays = (part.rows, whole.rows, whole.positives, whole.positive_offsets, *(whole.candidates or ()))
    return (whole.epoch, whole.step, batch.sizes, *(array.tolist() for array in arrays if array is not None))


def ahead_and_in_line(group: Group, data: str, run: str, pool: str) -> None:
    batches = open_batches(group, data, run, pool)
    in_line = dataclasses.replace(batches, threads=0)
    assert batches.plans
    for epoch in range(2):
        batches.stream.set_epoch(epoch)
        made = list(batches)
        batches.stream.set_epoch(epoch)
        expected = [
            dataclasses.replace(
                batch, gathered=dataclasses.replace(batch.gathered, candidates=batches.planner(batch.gathered))
            )
            for batch in in_line
        ]
        assert len(made) == batches.stream.steps > 4
        assert [taken_by_a_step(batch) for batch in made] == [taken_by_a_step(batch) for batch in expected]
        rows = np.concatenate([batch.gathered.rows for batch in made])
        assert sorted(rows) == list(range(len(rows)))


@pytest.mark.parametrize("pool", POOLS)
def test_what_is_made_ahead_is_what_is_made_in_line(data: SmallData, tmp_path: Any, pool: str) -> None:
    on_ranks(3, ahead_and_in_line, data.layout.root, str(tmp_path / "run"), pool)


def closed_early(group: Group, data: str, run: str) -> None:
    batches = open_batches(group, data, run, "own")
    for steps in range(4):
        batches.stream.set_epoch(0)
        iterator = iter(batches)
        assert [batch.local.step for batch in islice(iterator, steps)] == list(range(steps))
        iterator.close()
        batches.stream.load_state_dict({**batches.stream.state_dict(), "step": steps})
        assert [batch.gathered.step for batch in batches] == list(range(steps, batches.stream.steps))


def test_what_is_closed_early_goes_on(data: SmallData, tmp_path: Any) -> None:
    on_ranks(2, closed_early, data.layout.root, str(tmp_path / "run"))


class Broken:
    """A stream that fails after some batches of rank 1."""

    def __init__(self, stream: Any, rank: int, steps: int) -> None:
        self._stream, self._rank, self._steps = stream, rank, steps

    def __iter__(self) -> Any:
        for batch in self._stream:
            if self._rank == 1 and batch.step == self._steps:
                raise OSError("a file is gone")
            yield batch


def one_breaks(group: Group, data: str, run: str, steps: int) -> int:
    batches = open_batches(group, data, run, "own")
    broken = dataclasses.replace(batches, stream=Broken(batches.stream, group.rank, steps))  # type: ignore[arg-type]
    taken = 0
    try:
        for _ in broken:
            taken += 1
    except RankLostError:
        assert group.rank != 1
    return taken


@pytest.mark.parametrize("steps", [0, 3])
def test_a_rank_that_fails_ends_the_others(data: SmallData, tmp_path: Any, steps: int) -> None:
    taken = on_ranks(3, one_breaks, data.layout.root, str(tmp_path / "run"), steps, killed=[1])
    assert taken == [steps, None, steps]


def test_one_rank_gathers_nothing(data: SmallData, tmp_path: Any) -> None:
    for batch in open_batches(ALONE, data.layout.root, str(tmp_path / "run"), "own"):
        assert batch.gathered is batch.local
        assert batch.gathered.candidates is not None
        assert batch.sizes == [len(batch.local)]
