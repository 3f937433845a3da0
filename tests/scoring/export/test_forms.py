"""Forms of a transformer's export: an ONNX graph ranks as PyTorch does, without it; what is none of ours is refused."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import extremis
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.mapped import MappedFile
from schemas.ragged import Ragged, offsets_of
from scoring import encoders
from scoring.encoders import TorchInference, write_onnx
from scoring.exported import Exported, forms_of
from tests.bert import write_bert
from tests.command import ROOT, Done, call, environment, refused
from tests.conftest import Once
from tests.hostile.test_exports import sealed
from tests.hostile.test_manifests import change
from trainer.inputs import Inputs
from trainer.methods.kinds import BagSection, TransformerSection, import_name

VOCABULARY = 99
FORMS = ("torch", "onnx", "onnx-int8")
GRAPH, TENSORS = "encoder/model.onnx", "encoder/model.onnx.data"
TEXTS = ["a ship in a storm", "", "the sea", "a portrait of a man " * 20, "oil on canvas, 1802"]
# Answers of an export in a process that has no PyTorch, by itself and by a forked child.
ALONE = """
import json, multiprocessing, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"refused: {name}", name=name)

sys.meta_path.insert(0, Refused())
import extremis
model, texts = extremis.load(sys.argv[1]), json.loads(sys.argv[2])

def answers():
    return [[(label.key, label.score) for label in each.labels] for each in model.predict(texts, max_labels=9)]

here = answers()
with multiprocessing.get_context("fork").Pool(1) as pool:
    assert pool.apply_async(answers).get(60) == here
print(json.dumps(here))
"""


@pytest.fixture(scope="module")
def exports(data: Path, once: Once) -> Path:
    """A run of a transformer, and its fused export in each form."""

    def make(folder: Path) -> None:
        bert = write_bert(
            folder / "bert", open_manifest(DataLayout(str(data)).tokenizer, "tokenizer").parameters["vocabulary"]
        )
        options = [
            *("encoder.kind=transformer", f"encoder.model={bert}", "encoder.dimension=16", "encoder.max_tokens=32"),
            *("encoder.lr=0.01", "negatives.random=32", "train.epochs=1", "train.threads=1", "data.holdout=0.1"),
        ]
        choices = [word for option in options for word in ("--set", option)]
        for command in (
            ("train", "random", data, folder / "run", *choices),
            ("fuse", data, folder / "run"),
            *(("export", data, folder / "run", folder / form, "--form", form) for form in FORMS),
        ):
            done = call(*command)
            assert done.status == 0, done.err

    return once("forms", make)


def answers(place: Path) -> list[list[tuple[str, float]]]:
    return [
        [(label.key, label.score) for label in each.labels]
        for each in extremis.load(place).predict(TEXTS, max_labels=9)
    ]


def test_a_graph_ranks_as_pytorch_does_without_it(exports: Path) -> None:
    words = [sys.executable, "-c", ALONE, str(exports / "onnx"), json.dumps(TEXTS)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment(), cwd=ROOT)
    assert done.returncode == 0, done.stderr
    expected = answers(exports / "torch")
    for found, labels in zip(json.loads(done.stdout), expected, strict=True):
        assert [key for key, _ in found] == [key for key, _ in labels]
        np.testing.assert_allclose([s for _, s in found], [s for _, s in labels], atol=1e-5, rtol=1e-5)


def test_an_export_says_how_near_it_is(exports: Path) -> None:
    facts = {form: open_manifest(str(exports / form), "export").parameters for form in FORMS}
    assert "agreement" not in facts["torch"]
    assert "form" not in facts["torch"]["options"]  # as in exports of before
    near, rounded = facts["onnx"]["agreement"], facts["onnx-int8"]["agreement"]
    assert near["same_best"] == near["same_of_5"] == 1
    assert near["difference"] < 1e-5 < rounded["difference"]
    assert 0.9 < rounded["cosine"] < near["cosine"] + 1e-6
    assert near["queries"] == rounded["queries"] > 100
    sizes = {form: sum(path.stat().st_size for path in (exports / form / "encoder").glob("model*")) for form in FORMS}
    assert sizes["onnx-int8"] < 0.6 * sizes["onnx"]
    assert str(exports).encode() not in (exports / "onnx" / GRAPH).read_bytes()


def test_a_graph_gives_x_of_any_rows(tmp_path: Path) -> None:
    bert = write_bert(tmp_path / "bert", VOCABULARY)
    options = {"kind": "transformer", "model": bert, "pooling": "cls", "bottleneck": True, "dimension": 5, "scale": 9.0}
    section = TransformerSection.model_validate({**options, "max_tokens": 20})
    encoder = section.build(VOCABULARY, 1)
    write_onnx(encoder, tmp_path, int8=False)

    def opened(section: TransformerSection) -> Any:
        files = import_name(forms_of(section)["onnx"])
        return files.open(section, tmp_path, lambda name: MappedFile(str(tmp_path / name)))

    served, rows = opened(section), some_rows()
    x = served.embed(rows)
    np.testing.assert_allclose(x, TorchInference(encoder).embed(rows), atol=1e-5)
    np.testing.assert_allclose(alone(served, rows), x, atol=1e-5)
    assert served.embed(rows.slice(0, 0)).shape == (0, section.dimension)
    with pytest.raises(ValueError, match=r"model\.onnx: the graph has"):
        opened(section.model_copy(update={"dimension": 7}))


def test_x_in_eight_bits_is_of_the_row_alone(exports: Path) -> None:
    served, rows = Exported.open(str(exports / "onnx-int8")).serving, some_rows()
    np.testing.assert_array_equal(alone(served, rows), served.embed(rows))


def some_rows() -> Inputs:
    """Rows of no token, one, as many as are read, more, and others."""
    draw = np.random.default_rng(0)
    lengths = np.array([0, 1, 20, 32, *draw.integers(2, 20, 60)])
    return Inputs(Ragged(draw.integers(0, VOCABULARY, lengths.sum()).astype(np.uint16), offsets_of(lengths)))


def alone(served: Any, rows: Inputs) -> np.ndarray:
    return np.concatenate([served.embed(rows.slice(row, row + 1)) for row in range(rows.rows)])


@pytest.mark.slow
def test_an_export_goes_on_in_the_form_of_the_one_before(data: Path, exports: Path, tmp_path: Path) -> None:
    place = exports / "onto"
    done = call("export", data, exports / "run", place, "--onto", exports / "onnx")
    assert done.status == 0, done.err
    assert (place / GRAPH).exists()
    assert not [*(place / "vectors").glob("*")]
    assert answers(place) == answers(exports / "onnx")
    again = call("export", data, exports / "run", place, "--onto", exports / "onnx", "--form", "onnx")
    assert "exported already" in again.err
    refused(call("export", data, exports / "run", exports / "onnx", "--form", "torch"), "--overwrite")


def test_what_a_form_needs_is_said(data: Path, exports: Path, tmp_path: Path, monkeypatch: Any) -> None:
    assert encoders.choose_form("auto", BagSection(), {"form": "onnx"}) is None
    for form in FORMS:
        with pytest.raises(extremis.InputError, match=f"form=\"{form}\": encoder.kind = 'bag' has only the form numpy"):
            encoders.choose_form(form, BagSection(), None)
    far = np.ones((3, 4), np.float32), np.array([[1, 1, 1, 1.1]] * 3, np.float32)
    with pytest.raises(extremis.InputError, match="x differs from PyTorch's"):
        encoders._require_near("onnx", *far)
    assert encoders._require_near("onnx-int8", *far)["cosine"] < 1
    with pytest.raises(extremis.InputError, match=r"cosine nan"):
        encoders._require_near("onnx-int8", far[0], far[1] * np.nan)
    with monkeypatch.context() as patch:  # as where it is not installed
        patch.setitem(sys.modules, "onnxruntime", None)
        patch.delitem(sys.modules, "scoring.onnx_inference")
        with pytest.raises(extremis.InputError, match=r"the encoder needs onnxruntime\. Install the extra `onnx`"):
            extremis.load(exports / "onnx")
    monkeypatch.setattr(encoders, "find_spec", lambda name: None if name == "onnxscript" else "there")
    refused(
        call("export", data, exports / "run", tmp_path / "out", "--form", "onnx"), "needs onnxscript", "[onnx-export]"
    )


def cut(place: Path) -> None:
    place.write_bytes(place.read_bytes()[:-9])


def of_another(place: Path) -> None:
    """A graph of other inputs: names are as they lie in the file."""
    place.write_bytes(place.read_bytes().replace(b"attention_mask", b"attention_musk"))


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a graph that is cut": (GRAPH, cut),
    "tensors that are cut": (TENSORS, cut),
    "no graph": (GRAPH, lambda place: place.write_bytes(b"")),
    "no tensors": (TENSORS, lambda place: place.write_bytes(b"")),
    "another file": (GRAPH, lambda place: place.write_bytes(b"PK\x03\x04" + bytes(99))),
    "other inputs": (GRAPH, of_another),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_graph_that_is_none_is_one_message(name: str, exports: Path, tmp_path: Path) -> None:
    place = tmp_path / "export"
    shutil.copytree(exports / "onnx", place)
    file, damage = DAMAGES[name]
    damage(place / file)
    refused(predict(place), str(place), "damaged")
    change(place, sealed(place, file))
    refused(predict(place), str(place))


def predict(place: Path) -> Done:
    (place.parent / "texts.txt").write_text("a ship\n")
    return call("predict", place, place.parent / "texts.txt", place.parent / "out.jsonl")


def test_half_an_export_and_another_form_are_one_message(exports: Path, tmp_path: Path) -> None:
    place = tmp_path / "export"
    shutil.copytree(exports / "onnx", place)
    model = extremis.load(place)
    (place / TENSORS).write_bytes((exports / "onnx" / TENSORS).read_bytes())
    with pytest.raises(extremis.TableError, match="changed since"):
        model.predict("a ship")
    (place / TENSORS).unlink()
    refused(predict(place), TENSORS)
    for form in ("torch", "onnx-int4", 3, [1]):
        shutil.rmtree(place)
        shutil.copytree(exports / "onnx", place)
        change(place, lambda body, form=form: body["parameters"]["options"].update(form=form))
        refused(predict(place), str(place))
