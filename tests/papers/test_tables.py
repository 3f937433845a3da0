"""Tables of the papers: their lines on data of any size, and the command that trains and compares them."""

import json
import math
from pathlib import Path

import pytest

from papers.astra.__main__ import TABLES as ASTRA
from papers.dexml.__main__ import TABLES as DEXML
from papers.lns.__main__ import TABLES as LNS
from papers.mips_s.__main__ import TABLES as MIPS_S
from papers.tables import main
from schemas.json_files import read_json, write_json
from schemas.manifest import open_manifest
from tests.command import call
from tests.pipelines.raw import write_tiny
from tests.recipes import OF_PAPERS
from trainer.config.load import OF_PAPERS as TOLD
from trainer.methods.astra import Negatives
from trainer.methods.recipe import Recipe
from trainer.settings.resolve import resolve

PAPERS = {"astra": ASTRA, "dexml": DEXML, "lns": LNS, "mips_s": MIPS_S}
SHARD = ("--tokenizer", "train:300", "--shards", "2", "--row-group-rows", "8", "--propensity", "0.55,1.5")
SMALL = ("encoder.dimension=8", "encoder.buckets=64", "encoder.hidden=4", "order.batch=16", "train.epochs=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("papers")
    call("shard", write_tiny(folder / "raw", rows=60, labels=20), folder / "data", *SHARD)
    return folder / "data"


def variants(paper: str, table: str, data: Path, *settings: str) -> dict[str, Recipe]:
    return PAPERS[paper][table].lines(str(data), settings)


def make(paper: str, table: str, data: Path, out: Path, *options: str) -> dict:
    main(paper, PAPERS[paper], [str(data), str(out), "--table", table, *options])
    return json.loads((out / "ablation.json").read_text())


def options(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def test_every_recipe_of_a_paper_is_told_where_it_is() -> None:
    told = {name: f"papers/{folder}/{name}.toml" for folder, names in TOLD.items() for name in names}
    assert {name: path.rpartition("/papers/")[2] for name, path in OF_PAPERS.items()} == {
        name: path.removeprefix("papers/") for name, path in told.items()
    }


def test_the_grids_of_astra(data: Path) -> None:
    lines = variants("astra", "6", data)
    assert {name: (recipe.negatives.hard, recipe.negatives.random) for name, recipe in lines.items()} == {
        "astra": (100, 400),
        "k-100-300": (100, 300),
        "k-100-200": (100, 200),
        "k-100-100": (100, 100),
        "k-60-400": (60, 400),
        "k-60-100": (60, 100),
        "k-40-400": (40, 400),
        "k-40-300": (40, 300),
    }
    of_paper = variants("astra", "6", data, "negatives.hard=50", "negatives.random=400")
    assert [(r.negatives.hard, r.negatives.random) for r in of_paper.values()] == [
        *((50, random) for random in (400, 300, 200, 100)),
        *((30, 400), (30, 100), (20, 400), (20, 300)),
    ]
    assert [recipe.refresh.start for recipe in variants("astra", "7", data, "train.epochs=20").values()] == [2, 4, 8]
    nine = variants("astra", "8", data, "train.epochs=9")
    assert [recipe.refresh.every for recipe in nine.values()] == [1, 2, 4]
    assert (
        nine["astra"]
        == resolve("astra", ["negatives.pool=own", "refresh.source=table", "train.epochs=9"], str(data)).recipe
    )
    assert {r.negatives.pool for r in [*lines.values(), *nine.values()]} == {"own"}
    assert {r.negatives.pool for r in variants("astra", "8", data, "negatives.pool=shared").values()} == {"shared"}


@pytest.mark.parametrize("overrides", [(), ("negatives.hard=30", "negatives.random=70")], ids=str)
def test_every_strategy_of_astra_has_as_many_negatives(data: Path, overrides: tuple[str, ...]) -> None:
    lines = variants("astra", "5", data, *overrides)
    base = lines["astra"].negatives
    total = base.hard + base.random
    for name, recipe in lines.items():
        negatives, start = recipe.negatives, recipe.refresh.start
        assert isinstance(negatives, Negatives)
        assert (negatives.pool, negatives.table_width) == ("own", negatives.hard)
        assert (negatives.warmup or negatives.random + negatives.hard) == total
        for hard, random in recipe.mixtures()[start:] or ((negatives.hard, negatives.random),):
            assert hard + random == total, name
    assert {name for name, recipe in lines.items() if recipe.refresh.by == "labels"} == {
        "theta-hard",
        "random-theta-hard",
        "theta-curriculum",
    }
    assert {name for name, recipe in lines.items() if not recipe.negatives.random} == {"w-hard", "theta-hard"}


def test_the_tables_of_dexml(data: Path) -> None:
    overrides = ("train.epochs=7",)
    losses = variants("dexml", "4", data, *overrides)
    assert [(r.loss.kind, getattr(r.loss, "k", None)) for r in losses.values()] == [
        ("bce", None),
        ("softmax", None),
        ("decoupled", None),
        ("softtopk", 5),
        ("softtopk", 100),
    ]
    assert losses["decoupled-softmax"] == resolve("dexml", overrides, str(data)).recipe
    sampled = variants("dexml", "3", data, *overrides)
    assert {name: recipe.negatives.hard for name, recipe in sampled.items() if recipe.negatives.pool == "batch"} == {
        f"mined-{count}": count for count in (0, 1, 2, 5, 10)
    }
    assert sampled["all-labels"] == losses["decoupled-softmax"]
    assert sampled["mined-10"] == resolve("dexml-sampled", overrides, str(data)).recipe
    assert {r.train.epochs for r in [*losses.values(), *sampled.values()]} == {7}


def test_the_figures_of_mips(data: Path) -> None:
    steps = -(-open_manifest(str(data / "queries/train")).rows // 4)
    assert steps > 8
    small = "order.batch=4", "order.streams=4"
    lines = variants("mips_s", "figure-2", data, *small)
    facts = {
        name: (r.negatives.hard, r.negatives.random, r.refresh.every_steps, r.refresh.start)
        for name, r in lines.items()
    }
    assert (facts.pop("uniform"), lines["uniform"].indexed_from) == ((0, 100, 1000, 0), None)
    assert facts == {
        f"mips-{hard}-ppe-{times}": (hard, 100 - hard, -(-steps // times), 1) for times in (1, 8) for hard in (100, 15)
    }
    assert [(r.negatives.hard, r.train.positive_ratio) for r in variants("mips_s", "figure-1", data).values()] == [
        (100, 1),
        (100, 50),
        (15, 1),
    ]
    labels = open_manifest(str(data / "labels")).rows
    count = max(10, round(labels / 100))
    table_2 = variants("mips_s", "table-2", data, *small)
    assert {name: (r.negatives.hard, r.negatives.random) for name, r in table_2.items()} == {
        "uniform": (0, count),
        "mips-a": (count, 0),
        "mips-s": (5, count - 5),
    }
    assert {r.refresh.every_steps for r in table_2.values()} == {steps}
    assert (table_2["mips-a"].refresh.start, table_2["mips-a"].negatives.warmup) == (1, count)
    for r in [*lines.values(), *variants("mips_s", "figure-1", data).values(), *table_2.values()]:
        # Equation 9: no weights, and draws of each query's own.
        assert (r.negatives.pool, r.negatives.reweight, r.train.positive_weight) == ("own", False, 0)


def test_the_lines_of_lns_have_as_many_negatives_and_one_correction(data: Path) -> None:
    lines = variants("lns", "figure-4", data, "negatives.lsh.bits=2")
    labels = open_manifest(str(data / "labels"), "labels").rows
    by_chance = round(labels * (1 - (1 - 8**-2.0) ** 350))
    assert lines.pop("full-softmax").method == "renee"
    facts = {
        name: (r.method, r.negatives.random, getattr(r.negatives, "hard", 0), r.negatives.pool, r.negatives.reweight)
        for name, r in lines.items()
    }
    plain = {name: counts for name, (*counts, reweighted) in facts.items() if not reweighted}
    assert plain == {
        "lsh-embedding": ["lns", 0, 0, "own"],
        "lsh-label": ["lns", 0, 0, "own"],
        "lsh-embedding+uniform": ["lns", by_chance, 0, "own"],
        "sampled-softmax": ["astra", by_chance, 0, "own"],
        "frequency-based": ["astra", by_chance, 0, "own"],
        "top-k-softmax": ["astra", 0, by_chance, "own"],
    }
    assert {name: counts[:2] for name, counts in facts.items() if name not in plain} == {
        "lsh-embedding-corrected": ("lns", by_chance),
        "lsh-label-corrected": ("lns", by_chance),
        "sampled-softmax-corrected": ("astra", 2 * by_chance),
        "frequency-based-corrected": ("astra", 2 * by_chance),
    }
    optimizers = {(r.loss.kind, r.encoder.optimizer, r.encoder.lr, r.classifier.optimizer) for r in lines.values()}
    assert optimizers == {("softmax", "adam", 1e-4, "adam")}


def test_only_some_lines_of_a_table(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    done = make("dexml", "4", data, tmp_path / "out", "--only", "softtop-5, softmax", *options(*SMALL))
    assert sorted(done) == ["softmax", "softtop-5"]
    with pytest.raises(SystemExit, match="2"):
        make("dexml", "4", data, tmp_path / "out", "--only", "softmx")
    assert "no such line. Choose from bce, softmax" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paper", "table"), [("mips_s", "figure-1"), ("mips_s", "figure-2"), ("mips_s", "table-2"), ("lns", "figure-4")]
)
def test_each_of_them_trains(data: Path, tmp_path: Path, paper: str, table: str) -> None:
    hidden = () if paper == "lns" else ("encoder.hidden=4",)  # the encoder of LNS has no residual layer
    small = ("encoder.dimension=8", "encoder.buckets=64", *hidden, "order.batch=64", "train.epochs=2")
    rates = ("encoder.lr=0.1", "encoder.dense_lr=0.0015", "classifier.lr=0.2")  # for the four steps that there are
    # No more settings than these: the table's own are at stake.
    done = make(paper, table, data, tmp_path, *options(*small, *rates))
    assert all(result["error"] is None for result in done.values())
    for result in done.values():
        lines = map(json.loads, Path(result["run"], "metrics.jsonl").read_text().splitlines())
        losses = [line["loss"] for line in lines if line["kind"] == "epoch"]
        assert len(losses) == 2
        assert all(map(math.isfinite, losses))  # sampled negatives change from epoch to epoch, and so does their loss


def test_a_table_shows_its_metrics(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ("dexml", "4", data, tmp_path, *options(*SMALL))
    done = make(*arguments)
    assert all("R@100" in result["metrics"] for result in done.values())
    page = (tmp_path / "ablation.md").read_text()
    assert "| recipe | P@1 | P@5 | R@10 | R@100 | train s |" in page
    named = [line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")]
    assert named == ["bce", "softmax", "decoupled-softmax", "softtop-5", "softtop-100"]
    assert page.count("±") == 20
    capsys.readouterr()
    # What was finished without R@100 is scored again, and not trained.
    kept = read_json(str(tmp_path / "bce" / "ablation.json"))
    del kept["result"]["metrics"]["P@100"]
    write_json(str(tmp_path / "bce" / "ablation.json"), kept)
    again, said = make(*arguments), capsys.readouterr().err
    assert again["bce"]["metrics"] == done["bce"]["metrics"]
    assert "softmax: finished before" in said
    assert "bce: finished before" not in said
    assert "training" not in said


def test_a_folder_of_recipes_is_compared(data: Path, tmp_path: Path) -> None:
    """As `extremis ablate` compares any recipes: here those of NGAME's frame, beside one that ships."""
    folder = OF_PAPERS["tas"].rpartition("/")[0]
    done = call("ablate", data, tmp_path, "--recipes", f"ngame,{folder}", *options(*SMALL, "order.batch=64"), "--json")
    assert done.status == 0, done.err
    assert list(done.json) == ["ngame", "ance", "dpr", "tas"]
    assert all(result["error"] is None for result in done.json.values())
