"""Vectors that begin at the texts of their labels."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from tests.builders import SmallData, build_data, ragged, tokens_of
from tests.training import assert_resumes, silent, train, with_sections
from trainer.heads import Classifier
from trainer.loop import Trainer
from trainer.methods.recipe import Recipe
from trainer.model import Model, initialise_from_texts

SECTIONS: dict[str, Any] = {
    "encoder": {"dimension": 6, "buckets": 64},
    "classifier": {"bias": True, "initial_bias": -3.0, "initial": "labels", "initial_scale": 2.0},
    "negatives": {"random": 4},
    "order": {"batch": 16, "streams": 2, "threads": 0},
    "train": {"epochs": 2},
    "logging": {"tensorboard": False},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("initial") / "data"))


def recipe(**sections: dict[str, Any]) -> Recipe:
    return with_sections(SECTIONS, sections)


def test_every_vector_has_the_direction_of_its_label_s_text_and_the_length_asked_for(data: SmallData) -> None:
    model = Model.build(recipe(), data.vocabulary, data.labels)
    initialise_from_texts(model, data.layout, 2.0)
    x = model.embed(tokens_of(ragged(data.label_points.tokens, np.uint16)))[:, :6]
    torch.testing.assert_close(model.head.vectors[:, :6], normalize(x) * 2)
    assert (model.head.vectors[:, 6] == -3).all()


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_fill_the_labels_that_they_have(data: SmallData, ranks: int) -> None:
    whole = Model.build(recipe(), data.vocabulary, data.labels)
    initialise_from_texts(whole, data.layout, 2.0)
    parts = []
    for rank in range(ranks):
        of_rank = SimpleNamespace(rank=rank, ranks=ranks)
        part = replace(whole, head=Classifier(recipe().classifier, data.labels, 6, 0, group=of_rank))
        initialise_from_texts(part, data.layout, 2.0)
        parts.append(part.head.vectors)
    torch.testing.assert_close(torch.cat(parts), whole.head.vectors)


def test_a_run_that_was_cut_off_before_its_first_checkpoint_begins_there_again(data: SmallData, tmp_path: Path) -> None:
    straight = train(Trainer.start(data.layout.root, str(tmp_path / "straight"), recipe(), silent))
    assert assert_resumes(data.layout.root, str(tmp_path / "cut"), recipe(), straight, 1) == len(straight)
    zeros = recipe(classifier={**SECTIONS["classifier"], "initial": "random", "initial_scale": 0.0})
    assert train(Trainer.start(data.layout.root, str(tmp_path / "zeros"), zeros, silent)) != straight


def test_what_cannot_begin_so_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs classifier\.initial_scale"):
        recipe(classifier={"initial": "labels", "initial_scale": 0.0})
