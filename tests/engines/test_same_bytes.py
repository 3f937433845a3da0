"""Every engine and environment makes the bytes that this process makes."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.command import extremis
from tests.engines.clusters import Cluster
from tests.engines.conftest import SMALL, files
from tests.engines.worker import NO_CHECK, SECONDS, external, loopback, pool, process
from tests.processes import with_word

pytestmark = pytest.mark.engine

PRISM = [("prism", "LOOPBACK"), ("prism", "EXTERNAL"), ("prism", "PROCESS")]


def slow(*case: str) -> Any:
    """A case of which Prism says nearly as much, in a tenth of the time."""
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture
def flags(cluster: Cluster, kind: str, worker: Path) -> Iterator[list[str]]:
    """Yield the Beam options of an environment."""
    if kind == "EXTERNAL":
        with pool(worker) as port:
            yield external(cluster, port)
    else:
        yield loopback(cluster) if kind == "LOOPBACK" else process(cluster, worker)


@pytest.mark.parametrize(
    ("cluster", "kind"),
    # LOOPBACK on Flink: test_first_cluster.py; PROCESS: test_killed.py.
    [slow("spark", "EXTERNAL"), ("flink", "EXTERNAL"), *PRISM],
    indirect=["cluster"],
)
def test_shard(flags: list[str], raw: Path, sharded: Path, tmp_path: Path) -> None:
    """From relative paths, too; both machines of the engine ask one pool, and call their workers alike."""
    done = extremis(
        "shard", os.path.relpath(raw, tmp_path), "data", *SMALL, "--", *flags, cwd=tmp_path, timeout=SECONDS
    )
    assert " answered, the last after " in done.err
    assert files(tmp_path / "data") == files(sharded)


@pytest.mark.parametrize("cluster", ["flink", "spark"], indirect=True)
def test_a_runner_by_its_name(cluster: Cluster, raw: Path, sharded: Path, tmp_path: Path) -> None:
    """Beam starts the job server, once for all jobs; it ends with the command."""
    flags = [*cluster.by_name, "--environment_type=LOOPBACK", "--parallelism=2", "--start_timeout=240"]
    done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *flags, timeout=SECONDS)
    assert " answered, the last after " in done.err
    assert files(tmp_path / "data") == files(sharded)
    assert len([line for line in with_word("--job-port") if str(cluster.folder) in line]) == 1


@pytest.mark.parametrize(
    ("cluster", "kind"), [slow("flink", "LOOPBACK"), slow("spark", "PROCESS"), PRISM[0]], indirect=["cluster"]
)
def test_mine(flags: list[str], sharded: Path, trained: Path, mined: Path, tmp_path: Path) -> None:
    extremis("mine", sharded, trained, "--out", tmp_path / "there", "--", *flags, *NO_CHECK, timeout=SECONDS)
    assert files(tmp_path / "there").keys() == files(mined).keys()
    for name, content in files(mined).items():
        if name.endswith(".parquet"):
            assert files(tmp_path / "there")[name] == content, name


@pytest.mark.parametrize(
    ("cluster", "kind"), [slow("flink", "PROCESS"), slow("spark", "LOOPBACK"), PRISM[0]], indirect=["cluster"]
)
def test_embed_and_cluster(flags: list[str], sharded: Path, trained: Path, tmp_path: Path) -> None:
    for place, more in (("here", []), ("there", ["--", *flags, *NO_CHECK])):
        embedded = tmp_path / place / "embedded"
        extremis("embed", sharded, trained, embedded, "--split", "train", *more, timeout=SECONDS)
        clusters = ("--queries", embedded, "--size", "16", "--for-epoch", "0", "--out", tmp_path / place / "clusters")
        extremis("cluster", sharded, trained, *clusters, *more, timeout=SECONDS)
    for name in ("embedded", "clusters"):
        tables = [
            {file: content for file, content in files(tmp_path / place / name).items() if file.endswith(".parquet")}
            for place in ("here", "there")
        ]
        assert tables[0]
        assert tables[0] == tables[1]


@pytest.mark.parametrize(("cluster", "kind"), [slow("flink", "PROCESS"), PRISM[0]], indirect=["cluster"])
def test_a_version(flags: list[str], tmp_path: Path) -> None:
    """What comes later goes onto what is there: new labels, new points, and points that replace older ones."""
    for name, points, labels in (("first", range(300), 20), ("second", range(250, 320), 25)):
        rows = [{"key": f"p{n}", "text": f"{name} sea {n}", "labels": [f"l{n % labels}"]} for n in points]
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "train.jsonl", rows)
        write_lines(tmp_path / name / "labels.jsonl", [{"key": f"l{n}", "text": f"label {n}"} for n in range(labels)])
    extremis("shard", "first", "data", "--tokenizer", "train:200", "--row-group-rows", "16", cwd=tmp_path)
    extremis("shard", "second", "here", "--onto", "data", cwd=tmp_path)
    there = ("there", "--onto", "data", "--", *flags, *NO_CHECK)
    extremis("shard", "second", *there, cwd=tmp_path, timeout=SECONDS)
    assert files(tmp_path / "there") == files(tmp_path / "here")


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
