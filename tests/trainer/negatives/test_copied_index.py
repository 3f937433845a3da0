"""The trainer's own index: the best of its copy of the vectors, no positives, rebuilt when it is due."""

import numpy as np
import pytest
import torch

from tests.builders import Rows, batch_of, random_labels
from trainer.group import ALONE
from trainer.heads import Classifier
from trainer.methods.sections import Classifier as Config
from trainer.negatives.base import SourceContext
from trainer.negatives.indexes import CopiedIndex

L, D, B, K = 60, 6, 20, 4


def setting(index: str = "exact", every: int = 3, lag: int = 0) -> tuple[CopiedIndex, Classifier, Rows, torch.Tensor]:
    draw = np.random.default_rng(0)
    positives = [random_labels(draw, L, 0, 5) for _ in range(B)]
    x = torch.from_numpy(draw.standard_normal((B, D)).astype(np.float32))
    classifier = Classifier(Config(initial_scale=1.0), L, D, seed=1)
    return (
        CopiedIndex(K, 0, SourceContext(classifier, ALONE), index, every, lag),
        classifier,
        positives,
        x,
    )


def best(vectors: np.ndarray, positives: Rows, x: torch.Tensor) -> list[list[int]]:
    scores = x.numpy() @ vectors.T
    for row, labels in enumerate(positives):
        scores[row, labels] = -np.inf
    return np.argsort(-scores, axis=1)[:, :K].tolist()


def test_the_best_of_stale_vectors() -> None:
    index, classifier, positives, x = setting()
    batch = batch_of(positives)
    stale = classifier.vectors.numpy().copy()
    for step in range(7):
        if step in (3, 6):
            stale = classifier.vectors.numpy().copy()
        assert index.find(batch, x).ids.tolist() == best(stale, positives, x), step
        classifier.vectors.mul_(-1)  # training goes on
    index.before_checkpoint()
    fresh = classifier.vectors.numpy().copy()
    assert index.find(batch, x).ids.tolist() == best(fresh, positives, x)


def test_one_built_beside_the_training_is_used_so_many_steps_after_its_copy() -> None:
    every, lag, dropped = 4, 2, 15
    index, classifier, positives, x = setting(every=every, lag=lag)
    batch = batch_of(positives)
    draw = np.random.default_rng(1)
    used = waiting = classifier.vectors.numpy().copy()
    age = 0  # steps since the first index, or since the last that was built of the vectors of its own step
    for step in range(30):
        if step == dropped:  # between the copy and its use
            index.before_checkpoint()
            used, age = classifier.vectors.numpy().copy(), 0
        if age and age % every == 0:
            waiting = classifier.vectors.numpy().copy()
        if age > every and age % every == lag:
            used = waiting
        assert index.find(batch, x).ids.tolist() == best(used, positives, x), step
        classifier.vectors.copy_(torch.from_numpy(draw.standard_normal((L, D)).astype(np.float32)))
        age += 1


@pytest.mark.parametrize("spec", ["IVF4,Flat", "IVF4,PQ4x4", "mips"])
def test_a_faiss_index(spec: str) -> None:
    index, classifier, positives, x = setting(spec)
    ids = index.find(batch_of(positives), x).ids
    expected = best(classifier.vectors.numpy(), positives, x)
    assert np.mean([len({*a} & {*b}) / K for a, b in zip(ids.tolist(), expected, strict=True)]) > 0.85
    assert not any({*row} & {*labels} for row, labels in zip(ids.tolist(), positives, strict=True))


@pytest.mark.parametrize("clustered", [True, False])
def test_an_index_is_given_up_where_scoring_every_label_is_cheaper(
    clustered: bool,
) -> None:
    labels, width = 6_000, 64
    draw = np.random.default_rng(0)
    classifier = Classifier(Config(), labels, width, seed=1)
    near = 100 * draw.standard_normal((60, width))[np.arange(labels) % 60] if clustered else 0
    vectors = near + draw.standard_normal((labels, width))
    classifier.vectors.copy_(torch.from_numpy(vectors.astype(np.float32)))
    x = torch.from_numpy((near + draw.standard_normal((labels, width)))[:B].astype(np.float32))
    index = CopiedIndex(K, 0, SourceContext(classifier, ALONE), "auto", 9, 0)
    ids = index.find(batch_of([[] for _ in range(B)]), x).ids
    block, _ = index._current or pytest.fail("nothing was built")
    assert (block.index is not None) == clustered
    if not clustered:
        assert ids.tolist() == best(classifier.vectors.numpy(), [[] for _ in range(B)], x)


def test_rows_without_enough_labels_are_padded() -> None:
    index, _, _, x = setting()
    positives = [list(range(L - 2)), *[[0]] * (B - 1)]
    ids = index.find(batch_of(positives), x).ids
    assert sorted(ids[0].tolist()) == [-1, -1, L - 2, L - 1]
