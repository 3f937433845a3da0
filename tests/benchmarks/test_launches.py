"""Steps on a device stay few operations; NumPy is at work ahead of them."""

import pytest
import torch

from benchmarks.launches import META, Counting, bag_step, classifier_step, counting
from trainer.group import ALONE
from trainer.heads import SubBatches, WholeBatch
from trainer.methods.recipe import Recipe
from trainer.model import Model
from trainer.setup import open_query_embeddings
from trainer.step import Clock


def test_operations_are_counted_and_views_are_not() -> None:
    with Counting() as count:
        x = torch.zeros(4, 3, device="meta")
        (x[1:] + 1).view(-1).index_select(0, torch.arange(2, device="meta"))
    assert dict(count.operations) == {"zeros": 1, "add": 1, "arange": 1, "index_select": 1}
    assert count.bytes == 4 * 12 + 4 * 2 * 9 + 8 * 2 + (8 * 2 + 4 * 2 * 2)  # of a look-up what it looks up, twice


@pytest.mark.parametrize(("pool", "most"), [("own", 25), ("shared", 30), ("full", 30)])
def test_a_step_of_the_classifier_is_few_operations(pool: str, most: int) -> None:
    """As many for any batch: a step of 16 queries is told by its operations alone."""
    count = classifier_step(pool, 16, 100_000)
    assert count.operations.total() <= most
    assert "cummax" not in count.operations  # of which one block of threads does all


def test_so_is_a_bag_s_which_is_prepared_ahead() -> None:
    count, _ = bag_step(16, 100_000)
    assert count.operations.total() <= 60


@pytest.mark.parametrize(("changes", "kind"), [({}, WholeBatch), ({"accumulate": 2}, SubBatches)])
def test_batches_are_prepared_ahead_for_a_device_and_as_a_whole_alone(changes: dict, kind: type) -> None:
    recipe = Recipe.model_validate({"encoder": {"dimension": 4, "buckets": 16}, "train": changes})
    for device in (torch.device("cpu"), META):
        queries = open_query_embeddings(recipe, Model.build(recipe, 10, 20, device=device), ALONE, Clock())
        assert isinstance(queries, kind)
        assert (queries.preparing() is not None) == (kind is WholeBatch and device == META)


def test_of_wide_vectors_a_query_has_several_programs() -> None:
    with counting() as count:
        from trainer.rows import triton_kernels

        assert triton_kernels.score_tiles(64)["SPLITS"] == 1 < triton_kernels.score_tiles(512)["SPLITS"]
    assert not count.operations
