"""`python -m benchmarks.gpu` runs on a CPU, at a tiny size, in all of its sections."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu.__main__ import SECTIONS
from benchmarks.gpu.random_queries import HARD, POSITIVES, plan, random_batch
from tests.command import ROOT, environment
from trainer.device import CPU
from trainer.stream.batch import Candidates


@pytest.mark.slow
def test_every_section_runs() -> None:
    arguments = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick"]
    done = subprocess.run(arguments, cwd=ROOT, env=environment(), capture_output=True, text=True, check=True)
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["device"] == "cpu"
    assert report["figures"].keys() == SECTIONS.keys()
    assert [name for name, figures in report["figures"].items() if "failed" in figures] == []
    assert report["figures"]["losses"]["bce own"] == {"of_cpu": 0.0, "again": 0.0}


def test_a_batch_has_each_label_once_a_query() -> None:
    batch = random_batch(7, 1000, 3, tokens=4, vocabulary=50)
    positives = batch.positives.reshape(7, POSITIVES)
    for own, hard in zip(positives, batch.hard, strict=True):
        assert len({*own, *hard}) == POSITIVES + HARD
        assert (own[1:] > own[:-1]).all()
    candidates = plan(batch, 1000, "own", CPU)
    assert isinstance(candidates, Candidates)
    assert candidates.pair_positive.sum() == 7 * POSITIVES
