"""A small model with classifier vectors, its embeddings of queries, and the scores of all pairs by brute force."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize

from tests.builders import SmallData, ragged, tokens_of
from tests.ranks import on_ranks
from trainer.group import ALONE, Group
from trainer.methods.recipe import Recipe
from trainer.model import Model
from trainer.stream import open_queries

D = 6
SECTIONS: dict[str, Any] = {
    "encoder": {"dimension": D, "buckets": 64},
    "classifier": {"bias": True, "initial_scale": 1.0},
    "negatives": {"random": 4},
    "order": {"batch": 16, "streams": 2, "threads": 0},
    "train": {"epochs": 2},
    "logging": {"tensorboard": False},
}


def model_of(data: SmallData, group: Group = ALONE) -> Model:
    return Model.build(Recipe.model_validate(SECTIONS), data.vocabulary, data.labels, group=group)


def queries(data: SmallData, model: Model, split: str = "test") -> torch.Tensor:
    table = open_queries(data.layout, split)
    return torch.cat([model.embed_table(rows) for rows in table.batches(model.columns)])


def brute_force(data: SmallData, model: Model, x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """E(z).x and w.x of all pairs, [B, L]."""
    z = normalize(model.embed(tokens_of(ragged(data.label_points.tokens, np.uint16)))[:, :D])
    return (x[:, :D] @ z.T).numpy(), (x @ model.head.vectors.T).numpy()


def assert_two_ranks_rank_as_one(
    top: Callable[[Group, SmallData], tuple[np.ndarray, np.ndarray]], data: SmallData
) -> None:
    """Check that `top(group, data)`, scores and ids of the best labels, is on two ranks as on one."""
    (scores, ids), (others, other_ids) = on_ranks(2, top, data)
    np.testing.assert_array_equal(ids, other_ids)
    np.testing.assert_array_equal(scores, others)
    expected_scores, expected = top(ALONE, data)
    np.testing.assert_array_equal(ids, expected)
    np.testing.assert_allclose(scores, expected_scores, rtol=1e-5)
    assert ids.max() >= data.labels // 2 > ids.min()  # both ranks have some of them
