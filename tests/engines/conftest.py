"""Fixtures of engines: a cluster of each kind, started once and stopped at the end, and the bytes made in process."""

import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import ROOT, extremis, sets
from tests.engines import clusters, pieces
from tests.engines.clusters import Cluster
from tests.engines.prism import program
from tests.engines.worker import write_worker

SMALL = ("--tokenizer", "train:1000", "--row-group-rows", "64", "--shards", "2")


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a folder by its name."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def install(engine: pieces.Pieces) -> None:
    """Skip, with the reason, where the tools for an engine are missing, or its pieces cannot be downloaded."""
    if missing := pieces.missing_tools():
        pytest.skip(f"{engine.name} needs Java 17 and Maven; not here: {', '.join(missing)}")
    try:
        pieces.install(engine)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{engine.name}: its pieces cannot be had here ({' '.join(map(str, error.cmd[:4]))}… failed)")
    except (OSError, ValueError, zipfile.BadZipFile, tarfile.TarError) as error:
        pytest.skip(f"{engine.name}: its pieces cannot be made here ({error})")


@pytest.fixture(scope="package")
def flink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start Flink with two TaskManagers of one slot."""
    install(pieces.FLINK)
    with clusters.flink(tmp_path_factory.mktemp("flink") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="package")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Start Spark with two workers of one core."""
    install(pieces.SPARK)
    with clusters.spark(tmp_path_factory.mktemp("spark") / "cluster") as cluster:
        yield cluster


@pytest.fixture(scope="package")
def prism(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Return Prism, which each command starts and ends."""
    named = ("--runner=PrismRunner", f"--prism_location={program()}")
    return Cluster("prism", named, named, tmp_path_factory.mktemp("prism"))


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Return the cluster of the engine that is the test's parameter."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="package")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the boot program of workers that run this checkout."""
    return write_worker(tmp_path_factory.mktemp("worker") / "extremis-worker", ROOT)


@pytest.fixture(scope="package")
def sharded(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return DATA that was made in process."""
    out = tmp_path_factory.mktemp("in-process") / "data"
    extremis("shard", raw, out, *SMALL)
    return out


@pytest.fixture(scope="package")
def trained(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a RUN with a dump to be mined."""
    run = tmp_path_factory.mktemp("trained") / "run"
    extremis("train", "astra", sharded, run, *sets("train.epochs=3", "refresh.source=table"))
    return run


@pytest.fixture(scope="package")
def mined(sharded: Path, trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the table of RUN that was mined in process."""
    out = tmp_path_factory.mktemp("mined") / "here"
    extremis("mine", sharded, trained, "--out", out)
    return out
