"""The whole loop in Python, by the README's lines and by the notebook; and what its results are like."""

import csv
import json
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import extremis
from scoring import exported
from tests.command import ROOT, TINY, call, refused
from tests.command import extremis as extremis_command
from tests.pages import blocks

SETTINGS = dict(setting.split("=") for setting in (*TINY, "train.epochs=2", "data.holdout=0.1"))
CHANGES = {key: float(value) if "." in value else int(value) for key, value in SETTINGS.items()}


def quick(code: str, raw: Path) -> str:
    """Replace the data by a small part of it, and the run of minutes by one of a moment."""
    code = code.replace('"examples/tate/"', repr(str(raw))).replace('"auto"', '"astra"')
    code = code.replace('"examples/', f'"{ROOT}/examples/')
    return re.sub(r"(extremis\.run\(.*?)(, minutes=\d+)?\)", rf"\1, set={CHANGES!r}, progress=False)", code)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    before, folder = Path.cwd(), tmp_path_factory.mktemp("loop")
    os.chdir(folder)
    yield folder
    os.chdir(before)


@pytest.fixture(scope="module")
def names(folder: Path, raw: Path) -> dict[str, Any]:
    """Run the README's second block, and return the names that it defines."""
    (block,) = blocks(ROOT / "README.md", "python")
    assert len([line for line in block.splitlines() if line]) <= 10
    defined: dict[str, Any] = {}
    exec(quick(block, raw), defined)
    return defined


def test_predictions_have_keys_texts_and_scores(names: dict[str, Any]) -> None:
    model = names["model"]
    texts = ["a ship in a storm", "a portrait", ""]
    predictions = model.predict(texts, max_labels=3)
    assert [each.text for each in predictions] == texts
    assert len(model.labels) == len(model.labels.keys) == len(model.labels.texts)
    known = {label.key: label.text for label in model.labels}
    for prediction in predictions:
        scores = [label.score for label in prediction.labels]
        assert len(scores) == 3
        assert scores == sorted(scores, reverse=True)
        assert all(known[label.key] == label.text for label in prediction.labels)
    assert "a ship in a storm" in repr(predictions)
    assert "<td>a portrait</td>" in predictions._repr_html_()


def test_a_single_text_and_many_are_the_same(names: dict[str, Any]) -> None:
    model = names["model"]
    texts = [f"a view of the sea number {n}" for n in range(300)]
    vectors = model.embed(texts)
    assert vectors.shape[0] == 300
    assert vectors.dtype == np.float32
    assert np.allclose(model.embed(texts[271]), vectors[271:272], atol=1e-5)
    alone, among = model.predict(texts[7], max_labels=2)[0], model.predict(texts, max_labels=2)[7]
    assert [label.key for label in alone.labels] == [label.key for label in among.labels]
    assert model.embed([]).shape == (0, vectors.shape[1])
    with pytest.raises(extremis.InputError, match=r"texts\[1\]: expected a string, got"):
        model.predict(["x", 3])


def test_python_predicts_what_the_command_line_does(names: dict[str, Any], folder: Path) -> None:
    texts = ["a ship in a storm", "a portrait of a woman"]
    Path("texts.txt").write_text("\n".join(texts) + "\n")
    extremis.predict("exported/", "texts.txt", "out.jsonl", max_labels=4, progress=False)
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    ours = names["model"].predict(texts, max_labels=4)
    assert [row["labels"] for row in rows] == [[label.key for label in each.labels] for each in ours]


def test_predict_reads_and_writes_a_pipe_and_csv(names: dict[str, Any], folder: Path) -> None:
    texts = ["a ship, in a storm", "a portrait of a woman"]
    expected = [
        [(label.key, label.text) for label in each.labels] for each in names["model"].predict(texts, max_labels=2)
    ]
    piped = extremis_command(
        "predict", "exported/", "-", "-", "--max-labels", "2", "-q", cwd=folder, input="\n".join(texts)
    )
    rows = [json.loads(line) for line in piped.out.splitlines()]
    assert [list(zip(row["labels"], row["texts"], strict=True)) for row in rows] == expected
    assert [row["key"] for row in rows] == ["0", "1"]
    with Path("texts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text",), *((text,) for text in texts)])
    extremis.predict("exported/", "texts.csv", "out.csv", max_labels=2, progress=False)
    with Path("out.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    flat = [(row["key"], row["rank"], row["label"], row["text"]) for row in table]
    assert flat == [
        (str(n), str(rank), key, text) for n, each in enumerate(expected) for rank, (key, text) in enumerate(each, 1)
    ]
    refused(call("predict", "exported/", "texts.csv", "-", "--json"), "both go to standard output")


def in_place(folder: Path, change: Callable[[bytes], bytes]) -> None:
    """Write over every file below `folder`."""
    for path in folder.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            with path.open("r+b") as file:
                file.truncate(file.write(change(content)))


@pytest.mark.parametrize("change", [lambda content: content[::-1], lambda content: b""], ids=["others", "cut"])
def test_a_model_is_not_what_is_written_over_its_files(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes]
) -> None:
    def load(name: str) -> extremis.Model:
        return extremis.load(shutil.copytree("exported", tmp_path / name), threads=1)

    texts = [f"a ship in storm {n}" for n in range(20)]
    changed = "changed since the export was opened. Open the export again"
    expected = repr(names["model"].predict(texts))
    read, unread = load("read"), load("unread")
    assert repr(read.predict(texts)) == expected
    monkeypatch.setattr(exported, "_HASHED", 0)
    mapped, moved = load("mapped"), load("moved")
    assert repr(mapped.predict(texts)) == repr(moved.predict(texts)) == expected
    (tmp_path / "moved").rename(tmp_path / "gone")
    in_place(tmp_path, change)
    with pytest.raises(extremis.TableError, match=f"read/vectors/.*: {changed}"):
        read.predict(texts)
    with pytest.raises(extremis.TableError, match=f"unread/.*: {changed}"):
        unread.predict(texts)
    with pytest.raises(extremis.TableError, match=f"mapped/vectors/.*: {changed}"):
        mapped.predict(texts)


def test_a_model_predicts_in_threads_and_in_forked_children(names: dict[str, Any]) -> None:
    """Threads of PyTorch do not cross a fork: a child that waited for them would wait for ever."""
    texts = [f"a view of the sea number {n}" for n in range(400)]
    before = torch.get_num_threads()
    model = extremis.load("exported/", threads=2)
    try:
        expected = [[label.key for label in each.labels] for each in model.predict(texts)]

        def check() -> None:
            with ThreadPoolExecutor(2) as pool:
                for got in [model.predict(texts), *pool.map(model.predict, [texts] * 2)]:
                    assert [[label.key for label in each.labels] for each in got] == expected

        # Before other threads predict, as docs/export.md asks: a lock that one of them holds would stay locked.
        children = [multiprocessing.get_context("fork").Process(target=check) for _ in range(3)]
        for child in children:
            child.start()
        for child in children:
            child.join(60)
        codes = [child.exitcode for child in children]
        for child in children:
            child.kill()
        assert codes == [0, 0, 0]
        check()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_results_read_well(names: dict[str, Any]) -> None:
    result = extremis.evaluate("data/", "runs/1", progress=False, k=[2])
    assert result.metrics["P@2"] == result.to_json()["metrics"]["P@2"]
    assert "nDCG" in repr(result)
    assert "<table>" in result._repr_html_()


def test_progress_goes_to_a_function_and_nothing_to_the_terminal(
    names: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    events: list[extremis.Event] = []
    take: Callable[[extremis.Event], object] = events.append
    extremis.evaluate("data/", "runs/1", progress=take)
    bars = [event for event in events if event.title == "evaluate test"]
    assert bars[-1].done == bars[-1].total
    extremis.recipes(progress=False)
    assert capfd.readouterr() == ("", "")


def test_the_notebook_runs(folder: Path, raw: Path) -> None:
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text())["cells"]
    inside = folder / "notebook"
    inside.mkdir()
    os.chdir(inside)
    try:
        defined: dict[str, Any] = {}
        for cell in cells:
            if cell["cell_type"] == "code":
                assert not cell["outputs"]
                exec(quick("".join(cell["source"]), raw), defined)
    finally:
        os.chdir(folder)
    assert len(defined["model"].labels) > 100
