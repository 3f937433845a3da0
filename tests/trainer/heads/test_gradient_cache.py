"""Cached gradients are those of the whole batch, with dropout, on one rank and two; a rank's last label is trained."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.bert import write_bert
from tests.builders import SmallData, batch_of, build_data
from tests.ranks import on_ranks
from trainer.encoders.base import Encoder
from trainer.group import ALONE, Group, label_range
from trainer.heads import LabelEncoderHead, SubBatches, open_label_texts
from trainer.methods.recipe import Recipe
from trainer.model import Model
from trainer.negatives.planner import Planner
from trainer.negatives.planner import range_candidates as every_label
from trainer.step import StepContext, take_step
from trainer.stream.batch import Batch

LABELS, QUERIES, VOCABULARY = 24, 8, 50
KINDS = ["bag", "transformer"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("data")), labels=LABELS, vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_bert(tmp_path_factory.mktemp("bert"), VOCABULARY, layers=1)


def recipe_of(kind: str, model: str, loss: str = "decoupled", **head: Any) -> Recipe:
    encoder: dict[str, Any] = {"kind": kind, "dimension": 16, "dropout": 0.2, "normalize": True}
    if kind == "transformer":
        encoder["model"] = model
    else:
        encoder |= {"ngrams": 2, "buckets": 40, "residual": True, "feature_dropout": 0.2, "optimizer": "sgd"}
    return Recipe.model_validate(
        {
            "encoder": encoder,
            "method": "dexml",
            "head": head,
            "loss": {"kind": loss, "temperature": 0.2},
        }
    )


def batch() -> Batch:
    draw = np.random.default_rng(1)
    tokens = [draw.integers(0, VOCABULARY, 1 + row % 4).tolist() for row in range(QUERIES)]
    positives = [sorted({row, (5 * row) % LABELS}) for row in range(QUERIES)]
    positives[3] = [LABELS // 2 - 1, LABELS - 1]  # the last label of either rank
    return batch_of(positives, tokens=tokens)


def part_of(batch: Batch, group: Group) -> Batch:
    """The rank's queries."""
    start, stop = label_range(len(batch), group.rank, group.ranks)
    low, high = batch.positive_offsets[[start, stop]]
    return Batch(
        batch.epoch,
        batch.step,
        batch.rows[start:stop],
        batch.inputs.slice(start, stop),
        batch.positives[low:high],
        batch.positive_offsets[start : stop + 1] - low,
        None if batch.hard is None else batch.hard[start:stop],
    )


def context_of(recipe: Recipe, data: SmallData, group: Group = ALONE) -> StepContext:
    """Parts of a step: queries and labels in sub-batches."""
    encoder = recipe.encoder.build(VOCABULARY, 0)
    of_labels = encoder if recipe.encoders == 1 else recipe.encoder.build(VOCABULARY, 1)
    head = LabelEncoderHead(recipe, of_labels, LABELS, open_label_texts(data.layout, "tokens"), group)
    planner = Planner(recipe.negatives, LABELS, recipe.train.seed)
    return StepContext(Model(encoder, head), planner, SubBatches(encoder, QUERIES // 2 // group.ranks), group)


def head_of(recipe: Recipe, data: SmallData) -> LabelEncoderHead:
    head = context_of(recipe, data).model.head
    assert isinstance(head, LabelEncoderHead)
    return head


Gradients = dict[str, np.ndarray]  # by parameter


def gradients_of(encoder: Encoder) -> Gradients:
    """Return the gradients of any encoder, as an SGD step of rate one takes them."""
    named = encoder._modules.named_parameters()
    gradients = {name: parameter.grad.numpy() for name, parameter in named if parameter.grad is not None}
    touched = getattr(encoder, "_touched", None)
    if touched is not None:
        ids, rows = touched.take()
        table = torch.zeros(encoder._table.shape)  # type: ignore[attr-defined]
        gradients["table"] = table.index_add_(0, torch.from_numpy(ids), rows.grad).numpy()
    return gradients


def cached(group: Group, recipe: Recipe, data: SmallData) -> tuple[float, list[Gradients]]:
    context = context_of(recipe, data, group)
    result = take_step(context, part_of(batch(), group), 0, 1.0, update=False)
    assert len(result.x) == QUERIES
    encoders = list(context.model.encoders.values())
    for encoder in encoders:
        encoder.reduce(group)
    return result.loss.item(), [gradients_of(encoder) for encoder in encoders]


def whole(recipe: Recipe, data: SmallData) -> tuple[float, list[Gradients]]:
    """The same loss with one graph from the tokens on: nothing cached, nothing computed twice."""
    whole_batch, key = batch(), (0, 0)
    encoders = list(context_of(recipe, data).model.encoders.values())
    query_encoder, label_encoder = encoders[0], encoders[-1]

    def encoded(encoder: Encoder, inputs: Any, count: int, size: int, kind: int) -> torch.Tensor:
        parts = []
        for start in range(0, count, size):
            part_key = (*key, 2 * start + kind)
            parts.append(encoder.encode(encoder.prepare(inputs(start, min(start + size, count)), part_key), part_key))
        return torch.cat(parts)

    texts = open_label_texts(data.layout, "tokens")
    x = encoded(query_encoder, whole_batch.inputs.slice, QUERIES, 2, 0)
    z = encoded(label_encoder, lambda a, b: texts.slice(a, b), LABELS, recipe.head.label_batch, 1)
    loss = recipe.loss.build()(x, z, every_label(whole_batch, 0, LABELS)) / QUERIES
    loss.backward()
    return loss.item(), [gradients_of(encoder) for encoder in encoders]


def assert_same(got: Any, expected: Any) -> None:
    assert got[0] == pytest.approx(expected[0], rel=1e-5)
    for gradients, reference in zip(got[1], expected[1], strict=True):
        assert gradients.keys() == reference.keys()
        for name in gradients:
            np.testing.assert_allclose(gradients[name], reference[name], rtol=1e-4, atol=1e-6, err_msg=name)
            assert np.abs(reference[name]).max() > 0 or "key.bias" in name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [True, False])
def test_cached_is_whole_with_dropout(kind: str, shared: bool, data: SmallData, bert: str) -> None:
    for loss in ("decoupled", "softtopk"):
        recipe = recipe_of(kind, bert, loss, label_batch=4, shared=shared)
        assert_same(cached(ALONE, recipe, data), whole(recipe, data))


def of_kinds(group: Group, recipes: list[Recipe], data: SmallData) -> list[tuple[float, list[Gradients]]]:
    return [cached(group, recipe, data) for recipe in recipes]


@pytest.mark.slow
def test_two_ranks_are_one_with_dropout(data: SmallData, bert: str) -> None:
    recipes = [recipe_of(kind, bert, label_batch=4) for kind in KINDS]
    expected = [whole(recipe, data) for recipe in recipes]
    for results in on_ranks(2, of_kinds, recipes, data):
        for result, reference in zip(results, expected, strict=True):
            assert_same(result, reference)
