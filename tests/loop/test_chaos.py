"""One loop of `python -m benchmarks.chaos`, with real processes, kills and a failing store."""

import json
import subprocess
import sys

import pytest

from tests.command import ROOT, environment

pytest.importorskip("moto")
pytest.importorskip("s3fs")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_disturbed_loop_makes_what_an_undisturbed_one_makes() -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--quick"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=3500, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    body = json.loads(done.stdout.splitlines()[-1])
    assert body["holds"]
    assert body["figures"]["artifacts compared"] > 50
    assert sum(body["figures"]["disturbances"].values()) > 2
    assert sum(body["figures"]["faults"].values()) > 5
