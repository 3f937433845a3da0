"""The cache of stale label embeddings: what it holds, what the loss makes of it, on one rank and two."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.builders import SmallData, build_data
from tests.ranks import on_ranks
from tests.trainer.heads.test_gradient_cache import LABELS, VOCABULARY, gradients_of, head_of, part_of
from tests.trainer.heads.test_label_encoder import batch, planner_of
from tests.trainer.losses.reference import REFERENCES, rows_of
from trainer.config import Recipe
from trainer.group import ALONE, Group
from trainer.heads.label_cache import LabelCache
from trainer.heads.label_encoder import LabelEncoderHead
from trainer.negatives.planner import among
from trainer.stream.batch import Batch, Candidates

SIZE, STEPS = 12, 4  # three labels a step


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("data")), labels=LABELS, vocabulary=VOCABULARY)


def recipe_of(loss: str = "decoupled", reweight: bool = True, dropout: float = 0.2) -> Recipe:
    encoder = {"dimension": 16, "ngrams": 1, "normalize": True, "lr": 0.1, "dropout": dropout, "optimizer": "sgd"}
    return Recipe.model_validate(
        {
            "encoder": {**encoder, "residual": True, "feature_dropout": dropout},
            "head": {"kind": "label-encoder", "label_batch": 5},
            "negatives": {"pool": "batch", "cache": SIZE, "cache_steps": STEPS, "reweight": reweight},
            "loss": {"kind": loss, "temperature": 0.2, "k": 3},
        }
    )


def given(step: int = 0) -> Batch:
    """Queries without hard negatives, so that most labels are in nobody's pool."""
    made = batch(step)
    return Batch(1, step, made.rows, made.inputs, made.positives, made.positive_offsets)


def test_it_holds_the_newest_of_each_label_outside_the_pool() -> None:
    cache = LabelCache(SIZE, STEPS, LABELS, 1, seed=3)
    added: list[tuple[int, float]] = []
    for step in range(40):
        ids = cache.draw(0, step)
        assert len(ids) == SIZE // STEPS
        z = 100.0 * step + torch.arange(len(ids))[:, None]
        cache.add(ids, z)
        added += zip(ids.tolist(), z[:, 0].tolist(), strict=True)
        expected = {label: value for label, value in added[-SIZE:] if label not in (2, 5, 7)}
        found = cache.outside(np.array([2, 5, 7]))
        assert found.ids.tolist() == sorted(expected)
        assert found.z[:, 0].tolist() == [expected[label] for label in sorted(expected)]
        assert found.z.min() >= 100 * (step - STEPS + 1)  # nothing is older
    assert {label for label, _ in added} == set(range(LABELS))
    assert cache.draw(0, 3).tolist() == LabelCache(SIZE, STEPS, LABELS, 1, seed=3).draw(0, 3).tolist()
    assert not len(cache.outside(range(LABELS)).ids)
    again = LabelCache(SIZE, STEPS, LABELS, 1, seed=3)
    again.load(cache.tensors())
    assert torch.equal(again.outside(range(0)).z, cache.outside(range(0)).z)


def filled(data: SmallData, recipe: Recipe, steps: int = 6) -> LabelEncoderHead:
    """A head some steps later, so that what the cache holds is of several encoders."""
    head = head_of(recipe, data)
    for step in range(steps):
        head.step(given(step), given(step), 1.0)
    head.refresh_cache(1, steps)
    return head


@pytest.mark.parametrize("reweight", [True, False])
@pytest.mark.parametrize("kind", sorted(REFERENCES))
def test_its_labels_are_negatives_of_all_and_take_no_gradient(data: SmallData, kind: str, reweight: bool) -> None:
    recipe, last = recipe_of(kind, reweight), given(6)
    ours, theirs = filled(data, recipe), filled(data, recipe)
    loss = ours.backward(last, last).loss

    pool = sorted(set(last.positives.tolist()))
    (encoder,) = theirs.encoders.values()
    x, z = (
        encoder.encode(encoder.prepare(inputs, key), key)
        for inputs, key in ((last.inputs, (1, 6, 0)), (theirs.texts.take(pool[:5]), (1, 6, 1)))
    )
    rest = encoder.encode(encoder.prepare(theirs.texts.take(pool[5:]), (1, 6, 11)), (1, 6, 11))
    assert theirs.cache is not None
    held = dict(zip(theirs.cache.tensors()["ids"].tolist(), theirs.cache.tensors()["z"], strict=True))
    stale = {label: vector for label, vector in held.items() if label not in pool}
    assert 0 < len(stale) < len(held)
    w = torch.cat([z, rest, *(vector[None, :] for vector in stale.values())])
    weight = (LABELS - len(pool)) / len(stale) if reweight else 1.0
    known = among(last, np.array(pool))
    every = Candidates(
        **{**vars(known), "pool_weight": np.array([1.0] * len(pool) + [weight] * len(stale), np.float32)}
    )
    expected = sum(REFERENCES[kind](row, **options_of(kind)) for row in rows_of(x, w, every, 0.2)) / len(last)
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    ours_of, theirs_of = (gradients_of(next(iter(head.encoders.values()))) for head in (ours, theirs))
    for name, gradient in theirs_of.items():
        np.testing.assert_allclose(ours_of[name], gradient, rtol=1e-3, atol=1e-5, err_msg=name)


def options_of(kind: str) -> dict[str, Any]:
    return {"k": 3.0} if kind == "softtopk" else {}


def trained(group: Group, data: SmallData) -> tuple[list[float], dict[str, np.ndarray]]:
    recipe = recipe_of(dropout=0.0)  # whose masks depend on where sub-batches begin
    head, planner, losses = head_of(recipe, data, group), planner_of(recipe), []
    for step in range(6):
        own = part_of(given(step), group)
        losses.append(head.step(own, planner.gather(own, group), 1.0).loss)
    assert head.cache is not None
    return losses, {name: tensor.numpy() for name, tensor in head.cache.tensors().items()}


def test_two_ranks_hold_and_learn_what_one_does(data: SmallData) -> None:
    losses, cache = trained(ALONE, data)
    both = on_ranks(2, trained, data)
    for theirs, held in both:
        assert theirs == pytest.approx(losses, rel=1e-4)
        np.testing.assert_array_equal(held["ids"], cache["ids"])
        np.testing.assert_allclose(held["z"], cache["z"], rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(both[0][1]["z"], both[1][1]["z"])


def test_it_is_for_the_batch_s_pool() -> None:
    with pytest.raises(ValueError, match=r"negatives\.cache = 5 .* set negatives\.pool = 'batch'"):
        Recipe.model_validate({"head": {"kind": "label-encoder"}, "negatives": {"pool": "all", "cache": 5}})
