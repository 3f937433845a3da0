"""The classifier's vectors: the bias as a last column, initial values, and steps on touched rows."""

import numpy as np
import pytest
import torch

from tests.builders import batch_of
from trainer.heads import Classifier
from trainer.methods.kinds import LOSSES, options_of
from trainer.methods.sections import Classifier as Config
from trainer.negatives.planner import candidates_for_every_query, shared_pool

L, D = 9, 4


def build(seed: int = 0, **options: object) -> Classifier:
    return Classifier(Config.model_validate(options), L, D, seed)


def test_vectors_start_at_zero_or_random_by_the_seed() -> None:
    assert (build().vectors == 0).all()
    first, same, other = (build(seed, initial_scale=0.5).vectors for seed in (1, 1, 2))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
    assert 0.2 < float(first.std()) < 1


def test_the_bias_is_added_to_every_score() -> None:
    x = torch.randn(5, D)
    plain, biased = build(1, initial_scale=1.0), build(1, bias=True, initial_bias=-7.0)
    assert biased.vectors.shape == (L, D + 1)
    biased.matrix.weight[:, :D] = plain.vectors
    torch.testing.assert_close(biased.extend(x) @ biased.vectors.T, plain.extend(x) @ plain.vectors.T - 7)
    assert plain.extend(x) is x


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_steps_lower_the_loss_and_touch_candidates_only(optimizer: str) -> None:
    classifier = build(optimizer=optimizer, lr=0.1, bias=True)
    batch = batch_of([[0], [2, 3], [3]])
    x = classifier.extend(torch.randn(3, D, generator=torch.Generator().manual_seed(0)))
    candidates = shared_pool(batch, None, np.array([1, 5]), 2.0)
    losses = []
    for _ in range(5):
        loss, _ = classifier.descend(x, candidates, 1.0)
        losses.append(loss)
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
    touched = (classifier.vectors != 0).any(1).nonzero().flatten().tolist()
    assert touched == [0, 1, 2, 3, 5]


@pytest.mark.parametrize("loss", ["bce", "triplet"])
@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
def test_normalized_vectors_stay_on_the_sphere(optimizer: str, loss: str) -> None:
    config = Config(normalize=True, initial_scale=1.0, optimizer=optimizer, lr=0.1)
    classifier = Classifier(config, L, D, 0, options_of(LOSSES, loss, "loss.kind")(kind=loss).build())
    before = classifier.vectors.clone()
    torch.testing.assert_close(before.norm(dim=1), torch.ones(L))
    batch = batch_of([[0], [2, 3], [3]])
    x = torch.nn.functional.normalize(torch.randn(3, D, generator=torch.Generator().manual_seed(0)), dim=1)
    candidates = candidates_for_every_query(batch, np.array([0, 1, 2, 3, 5]))
    losses = [classifier.descend(x, candidates, 1.0)[0] for _ in range(8)]
    assert losses[-1] < losses[0]
    torch.testing.assert_close(classifier.vectors.norm(dim=1), torch.ones(L))
    moved = (classifier.vectors != before).any(1).nonzero().flatten().tolist()
    assert set(moved) <= {0, 1, 2, 3, 5}
    assert len(moved) > 2


@pytest.mark.parametrize("options", [{"initial_scale": 2.0}, {"bias": True}, {"dtype": "bfloat16"}], ids=str)
def test_what_cannot_keep_its_length_is_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=r"classifier\.normalize keeps vectors at length 1"):
        Config.model_validate({"normalize": True, "initial_scale": 1.0, **options})
