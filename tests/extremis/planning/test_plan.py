"""`extremis plan`, against a small real run, and against itself."""

import json
import shlex
from pathlib import Path

import pytest

from benchmarks.common.folder_bytes import FolderWatch
from benchmarks.common.keyed_input import write_keyed
from extremis.planning import plan, workload
from pipelines.runners.beam import refuse_unknown_options
from tests.command import Done, call, refused, sets
from tests.pipelines.raw import write_tate
from trainer.methods.recipe import Recipe
from trainer.settings.resolve import resolve

CHOICES = (
    "train.epochs=4",
    "refresh.stale=wait",
    "order.batch=128",
    "encoder.dimension=24",
    "encoder.dropout=0",  # zeros compress
    "encoder.residual=true",
    "encoder.buckets=4096",
    "classifier.bias=true",
    "negatives.hard=12",
)
SCRATCH = "candidates and indexes of mining"
AVERAGES = {"ranks": 1, "workers": 1}
AVERAGED = ("queries", "labels", "tokens", "labels_per_query")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data/ and a finished run/ on it."""
    folder = tmp_path_factory.mktemp("plan")
    raw = write_tate(folder / "raw", 3000, 50)
    assert call("shard", raw, folder / "data", "--tokenizer", "train:2000").status == 0
    done = call("run", "astra", folder / "data", folder / "run", *sets(*CHOICES))
    assert done.status == 0, done.err
    return folder


@pytest.fixture(scope="module")
def recipe(ran: Path) -> Recipe:
    return resolve("astra", CHOICES, str(ran / "data")).recipe


def stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.name.endswith((".parquet", ".safetensors")))


def test_bytes_are_those_of_a_real_run(ran: Path, recipe: Recipe) -> None:
    """Within 20 % a table, from a sample of DATA; within 20 % in all, from nothing but averages."""
    planned = plan(workload(str(ran / "data"), None, None, recipe, 8 << 30, dict(AVERAGES)))
    run = ran / "run"
    dumps, negatives = sorted((run / "dumps").iterdir()), sorted((run / "negatives").iterdir())
    real = {
        "queries": stored(ran / "data" / "queries" / "train"),
        "labels": stored(ran / "data" / "labels"),
        "embeddings of queries": stored(dumps[0] / "queries"),
        "embeddings of labels": stored(dumps[0] / "labels"),
        "vectors": stored(dumps[0] / "vectors"),
        "negatives of queries": stored(negatives[0] / "queries"),
        "negatives of labels": stored(negatives[0] / "labels"),
        "checkpoint": stored(max((run / "checkpoints").iterdir())),
    }
    assert planned["tables"].keys() == real.keys()
    sizes = {name: size["bytes"] for name, size in planned["tables"].items()}
    assert sizes == {name: pytest.approx(size, rel=0.2) for name, size in real.items()}
    assert {size["times"] for name, size in planned["tables"].items() if "of" in name} == {len(dumps)}
    averages = {
        **AVERAGES,
        **{name: planned["workload"][name] for name in ("tokens", "label_tokens", "labels_per_query")},
        **{name: planned["workload"][name] for name in ("key_bytes", "text_bytes", "vocabulary")},
    }
    rows = (planned["workload"]["queries"], planned["workload"]["labels"])
    made_up = plan(workload(None, *rows, recipe, 8 << 30, averages))
    assert sum(size["bytes"] for size in made_up["tables"].values()) == pytest.approx(sum(real.values()), rel=0.2)


def test_shards_blocks_and_steps_are_those_of_a_real_run(ran: Path, recipe: Recipe) -> None:
    planned = plan(workload(str(ran / "data"), None, None, recipe, 8 << 30, dict(AVERAGES)))
    run = ran / "run"
    table = json.loads(next((run / "negatives").glob("*/queries/_manifest.json")).read_text())
    mined = table["parameters"]
    assert planned["tables"]["queries"]["shards"] == len(table["shards"])
    assert planned["mining"]["index"] == mined["index"]
    assert planned["mining"]["blocks"] == mined["blocks"]
    assert planned["mining"]["refreshes"] == len(list((run / "negatives").iterdir()))
    assert planned["steps"] == json.loads((run / "finished.json").read_text())["step"]


def test_what_a_recipe_leaves_to_the_data_is_planned_as_a_run_would_set_it(ran: Path) -> None:
    """From DATA the very settings of a run on it; from averages the same, but for the n-grams that nobody counted."""
    sample = ("--data", ran / "data", "--json")
    planned = call("plan", *sample)
    resolved = resolve("astra", (), str(ran / "data"))
    assert planned.json["settings"] == resolved.settings
    for line in resolved.reasons:
        assert line in planned.err
    facts = planned.json["workload"]
    numbers = [word for name in AVERAGED for word in (f"--{name.replace('_', '-')}", str(facts[name]))]
    alone = call("plan", *numbers, "--json").json["settings"]
    assert alone == {**planned.json["settings"], "encoder.buckets": alone["encoder.buckets"]}
    more = call("plan", *sample, "--queries", "10e6", "--labels", "1e6").json["settings"]
    assert (more["negatives.pool"], alone["negatives.pool"]) == ("own", "shared")
    assert (more["order.batch"], more["train.epochs"]) == (512, 6)


def large(*more: str) -> Done:
    numbers = ("--queries", "370e6", "--labels", "120e6", "--tokens", "10", "--dimension", "64")
    return call("plan", *numbers, "--json", *more)


def test_a_plan_near_the_limit() -> None:
    """The largest published: its vectors are 31 GB in float32, and a step that does not fit is a no go."""
    planned = large("--memory", "64GiB").json
    assert planned["go"]
    assert planned["tables"]["vectors"]["bytes"] == pytest.approx(120e6 * 65 * 4, rel=0.1)
    assert planned["tables"]["checkpoint"]["bytes"] > 120e6 * (65 + 1) * 4
    assert planned["memory"]["mine"] <= 64 << 30
    less = large("--memory", "8GiB").json
    assert not less["go"]
    assert list(less["over"]) == ["train"]
    assert less["mining"]["blocks"] > planned["mining"]["blocks"]
    assert less["memory"]["mine"] <= 8 << 30
    assert less["tables"].pop(SCRATCH)["bytes"] > 0
    assert less["tables"] == planned["tables"]
    fusion = planned["fusion"]
    assert fusion["memory_bytes"] <= 4 << 30 < fusion["memory_bytes_of_all"]
    assert 0 < fusion["points"] < 370e6
    assert fusion["stored_bytes"] >= 2 * 64 * fusion["points"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ("--queries N and --labels L", "--data")),
        (("--queries", "10.5", "--labels", "3"), ("10.5", "370e6")),
        (("--queries", "many", "--labels", "3"), ("many",)),
        (("--queries", "9", "--labels", "3"), ("--labels-per-query: expected at most 3, the number of labels, got 5",)),
        (("--queries", "9", "--labels", "9", "--memory", "8 apples"), ("8 apples", "8GiB")),
        (("--queries", "9", "--labels", "9", "--recipe", "astar"), ("astar", "'astra'")),
        (("--queries", "9", "--labels", "9", "--memory", "100MiB"), ("--memory", "100")),
        (("--queries", "9", "--labels", "9", "--tokens", "0"), ("--tokens",)),
        (("--data", "/nowhere"), ("/nowhere",)),
    ],
)
def test_wrong_numbers_are_refused(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(call("plan", *arguments), *words)


def test_a_recipe_with_clusters_plans_their_tables_and_no_mining() -> None:
    arguments = ("--queries", "1e6", "--labels", "1e5", "--json")
    planned = call("plan", "--recipe", "ngame", *arguments).json
    assert {"embeddings of queries", "queries in cluster order"} < set(planned["tables"])
    assert planned["tables"]["queries in cluster order"]["times"] == 6
    assert planned["tables"]["queries in cluster order"]["bytes"] == planned["tables"]["queries"]["bytes"]
    assert "vectors" not in planned["tables"]
    assert planned["mining"] is None
    assert planned["memory"]["cluster"] > planned["memory"]["shard"]


def test_input_and_staging_are_those_of_a_real_run(tmp_path: Path) -> None:
    """Within 20 %, from averages: of JSON with string keys, whose staging is watched."""
    written = write_keyed(tmp_path / "raw", 30_000, 3_000)
    with FolderWatch(tmp_path / "data" / ".staging", interval=0.02) as staging:
        assert call("shard", tmp_path / "raw", tmp_path / "data", "--tokenizer", "train:30000").status == 0
    data = str(tmp_path / "data")
    planned = plan(workload(data, None, None, Recipe.model_validate({}), 8 << 30, dict(AVERAGES)), "flink")["on_engine"]
    assert planned["input_bytes"] == pytest.approx(written, rel=0.2)
    assert planned["staging_bytes"] == pytest.approx(staging.peak, rel=0.2)


@pytest.mark.parametrize("engine", ["flink", "spark"])
def test_options_of_an_engine_are_those_that_beam_knows(engine: str) -> None:
    arguments = ("--queries", "1e8", "--labels", "1e7", "--workers", "7", "--engine", engine)
    done = call("plan", *arguments, "--json")
    assert done.status == 0, done.err
    planned = done.json["on_engine"]
    assert shlex.split(planned["options"]).count("--parallelism=7") == 1
    refuse_unknown_options(tuple(shlex.split(planned["options"])))
    assert (
        planned["slot_bytes"] >= planned["worker_bytes"] == max(done.json["memory"][step] for step in ("shard", "mine"))
    )
    shown = call("plan", *arguments, "--epochs", "3", "--set", "negatives.random=99")
    assert (
        shown.err.splitlines()[-1] == "next: extremis run astra DATA RUN --set negatives.random=99 --set train.epochs=3"
    )
    assert planned["options"] in shown.out
    assert f"pipelines on {engine} with 7 worker(s)" in shown.out
