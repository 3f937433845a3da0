"""Images as their users have them: built from the Dockerfile, and run as users without rights."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from schemas import code_version
from tests.command import extremis, sets
from tests.engines import clusters, pieces
from tests.engines.clusters import free_ports, listens
from tests.engines.conftest import files, install
from tests.engines.worker import SECONDS, external
from tests.images.builder import BASE, Builder, Image
from tests.images.container import ANYONE, USER, container

pytestmark = [pytest.mark.image, pytest.mark.timeout(4000)]

PYTHON = ("python", "-c")
_WRITABLE = """
import os
stays = lambda path: os.stat(path).st_dev == os.stat("/").st_dev
for folder, names, _ in os.walk("/"):
    if os.access(folder, os.W_OK):
        print(folder)
        names.clear()
    names[:] = [name for name in names if stays(os.path.join(folder, name)) or (folder, name) == ("/", "tmp")]
"""
_LAUNCHER = """
from triton.runtime.build import compile_module_from_src
source = '''#include <Python.h>
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&module); }'''
print(compile_module_from_src(source, "probe").__name__)
"""


@pytest.mark.parametrize(
    ("target", "program"),
    [
        ("pipelines", ["extremis-worker"]),
        ("trainer", ["extremis"]),
        ("serve", ["extremis", "serve", "--host", "0.0.0.0"]),
    ],
)
def test_what_an_image_says_of_itself(request: pytest.FixtureRequest, target: str, program: list[str]) -> None:
    config = request.getfixturevalue(target).config
    assert config["User"] == "1000"
    assert config["Entrypoint"] == ["tini", "--", *program]
    assert config["Healthcheck"]["Test"] == ["CMD", "python", "/opt/extremis/health.py"]
    labels = {name.rpartition(".")[2]: text for name, text in config["Labels"].items() if "opencontainers" in name}
    assert labels["title"] == f"extremis-{target}"
    assert labels["version"] == code_version()
    assert labels["revision"]
    assert config["Labels"]["org.opencontainers.image.base.name"] == BASE


def wait_for(get: Callable[[], Any], seconds: float = 120) -> Any:
    """Return what `get` returns once that is something."""
    limit = time.monotonic() + seconds
    while not (got := get()):
        assert time.monotonic() < limit
        time.sleep(0.2)
    return got


def succeeds(done: subprocess.CompletedProcess) -> str:
    """Return what a program wrote; it has succeeded."""
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("target", "others"),
    [
        ("pipelines", ("torch", "transformers")),
        ("trainer", ("apache_beam", "tensorboard", "onnxscript")),
        ("serve", ("torch", "transformers", "apache_beam", "sklearn")),
    ],
)
def test_what_is_in_an_image(
    builder: Builder, request: pytest.FixtureRequest, target: str, others: tuple[str, ...]
) -> None:
    """Only its side; and a list of it all, with Python's distributions and Debian's packages."""
    with container(builder, request.getfixturevalue(target)) as made:
        code = f"import importlib.util as u; print([name for name in {others} if u.find_spec(name)])"
        assert succeeds(made.run(code, entry=PYTHON)) == "[]\n"
        frozen = succeeds(made.run("-m", "pip", "list", "--format=json", entry=["python"]))
        listing = json.loads((made.root / "opt/extremis/sbom.cdx.json").read_text())
        kinds = {kind: {} for kind in ("pypi", "deb")}
        for each in listing["components"]:
            kinds[each["purl"].partition("/")[0].removeprefix("pkg:")][each["name"]] = each["version"]
        assert kinds["pypi"] == {each["name"]: each["version"] for each in json.loads(frozen)}
        packages = made.run("-W", "-f", "${Package} ${Version}\n", entry=["dpkg-query"]).stdout.splitlines()
        assert kinds["deb"] == dict(line.split() for line in packages)


def test_what_may_be_written(builder: Builder, pipelines: Image) -> None:
    with container(builder, pipelines) as made:
        own = succeeds(made.run(_WRITABLE, entry=PYTHON)).split()
        assert {folder for folder in own if not folder.startswith("/run")} == {"/home/extremis", "/tmp", "/var/tmp"}
        assert succeeds(made.run(_WRITABLE, entry=PYTHON, user=ANYONE)).split() == ["/tmp"]


@pytest.mark.parametrize("user", [USER, ANYONE])
def test_shard(builder: Builder, pipelines: Image, tate: Path, sharded: Path, shared: Path, user: str) -> None:
    with container(builder, pipelines, tate, shared) as made:
        succeeds(made.run("shard", tate, shared / "data", entry=["tini", "--", "extremis"], user=user))
    assert files(shared / "data") == files(sharded)


def test_a_pool(builder: Builder, pipelines: Image, tate: Path, sharded: Path, shared: Path, tmp_path: Path) -> None:
    """It serves Flink's job as the user of the image, is well while it listens, and ends at SIGTERM."""
    install(pieces.FLINK)
    (port,) = free_ports(1)
    with (
        container(builder, pipelines, tate, shared) as made,
        clusters.flink(tmp_path / "flink") as cluster,
        made.started(tmp_path / "pool.log", "--worker_pool", f"--service_port={port}") as pool,
    ):
        (first,) = wait_for(lambda: psutil.Process(pool.pid).children())
        wait_for(lambda: listens(port))
        assert succeeds(made.check_health(first.pid)) == ""
        # Workers and the launcher are other users here: what one makes, the other writes to.
        extremis("shard", tate, shared / "data", "--", *external(cluster, port), timeout=SECONDS, umask=0)
        os.kill(first.pid, signal.SIGTERM)
        pool.wait(10)
    assert files(shared / "data") == files(sharded)


def test_train(builder: Builder, trainer: Image, sharded: Path, shared: Path) -> None:
    """A user that the image does not know trains on a root that is read alone, to the metrics of this process."""
    choices = sets("train.epochs=1", "negatives.hard=0", "train.threads=1", "encoder.dimension=16")
    extremis("train", "astra", sharded, shared / "here", *choices, timeout=1200)
    here = extremis("evaluate", sharded, shared / "here", "--json", timeout=1200).json
    with container(builder, trainer, sharded, shared) as made:
        succeeds(made.run("train", "astra", sharded, shared / "there", *choices, user=ANYONE, seconds=1200))
        said = succeeds(made.run("evaluate", sharded, shared / "there", "--json", user=ANYONE, seconds=1200))
    assert json.loads(said.splitlines()[-1])["metrics"] == here["metrics"]


def test_triton_finds_a_compiler(builder: Builder, trainer: Image) -> None:
    """With torch for CUDA: a kernel's launcher is compiled where it runs first."""
    with container(builder, trainer) as made:
        if made.run("import triton", entry=PYTHON).returncode:
            pytest.skip("this torch has no Triton")
        assert succeeds(made.run(_LAUNCHER, entry=PYTHON, user=ANYONE)) == "probe\n"
