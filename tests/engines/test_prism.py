"""The portable path on Prism, in seconds: each kind of environment makes the bytes that this process makes."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import extremis
from tests.engines.conftest import SMALL, files
from tests.engines.prism import prism
from tests.engines.worker import NO_CHECK, SECONDS, pool

pytestmark = pytest.mark.engine

LOOPBACK = "--environment_type=LOOPBACK"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, ...]]:
    """Start Prism."""
    with prism(tmp_path_factory.mktemp("prism")) as options:
        yield options


@pytest.fixture
def flags(request: pytest.FixtureRequest, server: tuple[str, ...], worker: Path) -> Iterator[tuple[str, ...]]:
    """Yield the Beam options of an environment."""
    if request.param == "EXTERNAL":
        with pool(worker) as port:
            yield *server, "--environment_type=EXTERNAL", f"--environment_config=localhost:{port}"
    elif request.param == "PROCESS":
        config = json.dumps({"command": str(worker)})
        yield *server, "--environment_type=PROCESS", f"--environment_config={config}"
    else:
        yield *server, LOOPBACK


@pytest.mark.parametrize("flags", ["LOOPBACK", "EXTERNAL", "PROCESS"], indirect=True)
def test_shard(flags: tuple[str, ...], raw: Path, sharded: Path, tmp_path: Path) -> None:
    """Workers are asked before the start, too."""
    done = extremis("shard", raw, tmp_path / "data", *SMALL, "--", *flags, timeout=SECONDS)
    assert " answered, the last after " in done.err
    assert files(tmp_path / "data") == files(sharded)


def tables(folder: Path) -> dict[str, bytes]:
    """Return the shards in a folder; there are some."""
    found = {name: content for name, content in files(folder).items() if name.endswith(".parquet")}
    assert found
    return found


def test_mine(server: tuple[str, ...], sharded: Path, trained: Path, mined: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    extremis("mine", sharded, trained, "--out", there, "--", *server, LOOPBACK, *NO_CHECK, timeout=SECONDS)
    assert tables(there) == tables(mined)


def test_embed_and_cluster(server: tuple[str, ...], sharded: Path, trained: Path, tmp_path: Path) -> None:
    for place, more in (("here", []), ("there", ["--", *server, LOOPBACK, *NO_CHECK])):
        embedded = tmp_path / place / "embedded"
        extremis("embed", sharded, trained, embedded, "--split", "train", *more, timeout=SECONDS)
        clusters = ("--queries", embedded, "--size", "16", "--for-epoch", "0", "--out", tmp_path / place / "clusters")
        extremis("cluster", sharded, trained, *clusters, *more, timeout=SECONDS)
    assert tables(tmp_path / "here") == tables(tmp_path / "there")


def test_a_version(server: tuple[str, ...], tmp_path: Path) -> None:
    """What comes later goes onto what is there: new labels, new points, and points that replace older ones."""
    for name, points, labels in (("first", range(300), 20), ("second", range(250, 320), 25)):
        rows = [{"key": f"p{n}", "text": f"{name} sea {n}", "labels": [f"l{n % labels}"]} for n in points]
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "train.jsonl", rows)
        write_lines(tmp_path / name / "labels.jsonl", [{"key": f"l{n}", "text": f"label {n}"} for n in range(labels)])
    extremis("shard", "first", "data", "--tokenizer", "train:200", "--row-group-rows", "16", cwd=tmp_path)
    extremis("shard", "second", "here", "--onto", "data", cwd=tmp_path)
    flags = [*server, LOOPBACK, *NO_CHECK]
    extremis("shard", "second", "there", "--onto", "data", "--", *flags, cwd=tmp_path, timeout=SECONDS)
    assert files(tmp_path / "there") == files(tmp_path / "here")


def write_lines(path: Path, rows: list[dict]) -> None:
    """Write one JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
