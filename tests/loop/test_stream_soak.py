"""Half a minute of `python -m benchmarks.stream_soak`, with real processes, kills and a failing store."""

import json
import subprocess
import sys

import pytest

from tests.command import ROOT, environment

pytest.importorskip("moto")
pytest.importorskip("s3fs")


@pytest.mark.slow
def test_ranks_that_are_killed_read_what_an_undisturbed_run_reads() -> None:
    command = [sys.executable, "-m", "benchmarks.stream_soak", "--minutes", "0.5", "--kills", "2"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr + done.stdout
    body = json.loads(done.stdout.splitlines()[-1])
    assert body["holds"]
    assert body["figures"]["batches"] > 200
    assert sum(body["figures"]["killed"].values()) == 2
    assert sum(body["figures"]["faults"].values()) > 5
