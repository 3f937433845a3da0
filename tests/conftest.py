"""Fixtures of several tests: small data, made once by the real `extremis shard`."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.command import PROCESSES, extremis
from tests.pipelines.raw import write_tate

# No deadline for an example: first calls load libraries, and machines are shared.
settings.register_profile("extremis", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=200)  # of `make test-all`
settings.load_profile("extremis")


def pytest_configure() -> None:
    """Compute on one thread, before PyTorch is loaded: threads of several test processes wait busily for each other."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="session")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the first lines of Tate as raw files."""
    return write_tate(tmp_path_factory.mktemp("raw") / "tate", 1500, 200)


@pytest.fixture(scope="session")
def data(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished DATA, which tests do not change."""
    out = tmp_path_factory.mktemp("sharded") / "data"
    extremis("shard", raw, out, "--tokenizer", "train:1000", "--row-group-rows", "64", "--propensity", "0.55,1.5")
    return out


@pytest.fixture(scope="session")
def dask() -> Iterator[tuple[str, ...]]:
    """Start a Dask cluster of two worker processes; yield its Beam options."""
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50)
    with cluster:
        yield "--runner=DaskRunner", f"--dask_client_address={cluster.scheduler_address}"


@pytest.fixture(params=["in process", "two processes", pytest.param("dask", marks=pytest.mark.slow)])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the Beam options of each runner that runs here."""
    if request.param == "dask":
        return request.getfixturevalue("dask")
    return PROCESSES if request.param == "two processes" else ()


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """Return a device of our own that takes nothing."""
    node = tmp_path / "full"
    try:
        os.mknod(node, 0o020666, os.makedev(1, 7))
        node.open("wb").close()
    except PermissionError:
        pytest.skip("no device can be made here")
    return node
