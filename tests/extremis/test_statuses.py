"""Exit statuses: each has a real cause, in a process of its own; manifests and pages tell the same as the classes."""

import os
import re
import resource
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from schemas.errors import LASTING_STATUSES, ExtremisError
from schemas.owners import claimed
from tests.command import ROOT, Done, environment, extremis, refused, sets
from tests.loop.test_kill import wait_for_step
from tests.loop.test_stop import start
from tests.pipelines.raw import write_tiny
from tests.s3 import Bucket, serve, variables

MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))
PASSES = [3, 5, 6, 137, 143]  # statuses after which the same command may succeed


def python(program: str) -> Done:
    """Run a program that calls the command line."""
    command = [sys.executable, "-c", f"from extremis.cli import main\n{program}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def test_1_is_a_fault_of_ours() -> None:
    done = python("import extremis.cli\nextremis.cli.cli.main = lambda *words, **options: 1 / 0\nmain([])")
    assert done.status == 1
    assert "error: a bug in Extremis, not in your input: ZeroDivisionError" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [(("trian", "astra", "d", "r"), "No such command"), (("inspect", "nowhere"), "nowhere: no table here")],
)
def test_2_is_wrong_use_or_input(words: tuple[str, ...], said: str) -> None:
    done = extremis(*words, check=False)
    assert (done.status, said in done.err) == (2, True), done.err


def test_3_is_a_store_that_does_not_answer() -> None:
    nobody = variables("http://127.0.0.1:9") | {"AWS_MAX_ATTEMPTS": "1"}
    refused(extremis("inspect", "s3://bucket/data", env=nobody, check=False), "after 5 attempt(s)", status=3)


def test_4_is_a_store_that_refuses(tmp_path: Path) -> None:
    with serve(tmp_path / "log") as port:
        Bucket(("127.0.0.1", port), "closed")
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/moto-api/reset-auth", b"0", headers)
        urllib.request.urlopen(request).close()  # from now on the server asks who it is
        here = variables(f"http://127.0.0.1:{port}")
        refused(extremis("inspect", "s3://closed/data", env=here, check=False), "after 1 attempt(s)", status=4)


def test_5_is_another_process_at_work(tmp_path: Path) -> None:
    with claimed(str(tmp_path / "data"), "sharded"):
        done = extremis("shard", write_tiny(tmp_path / "raw"), tmp_path / "data", check=False)
    refused(done, f"being sharded by process {os.getpid()}", status=5)


def test_6_is_a_disk_that_is_full_during_the_work(tmp_path: Path) -> None:
    words = ("shard", write_tiny(tmp_path / "raw"), tmp_path / "data", "--tokenizer", "train:1000")
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, 4_000))  # noqa: E731
    refused(extremis(*words, check=False, preexec_fn=limit), "could not write", "File too large", status=6)


def test_130_is_ctrl_c(tmp_path: Path) -> None:
    interrupt = "import os, signal, threading\nsignal.signal(2, signal.default_int_handler)\n"
    interrupt += "threading.Timer(1, os.kill, [os.getpid(), 2]).start()\n"
    done = python(f"{interrupt}main(['mine', {str(tmp_path)!r}, {str(tmp_path / 'run')!r}, '--watch'])")
    assert (done.status, done.err) == (130, "interrupted\n")


def test_143_is_a_run_that_was_asked_to_stop(data: Path, tmp_path: Path) -> None:
    choices = sets("train.epochs=90", "logging.tensorboard=false", "checkpoint.every_epochs=0")
    trainer = start("train", "random", data, tmp_path / "run", *choices)
    wait_for_step(trainer, tmp_path / "run", 3)
    trainer.send_signal(signal.SIGTERM)
    _, said = trainer.communicate(timeout=60)
    refused(Done(trainer.returncode, "", said), "stopped by a signal after step", status=143)


def test_ranks_pass_their_status_on() -> None:
    """To whoever started trainer.torchrun: torchrun itself ends with 1. 137 is a rank that was killed."""
    programs = {5: "exit 5", 137: "kill -9 $$$$", 143: "sleep 1; kill $PPID; exec sleep 60"}  # torchrun halves $$
    launcher = [sys.executable, "-m", "trainer.torchrun", "--standalone", "--nproc-per-node=1", "--no-python"]
    options = {"cwd": ROOT, "env": environment(), "stderr": subprocess.PIPE, "text": True}
    ranks = {status: subprocess.Popen([*launcher, "sh", "-c", some], **options) for status, some in programs.items()}
    for status, process in ranks.items():
        _, said = process.communicate(timeout=120)
        assert process.returncode == status, said


def statuses(kind: type[ExtremisError] = ExtremisError) -> set[int]:
    return {kind.exit_status}.union(*map(statuses, kind.__subclasses__()))


def test_the_page_explains_every_status() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    explained = [int(number) for number in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert explained == sorted({0, 130, 137, 143} | statuses())


def jobs() -> Iterator[Any]:
    for manifest in MANIFESTS:
        for each in yaml.safe_load_all(manifest.read_text()):
            if each["kind"] == "Job":
                yield pytest.param(each["spec"], id=each["metadata"]["name"])


@pytest.mark.parametrize("job", jobs())
def test_a_job_is_tried_again_only_after_what_passes(job: dict[str, Any]) -> None:
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # Kubernetes reads no policy with another one
    rules = job["podFailurePolicy"]["rules"]
    codes = {rule["action"]: rule["onExitCodes"] for rule in rules if "onExitCodes" in rule}
    assert codes == {
        "FailJob": {"operator": "In", "values": sorted(LASTING_STATUSES)},
        "Count": {"operator": "In", "values": PASSES},
    }
    assert {*LASTING_STATUSES, *PASSES} - statuses() <= {137, 143}  # of signals
    # A pod that its node gives up is no failure; but wrong input is, whatever ends the pod.
    assert rules[1] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
