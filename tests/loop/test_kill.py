"""A run that is killed at random moments and resumed is the run that was never stopped (to the bit)."""

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from schemas.layout import RunLayout
from schemas.manifest import Manifest, open_manifest
from schemas.storage import list_names
from schemas.table import Table
from tests.command import MINED, MINED_EPOCHS, ROOT, call, command, environment, extremis, refused, sets
from tests.processes import wait_until_gone
from trainer.recipe_files import load_config

CHOICES = sets(*MINED)


def records(run: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock measured."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    timed = ("seconds", "rows_per_second")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]


def tables(run: Path) -> dict[str, str]:
    """Return the digest of each dump and negative table, with its shards verified."""
    digests = {}
    for place in sorted([*run.glob("dumps/*/*/_manifest.json"), *run.glob("negatives/*/*/_manifest.json")]):
        url = str(place.parent)
        manifest = open_manifest(url)
        Table(url, manifest).verify()
        digests[str(place.parent.relative_to(run))] = manifest.digest
    return digests


def last_checkpoint(run: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Return the newest checkpoint's manifest, and its tensors' bytes by file and name."""
    folder = max((run / "checkpoints").glob("step-*"))
    tensors = {
        f"{path.name}/{name}": tensor.tobytes()
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return open_manifest(str(folder), "checkpoint"), tensors


def wait_for_step(trainer: subprocess.Popen, run: Path, step: int) -> None:
    """Until metrics.jsonl shows that `step` was done."""
    limit = time.monotonic() + 120
    while trainer.poll() is None:
        assert time.monotonic() < limit, f"step {step} was not reached"
        try:
            if any(f'"step": {step},' in line for line in (run / "metrics.jsonl").read_text().splitlines()):
                return
        except FileNotFoundError:
            pass
        time.sleep(0.005)


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "seed", "kills"), [("trainer and miner", 1, 3), ("trainer only", 2, 2)])
def test_killed_at_random_moments_and_resumed(
    data: Path, mined: Path, tmp_path: Path, victim: str, seed: int, kills: int
) -> None:
    draw = random.Random(seed)
    total = max(record["step"] for record in records(mined))
    run = tmp_path / "run"
    # Anywhere in the run, and a while later: the trainer may be in a step, writing, or waiting for a table.
    moments = [(step, draw.choice([0.0, draw.uniform(0, 1.5)])) for step in sorted(draw.sample(range(1, total), kills))]
    killed = 0
    for step, delay in moments:
        trainer = subprocess.Popen(
            command("run", "astra", data, run, *CHOICES, "--resume"),
            env=environment(),
            cwd=ROOT,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_for_step(trainer, run, step)
        time.sleep(delay)
        if victim == "trainer only":
            trainer.send_signal(signal.SIGKILL)
        else:
            os.killpg(trainer.pid, signal.SIGKILL)
        killed += trainer.wait() == -signal.SIGKILL
        wait_until_gone(trainer.pid)
    assert killed >= kills - 1, f"the run was over before the moments {moments}"
    extremis("run", "astra", data, run, *CHOICES, "--resume")
    context = f"seed {seed}, killed after {moments}"
    assert records(run) == records(mined), context
    assert tables(run) == tables(mined), context
    assert last_checkpoint(run) == last_checkpoint(mined), context


def test_there_is_something_to_compare(mined: Path) -> None:
    losses = [record["loss"] for record in records(mined) if record["kind"] == "train"]
    steps = [record["step"] for record in records(mined) if record["kind"] == "train"]
    assert steps == list(range(1, len(steps) + 1))
    assert len(set(losses)) > 100
    assert losses[-1] < losses[0]
    assert [record["late"] for record in records(mined) if record["kind"] == "adoption"] == [False] * MINED_EPOCHS
    names = ["queries", "labels", "vectors"]
    dumps = {f"dumps/epoch-{epoch:04d}/{name}" for epoch in (0, 1, 2) for name in names}
    assert set(tables(mined)) == dumps | {f"negatives/epoch-{e:04d}/{name}" for e in (2, 3, 4) for name in names[:2]}
    assert list_names(RunLayout(str(mined)).negatives(2, "queries"))[0] == "_manifest.json"


class TestRefusals:
    @pytest.fixture
    def run(self, mined: Path, tmp_path: Path) -> Path:
        return shutil.copytree(mined, tmp_path / "run")

    def test_another_recipe(self, data: Path, run: Path) -> None:
        done = call("run", "astra", data, run, *CHOICES, "--set", "encoder.lr=0.5", "--resume")
        refused(
            done,
            str(run),
            "another recipe",
            f"encoder.lr was {load_config(str(run / 'config.toml'))['recipe']['encoder']['lr']}, now 0.5",
            "choose another RUN",
        )

    def test_other_data(self, raw: Path, run: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        assert call("shard", raw, other, "--tokenizer", "train:1000", "--seed", "1").status == 0
        done = call("run", "astra", other, run, *CHOICES, "--resume")
        refused(done, str(run), "trained on different data", str(other), "choose another RUN")

    @pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "manifest"])
    def test_a_damaged_newest_checkpoint(self, data: Path, run: Path, damage: str) -> None:
        newest = max((run / "checkpoints").iterdir())
        file = newest / ("_manifest.json" if damage == "manifest" else "encoder.safetensors")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        if damage == "gone":
            file.unlink()
        else:
            file.write_bytes(content[:-9] if damage == "cut" else content)
        done = call("run", "astra", data, run, *CHOICES, "--resume")
        refused(done, newest.name, "Remove")

    def test_without_it_the_run_goes_on_from_the_one_before(self, data: Path, mined: Path, run: Path) -> None:
        shutil.rmtree(max((run / "checkpoints").iterdir()))
        (run / "finished.json").unlink()
        assert call("train", "astra", data, run, *CHOICES, "--resume").status == 0
        assert last_checkpoint(run) == last_checkpoint(mined)

    def test_a_table_that_was_trained_on_is_gone(self, data: Path, run: Path) -> None:
        newest = max((run / "checkpoints").iterdir())
        shutil.rmtree(newest)
        (run / "negatives" / f"epoch-{MINED_EPOCHS - 1:04d}" / "queries" / "_manifest.json").unlink()
        refused(call("train", "astra", data, run, *CHOICES, "--resume"), "negatives/epoch-0004/queries", "unfinished")
