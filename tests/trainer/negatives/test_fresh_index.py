"""The index of fresh vectors: the best of all labels as they are now, no positives, whatever the sizes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import trainer.negatives.indexes
from tests.builders import batch_of, random_labels
from trainer.group import ALONE
from trainer.heads import Classifier
from trainer.methods.sections import Classifier as Config
from trainer.negatives.base import SourceContext
from trainer.negatives.indexes import FreshIndex, Products

B, D = 7, 12


@given(st.integers(1, 400), st.integers(1, 30), st.sampled_from([16, 48, 1 << 14]), st.integers(0, 9))
def test_no_better_label_is_missed(labels: int, width: int, chunk: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    width = min(width, labels)
    # Small integers: products that bfloat16 holds exactly, and many equal scores.
    x, vectors = (torch.from_numpy(draw.integers(-2, 3, (n, D)).astype(np.float32)) for n in (B, labels))
    positives = [random_labels(draw, labels, 0, labels // 3) for _ in range(B)]
    query = np.repeat(np.arange(B), [len(row) for row in positives])
    masked = torch.from_numpy(query), torch.tensor([label for row in positives for label in row], dtype=torch.long)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.negatives.indexes, "_CHUNK", chunk)
        rows, scores = (part.numpy() for part in Products().best(x, vectors, width, masked))
    expected = x @ vectors.T
    expected[masked] = -torch.inf
    best = expected.topk(width, dim=1).values.numpy()
    assert np.array_equal(-np.sort(-scores, axis=1), best)
    for query, (found, values) in enumerate(zip(rows, scores, strict=True)):
        real = values > -np.inf
        assert len({*found[real].tolist()}) == real.sum()
        assert np.array_equal(expected[query].numpy()[found[real]], values[real])


def test_vectors_as_they_are() -> None:
    draw = np.random.default_rng(0)
    labels, width = 90, 5
    classifier = Classifier(Config(initial_scale=1.0), labels, D, seed=1)
    x = torch.from_numpy(draw.standard_normal((B, D)).astype(np.float32))
    positives = [random_labels(draw, labels, 0, 5) for _ in range(B)]
    index = FreshIndex(width, 0, SourceContext(classifier, ALONE))
    for _ in range(3):
        classifier.vectors.copy_(torch.from_numpy(draw.integers(-3, 4, (labels, D)).astype(np.float32)))
        scores = x.bfloat16().float().numpy() @ classifier.vectors.numpy().T
        for row, own in enumerate(positives):
            scores[row, own] = -np.inf
        ids = index.find(batch_of(positives), x).ids
        found = np.take_along_axis(scores, ids, 1)
        assert np.allclose(found, -np.sort(-scores, axis=1)[:, :width], rtol=0.01, atol=0.05)  # as bfloat16 tells apart


@given(st.integers(1, 60), st.integers(1, 30), st.integers(0, 9))
def test_what_stays_on_a_device_is_in_the_same_order(labels: int, width: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    classifier = Classifier(Config(initial_scale=1.0), labels, D, seed=1)
    classifier.vectors.copy_(torch.from_numpy(draw.integers(-1, 2, (labels, D)).astype(np.float32)))  # scores are equal
    batch = batch_of([random_labels(draw, labels, 0, labels // 2) for _ in range(B)])
    x = torch.from_numpy(draw.integers(-1, 2, (B, D)).astype(np.float32))
    host, device = (FreshIndex(width, 0, SourceContext(classifier, ALONE, on_device=on)) for on in (False, True))
    assert device.find(batch, x).ids.tolist() == host.find(batch, x).ids.tolist()


def test_rows_without_enough_labels_are_padded() -> None:
    labels = 20
    classifier = Classifier(Config(initial_scale=1.0), labels, D, seed=1)
    positives = [list(range(labels - 2)), *[[0]] * (B - 1)]
    ids = FreshIndex(4, 0, SourceContext(classifier, ALONE)).find(batch_of(positives), torch.ones(B, D)).ids
    assert sorted(ids[0].tolist()) == [-1, -1, labels - 2, labels - 1]
    assert (ids[1:] > 0).all()
