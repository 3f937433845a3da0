"""A loaded model in every kind of process that a service has: those of gunicorn, forked and spawned ones."""

import http.client
import json
import multiprocessing
import subprocess
import sys
import time
from multiprocessing.context import BaseContext
from pathlib import Path

import pytest

import extremis
from tests.command import ROOT, call, environment, sets
from tests.pages import blocks
from tests.ranks import free_port

pytestmark = pytest.mark.slow
TEXTS = [f"a view of the sea number {n}" for n in range(400)]
SERVER = ("-m", "gunicorn", "--preload", "--workers", "3", "--bind")


@pytest.fixture(scope="module")
def exported(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serving")
    for command in (
        ("train", "astra", data, folder / "run", *sets("train.epochs=1")),
        ("export", data, folder / "run"),
    ):
        done = call(*command, *((folder / "exports",) if command[0] == "export" else ()))
        assert done.status == 0, done.err
    return folder / "exports"


def predict(place: str) -> list[str]:
    return [each.labels[0].key for each in extremis.load(place, threads=2).predict(TEXTS)]


@pytest.mark.parametrize("kind", ["fork", "forkserver", "spawn"])
def test_pools(exported: Path, kind: str) -> None:
    context: BaseContext = multiprocessing.get_context(kind)
    expected = predict(str(exported))
    with context.Pool(2) as pool:
        assert pool.map_async(predict, [str(exported)] * 2).get(120) == [expected] * 2


def test_gunicorn_that_loads_before_it_forks(exported: Path, tmp_path: Path) -> None:
    """The service of docs/export.md."""
    (service,) = blocks(ROOT / "docs" / "export.md", "python")
    assert len([line for line in service.splitlines() if line and not line.startswith("#")]) <= 10
    (tmp_path / "service.py").write_text(service)
    (tmp_path / "exports").symlink_to(exported)
    place = f"127.0.0.1:{free_port()}"
    variables = environment({"OMP_NUM_THREADS": "2", "PYTHONPATH": str(ROOT)})
    server = subprocess.Popen([sys.executable, *SERVER, place, "service:app"], cwd=tmp_path, env=variables)
    expected = [label.key for label in extremis.load(exported).predict("a ship in a storm")[0].labels]
    try:
        for _ in range(30):
            assert ask(place, "a ship in a storm") == expected
    finally:
        server.terminate()
        server.wait(60)


def ask(place: str, text: str) -> list[str]:
    for _ in range(300):
        connection = http.client.HTTPConnection(place, timeout=20)
        try:
            connection.request("POST", "/", text)
            return json.loads(connection.getresponse().read())
        except ConnectionRefusedError:
            time.sleep(0.2)
        finally:
            connection.close()
    raise AssertionError("no answer")
