"""Labels without a text: `shard` counts them; recipes that encode texts warn of a few of them and refuse many."""

from pathlib import Path

import pytest

from extremis.auto import Survey, contenders
from schemas.layout import DataLayout
from tests.command import ROOT, call, refused, sets
from tests.pipelines.raw import write_lines

CASES = Path(__file__).parents[1] / "cases" / "empty-label-texts"
SHARD = ("--tokenizer", "train:300", "--shards", "1")
RAE = str(ROOT / "papers" / "rae" / "rae.toml")
RECIPES = {
    "dexml": ["method = 'dexml'", "data.label_texts = true"],
    RAE: ["method = 'rae:Rae'"],
    "ngame": ["method = 'ngame'"],
    "astra": ["data.label_texts = true"],
    "decoupled": ["data.label_texts = true", "classifier.initial = 'labels'"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both forms of the case, sharded."""
    folder = tmp_path_factory.mktemp("label-texts")
    for name, raw in (("xc", CASES), ("jsonl", CASES / "jsonl")):
        done = call("shard", raw, folder / name, *SHARD)
        assert done.status == 0, done.err
        count = {"xc": "labels: 10, 3 without a training point, 10 without a text", "jsonl": "2 without a text"}[name]
        assert count in done.err
    return {name: folder / name for name in ("xc", "jsonl")}


@pytest.mark.parametrize("form", ["xc", "jsonl"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_that_encodes_texts_refuses_labels_without_texts(
    recipe: str, form: str, data: dict[str, Path], tmp_path: Path
) -> None:
    done = call("train", recipe, data[form], tmp_path / "run", "--set", "train.epochs=1")
    count, example = {"xc": ("7 of the 7", "'L0'"), "jsonl": ("2 of the 2", "'y'")}[form]
    refused(done, f"{count} trained labels have no text, for example {example}", *RECIPES[recipe], "Add the texts")
    assert not [*tmp_path.glob("run/*")]


def test_auto_and_a_recipe_without_texts_train_on_them(data: dict[str, Path], tmp_path: Path) -> None:
    changes = sets("train.epochs=1", "negatives.hard=0", "data.label_texts=false")
    assert call("train", "random", data["xc"], tmp_path / "run", *changes).status == 0
    survey = Survey.of(DataLayout(str(data["xc"])))
    assert {each.recipe for each in contenders(survey)} == {"renee"}
    assert "odd: 7 of the 7 trained labels have no text" in [*survey.lines()][-1]
    inspected = call("inspect", f"{data['xc']}/labels", "--json")
    assert inspected.json["counters"]["empty_texts"] == 10


@pytest.mark.parametrize("empty", [0, 2, 3])
def test_a_few_labels_without_texts_are_a_warning(empty: int, tmp_path: Path) -> None:
    """At most 1 % of 200 trained labels; labels without points do not count."""
    texts = ["" if i < empty or i >= 200 else f"name {i}" for i in range(210)]
    raw = tmp_path / "raw"
    raw.mkdir()
    write_lines(raw / "lbl.json.gz", [{"uid": f"L{i}", "title": text} for i, text in enumerate(texts)])
    points = [{"uid": f"p{i}", "title": f"point {i}", "content": "", "target_ind": [i % 200]} for i in range(400)]
    write_lines(raw / "trn.json.gz", points)
    write_lines(raw / "tst.json.gz", points[:4])
    assert call("shard", raw, tmp_path / "data", *SHARD).status == 0
    changes = sets("train.epochs=1", "negatives.hard=0", "data.label_texts=true")
    done = call("train", "random", tmp_path / "data", tmp_path / "run", *changes)
    assert (done.status, "Add the texts" in done.err) == ((2, True) if empty > 2 else (0, False)), done.err
    assert ("odd: 2 of the 200 trained labels have no text, for example 'L0'" in done.err) == (empty == 2)
