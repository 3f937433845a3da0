"""What the images are made of, as far as it can be tried without building one; and the example for Kubernetes."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from extremis.cli import cli
from images import lock
from pipelines.runners.local import choose_runner
from pipelines.runners.worker import POOL_PORT, parse
from schemas import code_version
from schemas.owners import LEASE_SECONDS
from tests.command import ROOT

EXAMPLE = list(yaml.safe_load_all((ROOT / "examples" / "kubernetes" / "flink.yaml").read_text()))


def run(name: str, *words: str) -> subprocess.CompletedProcess:
    """Run a program of the images."""
    command = [sys.executable, str(ROOT / "images" / name), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


def pins(extra: str) -> dict[str, Requirement]:
    """Return what an image with an extra installs on this Python, by name; each has a digest."""
    text = run("requirements.py", extra).stdout
    found = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        first, *digests = entry.split(" \\\n")
        pin = Requirement(first)
        assert digests
        assert all(re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", digest) for digest in digests)
        if pin.marker is None or pin.marker.evaluate():
            assert found.setdefault(canonicalize_name(pin.name), pin) is pin
    return found


@pytest.mark.parametrize("extra", lock.EXTRAS)
def test_what_is_locked_is_what_an_extra_needs_in_the_versions_of_the_constraints(extra: str) -> None:
    """Without `make lock` after a change of setup.cfg or constraints.txt, an image would have the old ones."""
    found = pins(extra)
    for line in lock.requirements(extra):
        needed = Requirement(line)
        if needed.marker is None or needed.marker.evaluate():
            (version,) = found[canonicalize_name(needed.name)].specifier
            assert needed.specifier.contains(version.version), line
    for pin in map(Requirement, (ROOT / "constraints.txt").read_text().splitlines()):
        if (name := canonicalize_name(pin.name)) in found and (pin.marker is None or pin.marker.evaluate()):
            assert found[name].specifier == pin.specifier


def test_an_image_has_the_packages_of_its_extras_alone() -> None:
    both = pins("http,s3")
    assert both.keys() == pins("http").keys() | pins("s3").keys()
    assert not {"torch", "apache-beam", "onnx", "tensorboard"} & both.keys()
    assert not {"onnxscript", "tensorboard", "apache-beam"} & pins("trainer").keys()
    (left_out,) = re.findall("--without '(.*)'", (ROOT / "Dockerfile").read_text())  # where torch is of another index
    named = re.findall(r"^(\S+)==", run("requirements.py", "trainer", "--without", left_out).stdout, re.MULTILINE)
    assert "transformers" in named
    assert not [name for name in named if re.match("torch|triton|cuda|nvidia", name)]
    assert run("requirements.py", "http,nothing").stderr.startswith("no extra of locked.txt: nothing; expected some")


def test_a_release_is_built_on_a_base_by_its_digest(tmp_path: Path) -> None:
    """By Docker's buildx, of which this test has none: a program in its place writes down what it was asked."""
    digest = f"sha256:{'a1' * 32}"
    programs = {
        "docker": f'printf "%s\\n" "$*" >>{tmp_path}/asked\n[ "$2" = build ] || echo {digest}',
        "git": '[ "$1" = status ] || echo 0123abc',
    }
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [str(ROOT / "images" / "release.sh"), "registry"]
    assert subprocess.run(command, env=env, check=False).returncode == 0
    first, *builds = (tmp_path / "asked").read_text().splitlines()
    assert first.startswith("buildx imagetools inspect python:3.11-slim ")
    for target, build in zip(("pipelines", "trainer", "serve"), builds, strict=True):
        assert f"--build-arg BASE=python:3.11-slim@{digest} " in build
        assert f"--target {target} --tag registry/extremis-{target}:{code_version()} " in build
        assert "--build-arg REVISION=0123abc" in build
    (tmp_path / "git").write_text("#!/bin/sh\necho ' M Dockerfile'\n")
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, "Commit them" in done.stderr) == (2, True)


def test_the_list_of_parts_names_each_once() -> None:
    listing = json.loads(run("sbom.py", "trainer").stdout)
    assert listing["bomFormat"] == "CycloneDX"
    purls = [each["purl"] for each in listing["components"]]
    assert purls == sorted(set(purls))
    assert {re.match(r"pkg:(pypi|deb/debian)/[^@]+@[^@]+$", purl) is not None for purl in purls} == {True}


@pytest.mark.parametrize(
    "words",
    [
        ["extremis-worker", "--worker_pool", "--service_port={port}"],
        ["extremis-worker", "--worker_pool", "--service_port", "{port}"],
        ["tini", "--", "extremis", "serve", "--host", "0.0.0.0", "exports/", "--port", "{port}"],
    ],
)
def test_health_is_an_answer_where_a_program_listens(words: list[str]) -> None:
    waiting = "import sys; sys.stdin.read()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        line = [word.format(port=server.getsockname()[1]) for word in words]
        program = subprocess.Popen([sys.executable, "-c", waiting, *line], stdin=subprocess.PIPE)
        try:
            assert run("health.py", str(program.pid)).returncode == 0
            server.close()
            done = run("health.py", str(program.pid))
            assert done.returncode == 1
            assert done.stderr.startswith("nobody answers at port ")
        finally:
            program.communicate()


def test_health_is_a_recent_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXTREMIS_ALIVE", str(tmp_path))
    command = [sys.executable, "-m", "extremis", "mine", "data", str(tmp_path / "run"), "--watch"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as miner:
        alive = tmp_path / f"extremis-{miner.pid}.alive"
        while not (alive.exists() and alive.read_text()):
            time.sleep(0.01)
        assert run("health.py", "self").returncode == 0
        miner.send_signal(signal.SIGSTOP)
        os.utime(alive, times=(0, time.time() - LEASE_SECONDS - 5))  # it was stopped so long ago
        assert re.match(rf"process {miner.pid} has given no sign of life for 3\d s", run("health.py", "self").stderr)
        miner.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 10
        while run("health.py", "self").returncode and time.monotonic() < deadline:
            time.sleep(0.1)
        assert run("health.py", "self").returncode == 0
        alive.write_text("1")  # of an earlier process with this number
        os.utime(alive, times=(0, 0))
        assert run("health.py", "self").returncode == 0
        miner.kill()
    os.utime(alive, times=(0, 0))
    assert run("health.py", "self").returncode == 0  # it has ended: that is not for this check to say


def test_a_program_that_listens_nowhere_is_well_while_it_runs() -> None:
    assert run("health.py", str(Path("/proc/self").resolve().name)).returncode == 0


def test_the_example_gives_workers_and_launcher_what_they_take() -> None:
    deployment, server, service, job = EXAMPLE
    main, workers = deployment["spec"]["taskManager"]["podTemplate"]["spec"]["containers"]
    _, options = parse(workers["args"])
    assert main["name"] == "flink-main-container"
    assert options.worker_pool
    assert options.service_port == POOL_PORT
    (launcher,) = job["spec"]["template"]["spec"]["containers"]
    assert launcher["command"] == ["tini", "--", "extremis"]
    name, *arguments = launcher["args"]
    cli.commands[name].make_context(name, list(arguments))
    choose_runner(tail := arguments[arguments.index("--") + 1 :])
    host = service["metadata"]["name"]
    (jobs,) = server["spec"]["template"]["spec"]["containers"]
    stated = {word for word in jobs["args"] if word.endswith(("8098", "8099"))}
    assert {f"--job_endpoint={host}:8099", f"--artifact_endpoint={host}:8098"} < set(tail)
    assert stated == {"--job-port=8099", "--artifact-port=8098"}
    assert f"--environment_config=localhost:{POOL_PORT}" in tail
    slots = int(deployment["spec"]["flinkConfiguration"]["taskmanager.numberOfTaskSlots"])
    assert f"--parallelism={slots * deployment['spec']['taskManager']['replicas']}" in tail


def test_versions_of_the_example_are_those_of_the_requirements() -> None:
    beam = re.search(r"^apache-beam==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    text = json.dumps(EXAMPLE)
    assert beam is not None
    assert re.findall(r"job_server:([\d.]+)", text) == [beam[1]]
    flink = EXAMPLE[0]["spec"]
    assert f"v{flink['image'].partition(':')[2].replace('.', '_')}" == flink["flinkVersion"]
    assert f"beam_flink{flink['image'].partition(':')[2]}_job_server" in text
