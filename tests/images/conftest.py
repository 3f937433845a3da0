"""Fixtures of images: each is built once, and all is removed at the end; what cannot be had is skipped and says why."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas import code_version, commit
from tests.command import ROOT, extremis
from tests.images.builder import Builder, BuildError, Image, missing

FOLDER = Path(os.environ.get("EXTREMIS_IMAGES") or ROOT / "build" / "images")
ROOM = {"pipelines": 6, "trainer": 26, "serve": 4}  # GiB of disk while an image is built, copies of layers among them


@pytest.fixture(scope="package")
def builder() -> Iterator[Builder]:
    """Yield a builder of images."""
    if missing():
        pytest.skip(f"images need buildah, debootstrap, unshare and root; not here: {missing()}")
    made = Builder(FOLDER)
    yield made
    made.close()


@pytest.fixture(scope="package")
def pipelines(builder: Builder) -> Image:
    """Build the image of workers."""
    return build(builder, "pipelines")


@pytest.fixture(scope="package")
def trainer(builder: Builder) -> Image:
    """Build the image of the trainer; EXTREMIS_TORCH_INDEX names another index for torch."""
    index = os.environ.get("EXTREMIS_TORCH_INDEX")
    return build(builder, "trainer", **({"TORCH_INDEX": index} if index else {}))


@pytest.fixture(scope="package")
def serve(builder: Builder) -> Image:
    """Build the image of the service."""
    return build(builder, "serve")


def build(builder: Builder, target: str, **arguments: str) -> Image:
    """Build a target with the labels of this checkout, and say its size."""
    room = shutil.disk_usage(FOLDER).free / 2**30
    if room < ROOM[target]:
        pytest.skip(f"{target}: building needs {ROOM[target]} GiB of disk, and {room:.0f} are free")
    labels = {"VERSION": code_version(), "REVISION": commit()}
    try:
        builder.prepare()
    except BuildError as error:
        pytest.skip(f"{target}: {error}")
    image = builder.build(target, **labels, **arguments)
    own = image.bytes - image.base_bytes
    print(f"{target}: {own / 1e9:.2f} GB on top of {builder.base}, which has {image.base_bytes / 1e9:.2f}")
    return image


@pytest.fixture(scope="package")
def tate() -> Path:
    """Return raw files."""
    return ROOT / "examples" / "tate"


@pytest.fixture(scope="package")
def sharded(tate: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return DATA of Tate, made in process."""
    out = tmp_path_factory.mktemp("in-process") / "data"
    extremis("shard", tate, out, timeout=1200)
    return out


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a folder that any user may write to, as the store of a cluster is."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)
    return folder
