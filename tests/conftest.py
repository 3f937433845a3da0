"""Fixtures of several tests: small data, made once by the real `extremis shard`; a store that speaks S3."""

import contextlib
import fcntl
import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import scoring.fusion
from tests.command import MINED, PROCESSES, call, sets
from tests.faults import Proxy
from tests.forks import extremis
from tests.pipelines.raw import write_tate

if TYPE_CHECKING:
    from tests.s3 import Bucket

Once = Callable[[str, Callable[[Path], object]], Path]

with contextlib.suppress(ImportError):  # of a machine with a GPU and little else
    from hypothesis import settings

    # No deadline for an example: first calls load libraries, and machines are shared.
    settings.register_profile("extremis", deadline=None, max_examples=30)
    settings.register_profile("thorough", deadline=None, max_examples=200)  # of `make test-all`
    settings.load_profile("extremis")


scoring.fusion.SMALL = 40, 8  # in place of 100 trees, which take longer to fit


def pytest_configure() -> None:
    """Compute on one thread, before PyTorch is loaded: threads of several test processes wait busily for each other."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """Take what is loaded out of each garbage collection to come: to look through it takes a third of a second."""
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Load with `-m gpu` only files and folders with such tests: a machine with a GPU lacks what others import."""
    if config.option.markexpr != "gpu":
        return None
    files = collection_path.rglob("test_*.py") if collection_path.is_dir() else [collection_path]
    return True if not any("mark.gpu" in file.read_text() for file in files) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU here"))


@pytest.fixture(scope="module", autouse=True)
def _forget_memory() -> Iterator[None]:
    """Empty `memory://` after each module: what fsspec finds in it takes as long as it is full."""
    yield
    if (memory := sys.modules.get("fsspec.implementations.memory")) is not None:
        memory.MemoryFileSystem.store.clear()


@pytest.fixture(scope="session", autouse=True)
def _brief_pauses() -> None:
    """Try again at once after a fault: no test is about the length of a pause between two attempts."""
    from schemas import storage

    storage.SLOWEST_SECONDS = 0.01


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Return once(name, make): the folder `name`, which `make` fills for all worker processes of this run of tests."""
    root = tmp_path_factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root

    def folder_of(name: str, make: Callable[[Path], object]) -> Path:
        folder, made = root / name, root / f"{name}.made"
        with (root / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                folder.mkdir()
                make(folder)
                made.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def raw(once: Once) -> Path:
    """Write the first lines of Tate as raw files."""
    return once("raw", lambda folder: write_tate(folder / "tate", 1500, 200)) / "tate"


@pytest.fixture(scope="session")
def data(raw: Path, once: Once) -> Path:
    """Return a finished DATA, which tests do not change."""
    options = ("--tokenizer", "train:1000", "--row-group-rows", "64", "--propensity", "0.55,1.5")
    return once("sharded", lambda folder: extremis("shard", raw, folder / "data", *options)) / "data"


@pytest.fixture(scope="session")
def mined(data: Path, once: Once) -> Path:
    """Return a finished RUN on DATA with its dumps and mined tables, which tests do not change."""

    def make(folder: Path) -> None:
        report = extremis("run", "astra", data, folder / "run", *sets(*MINED), "--json").json
        assert report["table_versions"] == {"0": None, "1": None, "2": 2, "3": 3, "4": 4}

    return once("mined", make) / "run"


@pytest.fixture(scope="session")
def exports(data: Path, once: Once) -> Path:
    """Return a folder of two exports of one run, which is beside it: fused scores, current, and the classifier's.

    Tests do not change them.
    """

    def make(folder: Path) -> None:
        run, one, two = folder / "run", folder / "exports" / "one", folder / "exports" / "two"
        for command in (
            ("train", "astra", data, run, *sets("train.epochs=1", "data.holdout=0.2")),
            ("fuse", data, run),
            ("export", data, run, one, "--current"),
            ("export", data, run, two, "--scores", "classifier", "--calibration-split", "none"),
        ):
            done = call(*command)
            assert done.status == 0, done.err

    return once("served", make) / "exports"


@pytest.fixture(scope="session", params=["moto", pytest.param("versitygw", marks=pytest.mark.s3server)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Start a server that speaks S3; yield its host and port."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    from tests.s3 import serve

    with serve(tmp_path_factory.mktemp(request.param) / "log", request.param) as port:
        yield "127.0.0.1", port


@pytest.fixture(scope="session")
def env(server: tuple[str, int]) -> dict[str, str]:
    """Return the environment variables by which another process reaches the server."""
    from tests.s3 import variables

    return variables("http://{}:{}".format(*server))


@pytest.fixture(scope="module")
def bucket(server: tuple[str, int], request: pytest.FixtureRequest) -> "Bucket":
    """Create the module's BUCKET; return it as its owner sees it."""
    from tests.s3 import Bucket

    return Bucket(server, request.module.BUCKET)


@pytest.fixture(scope="module")
def store(server: tuple[str, int], bucket: "Bucket") -> Iterator[Proxy]:
    """Reach the server through a proxy, by environment variables as a user would."""
    from tests.s3 import reached_through_proxy

    with reached_through_proxy(server) as between:
        yield between


@pytest.fixture(params=["in process", "two processes"])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """Return the Beam options of each runner that runs here."""
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
