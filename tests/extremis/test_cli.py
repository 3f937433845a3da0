"""Every command on a tiny data set: what it prints, what it leaves, and what it says as JSON."""

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.table import Table
from tests.command import ROOT, Done, call, command, environment, refused, sets
from tests.forks import extremis
from tests.pipelines.raw import write_tiny
from trainer.evaluation.evaluate import measure_popularity
from trainer.methods.sections import Data
from trainer.recipe_files import recipe_names

SHARD = ("--tokenizer", "train:300", "--shards", "2", "--row-group-rows", "8", "--propensity", "0.55,1.5")
CHOICES = sets("order.batch=16", "train.epochs=4", "refresh.every=1")
KS = (1, 3, 5, 10)


def plain(done: Done) -> None:
    """Not a terminal: no colours, no cursor movements, no carriage returns."""
    assert not {"\x1b", "\r", "\b"} & set(done.out + done.err)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cli")


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Done:
    return call("shard", write_tiny(folder / "raw", rows=60, labels=20), folder / "data", *SHARD, "--json")


@pytest.fixture(scope="module")
def data(folder: Path, sharded: Done) -> Path:
    assert sharded.status == 0, sharded.err
    return folder / "data"


@pytest.fixture(scope="module")
def trained(folder: Path, data: Path) -> Done:
    """Trained alone, with no miner: every table is late."""
    return call("train", "astra", data, folder / "alone", *CHOICES, "--json")


@pytest.fixture(scope="module")
def ran(folder: Path, data: Path) -> Done:
    """Trained with a miner beside, as processes."""
    return extremis("run", "astra", data, folder / "run", *CHOICES, "--set", "refresh.stale=wait", "--json")


@pytest.fixture(scope="module")
def run(folder: Path, ran: Done) -> Path:
    return folder / "run"


def test_shard(folder: Path, sharded: Done) -> None:
    plain(sharded)
    body = sharded.json
    assert body["data"] == str(folder / "data")
    assert body["rows"] == {"train": 60, "test": 30}
    assert body["labels"] == 20
    assert body["propensity"] == {"a": 0.55, "b": 1.5}
    assert body["digest"] == open_manifest(body["data"]).digest
    assert set(body["tables"]) == {"tokenizer", "labels", "queries/train", "queries/test", "rejects"}
    assert "60 train points, 30 test points\n" in sharded.err
    again = call("shard", folder / "raw", folder / "data", *SHARD, "--json")
    assert again.json == body
    assert "up to date" in again.err


def test_train_goes_on_without_a_table_and_says_so(folder: Path, trained: Done) -> None:
    plain(trained)
    body = trained.json
    assert body["run"] == str(folder / "alone")
    assert body["table_versions"] == {"0": None, "1": None, "2": None, "3": None}
    assert [epoch["late"] for epoch in body["epochs"]] == [False, False, True, True]
    assert set(body["epochs"][0]) == {"epoch", "loss", "seconds", "rows", "table_epoch", "table_age", "late"}
    assert body["epochs"][3]["loss"] < body["epochs"][0]["loss"]
    assert (
        "the hard-negative table due at epoch 2 is not finished yet; continuing with random negatives only"
        in trained.err
    )
    assert sum(line.startswith("epoch ") and "rows/s" in line for line in trained.err.splitlines()) == 4
    config = (folder / "alone" / "config.toml").read_text()
    assert "[versions]" in config
    assert "epochs = 4" in config
    assert "[machine]\nthreads = " in config
    assert list((folder / "alone" / "tensorboard").glob("events.out.tfevents.*"))


def test_tensorboard_holds_the_losses_of_metrics(folder: Path, trained: Done) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "alone" / "tensorboard"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    lines = map(json.loads, (folder / "alone" / "metrics.jsonl").read_text().splitlines())
    recorded = {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    assert shown.keys() == recorded.keys()
    assert all(shown[step] == pytest.approx(recorded[step], rel=1e-6) for step in shown)


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(folder: Path, data: Path, trained: Done) -> None:
    losses = [[epoch["loss"] for epoch in trained.json["epochs"]]]
    for name, seed in (("same", "0"), ("other", "1")):
        options = (*CHOICES, "--set", f"train.seed={seed}", "--metrics-port", "0", "--json")
        done = call("train", "astra", data, folder / name, *options)
        assert "metrics for Prometheus at http://127.0.0.1:" in done.err
        losses.append([epoch["loss"] for epoch in done.json["epochs"]])
    assert losses[0] == losses[1]
    assert losses[0][0] != losses[2][0]


def test_run_trains_on_the_tables_that_the_miner_makes(ran: Done, run: Path) -> None:
    plain(ran)
    assert ran.json["table_versions"] == {"0": None, "1": None, "2": 2, "3": 3}
    assert [epoch["table_age"] for epoch in ran.json["epochs"]] == [None, None, 2, 2]
    log = (run / "run.log").read_text()
    assert "miner: epoch 0: mined in" in log
    assert "mined in" not in ran.err
    assert all(line in log for line in ran.err.splitlines() if line.startswith("epoch "))
    assert (run / "finished.json").exists()
    manifest = open_manifest(str(run / "negatives" / "epoch-0003" / "queries"), "negatives")
    Table(str(run / "negatives" / "epoch-0003" / "queries"), manifest).verify()
    assert manifest.quality["recall_at_k"] == 1.0


def test_mine(data: Path, folder: Path, trained: Done) -> None:
    alone = folder / "alone"
    done = call("mine", data, alone, "--epoch", "1", "--width", "3", "--threads", "1", "--json")
    plain(done)
    tables = done.json["tables"]
    assert set(tables) == {"queries", "labels"}
    assert tables["queries"]["rows"] == 60
    assert tables["queries"]["quality"]["recall_at_k"] == 1.0
    assert tables["queries"]["digest"] == open_manifest(str(alone / "negatives" / "epoch-0003" / "queries")).digest
    assert "queries: 60 rows, recall 1.0000" in done.err
    watched = call("mine", data, alone, "--watch", "--json")
    assert watched.json == {"run": str(alone), "tables": 0}  # the run is finished


def test_beam_options_go_to_beam(data: Path, folder: Path, trained: Done) -> None:
    arguments = ("mine", data, folder / "alone", "--epoch", "0", "--width", "2", "--json", "--")
    done = call(*arguments, "--direct_num_workers=2", "--direct_running_mode=multi_threading")
    assert done.status == 0
    assert done.json["tables"]["labels"]["rows"] == 20
    wrong = call("embed", data, folder / "alone", folder / "never", "--", "--direct_num_wrkers=2")
    assert wrong.status == 2
    assert "Did you mean --direct_num_workers?" in wrong.err


def test_evaluate(data: Path, run: Path) -> None:
    done = call("evaluate", data, run, "--json")
    plain(done)
    body = done.json
    families = ("P", "nDCG", "nDCG-all", "R", "F1", "PSP", "PSnDCG")
    assert set(body["metrics"]) == set(body["intervals"]) == {f"{family}@{k}" for family in families for k in KS}
    assert (body["split"], body["queries"], body["filter_pairs"]) == ("test", 30, 0)
    assert body["step"] == int(max((run / "checkpoints").iterdir()).name.removeprefix("step-"))
    for name, (low, high) in body["intervals"].items():
        assert low <= body["metrics"][name] <= high
    for family in families:
        assert family in done.err
    assert call("evaluate", data, run, "--split", "train", "--limit", "7", "--json").json["queries"] == 7
    seen = call("evaluate", data, run, "--seen-only", "--k", "2,100", "--json").json["metrics"]
    assert set(seen) - set(body["metrics"]) == {f"{family}@{k}" for family in families for k in (2, 100)}
    assert {name: seen[name] for name in body["metrics"]} == body["metrics"]
    at = call("evaluate", data, run, "--max-labels", "3", "--json").json["at_decision"]
    assert (at["decision"], at["predictions"], at["cut_off"]) == ("best 3 labels", 3, 0)
    assert at["samples"]["F1"] == pytest.approx(body["metrics"]["F1@3"], rel=1e-5)
    assert at["micro"]["F1"] == body["averages"]["micro"]["F1@3"]
    assert body["at_decision"]["decision"] == "best 5 labels"
    refused(call("evaluate", data, run, "--zero-shot"), "every label has training points", "--zero-shot")
    refused(call("evaluate", data, run, "--k", "5,0"), "--k: expected a number greater than or equal to 1, got '0'")


def test_table_of_labels(data: Path, run: Path, tmp_path: Path) -> None:
    """The same in CSV, in Parquet and in the run; it adds up to the means at the decision."""
    places = [tmp_path / f"labels.{ending}" for ending in ("csv", "parquet")]
    body = call("evaluate", data, run, "--labels", places[0], "--json").json
    call("evaluate", data, run, "--labels", places[1])
    kept = max((run / "evaluations").glob("test-*-labels.parquet"))
    table, lines = pq.read_table(places[1]), pa.csv.read_csv(places[0])
    assert pq.read_table(kept).equals(table)
    assert lines.column_names == table.column_names
    rows = table.to_pylist()
    for line, row in zip(lines.to_pylist(), rows, strict=True):
        assert (line["label"], line["support"], line["predicted"]) == (row["label"], row["support"], row["predicted"])
        assert line["F1"] == pytest.approx(row["F1"], abs=1e-4)
        assert (line["missed_for"] or "").split(" | ") == (row["missed_for"] or [""])
        assert (row["missed_query"] is None) == (row["found"] == row["support"])
        assert (row["wrong_query"] is None) == (row["found"] == row["predicted"])
    assert [row["label"] for row in rows] == [f"L{i}" for i in range(20)]
    for name, of in {"precision": "predicted", "recall": "support"}.items():
        share = sum(row["found"] for row in rows) / sum(row[of] for row in rows)
        assert body["at_decision"]["micro"][name] == pytest.approx(100 * share)
    summary = body["labels"]
    assert (summary["labels"], summary["with_positives"]) == (20, sum(row["support"] > 0 for row in rows))
    assert summary["never_found"] == sum(row["support"] > 0 == row["found"] for row in rows)
    weakest = {row["label"]: row for row in summary["weakest"]}
    assert all(weakest[row["label"]]["F1"] == row["F1"] for row in rows if row["label"] in weakest)
    refused(call("evaluate", data, run, "--labels", places[0]), "exists already", "--overwrite")
    refused(call("evaluate", data, run, "--labels", "labels.txt"), ".csv or .parquet")
    refused(call("evaluate", data, run, "--never", "L1,nowhere"), "nowhere", "--never")
    never = call("evaluate", data, run, "--never", "L1,L2", "--labels", places[0], "--overwrite", "--json").json
    assert never["at_decision"]["decision"] == "best 5 labels, never given: 2"
    given = {row["label"]: row["predicted"] for row in pa.csv.read_csv(places[0]).to_pylist()}
    assert given["L1"] == given["L2"] == 0 < given["L3"]


def test_evaluate_with_baselines(data: Path, run: Path) -> None:
    """Beside the model on the same queries, in the run's evaluation too; without the option as ever."""
    kept = next((run / "evaluations").glob("test-*.json"))
    plain_body = call("evaluate", data, run, "--json").json
    assert "baselines" not in json.loads(kept.read_text())
    done = call("evaluate", data, run, "--baseline", "--json")
    plain(done)
    names = ("popular labels", "nearest queries by TF-IDF", "linear ranker", "labels' names in queries")
    assert tuple(done.json["baselines"]) == names
    assert done.json["beside_baselines"] == {"queries": 30, "metrics": done.json["metrics"]}
    assert {name: done.json[name] for name in plain_body} == plain_body
    assert json.loads(kept.read_text())["baselines"] == done.json["baselines"]
    for name in ("this run", *names):
        assert name in done.err
    part = call("evaluate", data, run, "--baseline", "--limit", "7", "--json").json
    assert part["beside_baselines"] == {"queries": 7, "metrics": part["metrics"]}
    popular = measure_popularity(DataLayout(str(data)), "test", Data(), 7)
    assert part["baselines"]["popular labels"] == popular
    assert json.loads(kept.read_text())["queries"] == 30


def test_embed(data: Path, run: Path, folder: Path) -> None:
    done = call("embed", data, run, folder / "embeddings", "--what", "labels", "--dtype", "float32", "--json")
    plain(done)
    manifest = open_manifest(str(folder / "embeddings"), "vectors")
    assert done.json == {"out": str(folder / "embeddings"), "digest": manifest.digest, "rows": 20}
    assert "fixed_size_list<element: float>[9]" in manifest.columns[1].type  # 8, and the bias


def test_recipes() -> None:
    done = call("recipes", "--json")
    plain(done)
    assert [*done.json] == ["auto", *recipe_names()]
    assert done.json["astra"]["refresh"]["start"] == "auto"
    assert done.json["decoupled"]["refresh"]["start"] >= 2
    for name in done.json:
        assert f" {name} " in done.err


def test_ablate_trains_once_and_compares(data: Path, folder: Path) -> None:
    out = folder / "ablation"
    arguments = ("ablate", data, out, "--recipes", "random,renee", *_without_hard(), "--json")
    arguments += ("--set", "validation.split=test")
    first = call(*arguments)
    assert first.status == 0, first.err
    assert set(first.json) == {"random", "renee"}
    assert first.json["random"]["metrics"].keys() == first.json["renee"]["metrics"].keys()
    assert first.json["random"]["train_seconds"] is not None
    again = call(*arguments)
    assert again.json == first.json == json.loads((out / "ablation.json").read_text())
    assert "random: finished earlier" in again.err
    assert "training" not in again.err
    assert "PSP@5" in first.out
    page = (out / "ablation.md").read_text()
    assert page.partition("\n| ")[2].count("±") == 12
    assert [line.split("|")[1].strip() for line in page.splitlines() if line.startswith("| `")] == [
        "`random`",
        "`renee`",
    ]
    charts = (out / "ablation.html").read_text()
    assert "Validation PSP@5 of classifier scores against time" in charts
    refused(call(*arguments, "--set", "encoder.lr=0.3"), str(out / "random"), "other settings", "another OUT")


def test_ablate_goes_on_after_a_strategy_that_failed(data: Path, folder: Path) -> None:
    """A diverging one is reported and left; `--retry` tries it again."""
    out = folder / "failing"
    (folder / "wild.toml").write_text('extends = "random"\n[loss]\ntemperature = 1e-38\n')
    names = f"{folder / 'wild.toml'},random"
    arguments = ("ablate", data, out, "--recipes", names, *_without_hard(), "--json")
    done = call(*arguments)
    assert done.status == 0, done.err
    wild, plain = done.json.values()
    assert "diverged" in wild["error"]
    assert plain["error"] is None
    assert "failed" in done.err
    assert "failed: the loss is" in (out / "ablation.md").read_text()
    assert "training" not in call(*arguments).err
    assert "wild: training" in call(*arguments, "--retry").err


def _without_hard() -> list[str]:
    settings = [word for word in sets("order.batch=16", "train.epochs=2", "classifier.bias=false") if word != "--set"]
    return [word for setting in settings if not setting.startswith("negatives.") for word in ("--set", setting)]


def test_results_and_notes_do_not_mix(data: Path, run: Path, folder: Path) -> None:
    """`extremis evaluate --json | jq` works; without it the table is the output. Progress stays on standard error."""
    done = extremis("evaluate", data, run, "--json")
    plain(done)
    assert json.loads(done.out)["queries"] == 30
    assert "test: 30 queries" in done.err
    table = call("evaluate", data, run, "--quiet")
    assert table.out.splitlines()[0].startswith("test: 30 queries")
    assert not table.err
    exported = call("export", data, run, folder / "exported", "--verbose")
    assert re.search(r"^ +\d+\.\d s  ", exported.err, re.MULTILINE)


@pytest.mark.slow
def test_a_terminal_gets_a_bar(data: Path, tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    process = subprocess.Popen(
        command("train", "astra", data, tmp_path / "run", *CHOICES, "--set", "train.epochs=1"),
        env=environment({"TERM": "xterm", "COLUMNS": "100"}),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=writer,
    )
    os.close(writer)
    shown = b""
    while True:
        try:
            chunk = os.read(reader, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        shown += chunk
    os.close(reader)
    assert process.wait() == 0
    assert b"\x1b[" in shown
    assert b"train astra" in shown
    assert b"epoch 0 (1 of 1)" in shown
