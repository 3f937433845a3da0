"""The label-encoder head: which labels a step scores, on which rank, and what it learns."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from schemas import PAD
from schemas.errors import InputError
from tests.builders import SmallData, batch_of, build_data, value_of
from tests.ranks import on_ranks
from tests.trainer.heads.test_gradient_cache import LABELS, VOCABULARY, context_of, head_of, part_of
from trainer.group import ALONE, Group, label_range
from trainer.heads import open_label_texts
from trainer.methods.recipe import Recipe
from trainer.negatives.planner import Planner, candidates_for_every_query, draw_positives
from trainer.step import take_step
from trainer.stream.batch import Batch


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("data")), labels=LABELS, vocabulary=VOCABULARY)


def recipe_of(pool: str, hard: int = 0, **encoder: object) -> Recipe:
    return Recipe.model_validate(
        {
            "encoder": {"dimension": 16, "ngrams": 1, "normalize": True, "lr": 0.1, **encoder},
            "method": "dexml",
            "head": {"label_batch": 5},
            "negatives": {"pool": pool, **({"hard": hard, "width": 4} if hard else {})},
            "loss": {"kind": "decoupled", "temperature": 0.1},
        }
    )


def batch(step: int = 0) -> Batch:
    """Eight queries; the last two know nothing but labels that others have too."""
    draw = np.random.default_rng(2)
    tokens = [draw.integers(0, VOCABULARY, 3).tolist() for _ in range(8)]
    positives = [[1, 5], [2], [LABELS - 1], [5], [7, 9], [LABELS // 2 - 1], [1], [2, 9]]
    hard = np.array([[row + 10, 1 if row > 6 else 3, (5 * row) % LABELS, PAD] for row in range(8)])
    hard[1, 2] = 2 + 10
    batch = batch_of(positives, hard, tokens)
    return Batch(1, step, batch.rows, batch.inputs, batch.positives, batch.positive_offsets, batch.hard)


def planner_of(recipe: Recipe) -> Planner:
    return Planner(recipe.negatives, LABELS, recipe.train.seed)


def test_a_pool_is_the_batch_s_labels_each_once(data: SmallData) -> None:
    recipe, whole_batch = recipe_of("batch", 4), batch()
    ids = head_of(recipe, data).pool(whole_batch, planner_of(recipe).table_negatives(whole_batch))
    assert list(ids) == sorted({*whole_batch.positives.tolist(), *whole_batch.hard.ravel().tolist()} - {PAD})
    candidates = candidates_for_every_query(whole_batch, ids)
    pairs = zip(candidates.pair_query.tolist(), candidates.ids[candidates.pair_label].tolist(), strict=True)
    owned = [
        (row, label)
        for row in range(8)
        for label in whole_batch.positives[slice(*whole_batch.positive_offsets[row : row + 2])]
    ]
    assert list(pairs) == owned
    # A query's own positive is no negative of it, whoever brought it into the pool.
    assert np.array_equal(candidates.masked_pool, candidates.pair_label)


def test_before_the_first_table_the_pool_is_the_positives(data: SmallData) -> None:
    whole_batch = replace(batch(), hard=None)
    assert list(head_of(recipe_of("batch", 4), data).pool(whole_batch)) == sorted({*whole_batch.positives.tolist()})


def test_m_of_the_table_are_drawn_anew_each_step(data: SmallData) -> None:
    recipe = recipe_of("batch", 1)
    head, planner = head_of(recipe, data), planner_of(recipe)
    pools = [tuple(head.pool(batch(step), planner.table_negatives(batch(step)))) for step in range(20)]
    assert len(set(pools)) > 1
    assert pools == [tuple(head.pool(batch(step), planner.table_negatives(batch(step)))) for step in range(20)]


def test_one_positive_a_query_is_drawn_anew_each_step(data: SmallData) -> None:
    recipe = recipe_of("batch")
    choices = set()
    for step in range(20):
        whole_batch = batch(step)
        drawn = draw_positives(whole_batch, 1, recipe.train.seed)
        assert drawn is not None
        np.testing.assert_array_equal(drawn, draw_positives(batch(step), 1, recipe.train.seed))
        learnt = [
            whole_batch.positives[low:high][drawn[low:high]]
            for low, high in itertools.pairwise(whole_batch.positive_offsets)
        ]
        assert [len(labels) for labels in learnt] == [1] * 8
        choices.add(tuple(int(labels[0]) for labels in learnt))
        ids = head_of(recipe, data).pool(whole_batch, None, drawn)
        assert list(ids) == sorted({int(labels[0]) for labels in learnt})
        candidates = candidates_for_every_query(whole_batch, np.asarray(ids), None, drawn)
        # It learns what it drew; others of its positives are no negatives of it, whoever brought them.
        assert candidates.ids[candidates.pair_label].tolist() == [int(labels[0]) for labels in learnt]
        masked = set(
            zip(candidates.masked_query.tolist(), candidates.ids[candidates.masked_pool].tolist(), strict=True)
        )
        rows = np.repeat(np.arange(8), np.diff(whole_batch.positive_offsets))
        owned = zip(rows.tolist(), whole_batch.positives.tolist(), strict=True)
        assert masked == {(row, label) for row, label in owned if label in ids}
    assert len(choices) > 4
    assert draw_positives(batch(), 0, 0) is None
    many = draw_positives(batch(), 9, 0)
    assert many is not None
    assert many.all()


@pytest.mark.parametrize("share", [(0, 4), (4, 9), (9, 9)])
def test_a_share_of_the_pool_has_its_own_positives_only(share: tuple[int, int]) -> None:
    ids = np.array([0, 2, 3, 5, 8, 9, 11, 12, 20])[slice(*share)]
    candidates = candidates_for_every_query(batch_of([[2, 20], [], [5, 11, 12]]), ids)
    results = set(zip(candidates.pair_query.tolist(), candidates.ids[candidates.pair_label].tolist(), strict=True))
    assert results == {(q, label) for q, label in [(0, 2), (0, 20), (2, 5), (2, 11), (2, 12)] if label in ids}


Trained = tuple[list[float], np.ndarray]  # losses of some steps, all label embeddings after them
RECIPES = {"all": recipe_of("all"), "batch": recipe_of("batch"), "mined": recipe_of("batch", 2)}


def trained(group: Group, data: SmallData) -> dict[str, Trained]:
    results = {}
    for name, recipe in RECIPES.items():
        context = context_of(recipe, data, group)
        losses = []
        for step in range(6):
            whole_batch = batch(step)
            rank_batch = part_of(whole_batch if recipe.negatives.max_hard else replace(whole_batch, hard=None), group)
            losses.append(take_step(context, rank_batch, step, 1.0).loss.item())
        results[name] = losses, group.all_gather(context.model.head.vectors).numpy()
    return results


@pytest.mark.slow
def test_two_ranks_train_as_one_does(data: SmallData) -> None:
    alone = trained(ALONE, data)
    for results in on_ranks(2, trained, data):
        for name, (losses, z) in alone.items():
            assert losses[-1] < losses[0]
            assert results[name][0] == pytest.approx(losses, rel=1e-4)
            np.testing.assert_allclose(results[name][1], z, rtol=1e-3, atol=1e-4)


def test_every_label_of_every_share_is_found_again(data: SmallData) -> None:
    """The last label of a rank's range too, which another program never trains: a query for each of all labels."""
    tokens = [[label, label + 10] for label in range(LABELS)]
    whole_batch = batch_of([[label] for label in range(LABELS)], tokens=tokens)
    for ranks in (1, 2, 3):
        head = head_of(recipe_of("all"), data)
        results: set[int] = set()
        for rank in range(ranks):
            ids = head.pool(whole_batch)
            start, stop = label_range(len(ids), rank, ranks)
            candidates = candidates_for_every_query(whole_batch, np.asarray(ids[start:stop]))
            results |= {int(candidates.ids[place]) for place in candidates.pair_label}
        assert results == set(range(LABELS))


@pytest.mark.parametrize("kind", ["tokens", "features", "both"])
def test_any_labels_in_any_order_are_their_rows(kind: str, tmp_path: object) -> None:
    data = build_data(str(tmp_path), features=9)
    texts = open_label_texts(data.layout, kind)
    ids = np.random.default_rng(0).integers(0, data.labels, 50)
    for selection in (ids, np.arange(data.labels), np.empty(0, np.int64)):
        inputs = texts.take(selection)
        points = data.label_points
        if kind != "features":
            assert (
                inputs.tokens.offsets.tolist() == np.cumsum([0, *(len(points.tokens[i]) for i in selection)]).tolist()
            )
            assert inputs.tokens.values.tolist() == [token for i in selection for token in points.tokens[i]]
        if kind != "tokens":
            assert inputs.features.ids.tolist() == [feature for i in selection for feature in points.features[i]]
            assert inputs.features.values.tolist() == [
                value for i in selection for value in value_of(points.features[i])
            ]


def test_labels_without_what_is_read_are_refused(tmp_path: object) -> None:
    data = build_data(str(tmp_path))
    with pytest.raises(InputError, match="feature_ids"):
        open_label_texts(data.layout, "features")
