"""The whole loop under kills, pauses, rivals and a failing network: every artifact is that of an undisturbed loop.

Shard, run with a miner, evaluate, export and predict, on a local S3 server behind a proxy that refuses, loses,
resets, drops and delays requests. At random moments a process is killed with SIGKILL (the command, its miner, a worker
of a pipeline, or all of them), the command is told to end by SIGTERM, is paused for longer than a lease while another
one takes over, or gets a rival with the same command; whatever ended is started again. At the end all objects are
compared with those of one loop that nobody disturbed.

    python -m benchmarks.chaos [--quick] [--minutes M] [--seed S]
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import psutil

from benchmarks.common.report import report
from benchmarks.stream_soak import ROOT, store
from schemas.owners.claim import LEASE_SECONDS
from tests.command import command, environment, sets
from tests.faults import Faults, paused
from tests.pipelines.raw import write_tate

BUCKET = "soak"  # that of `store`
FAULT_SHARE = 0.01
TRIES = 40  # of a command, until it has ended well
COMMAND_SECONDS = 1800.0
PAUSE_SECONDS = LEASE_SECONDS + 6
DISTURBANCES = {
    "kill all": 4,
    "kill the command": 4,
    "kill a child": 4,
    "terminate": 2,
    "pause, and another takes over": 1,
    "rival": 2,
}
CHOICES = sets(
    "order.batch=128",
    "train.epochs=5",
    "refresh.source=table",
    "refresh.every=1",
    "refresh.stale=wait",  # so that no table is late, and every run trains on the same ones
    "checkpoint.every_steps=5",
    "checkpoint.keep=1",
    "logging.tensorboard=false",
)
TIMED = ("seconds", "rows_per_second")  # begin the names of what a clock measured
UNEQUAL = ("spent.json", "commands.json")  # what the miner's work took, and what was typed
OWNED = ("Let it finish", "no sign of life")  # what a second writer says, and one that was replaced
LEFTOVERS = (".claim", ".staging", ".tmp-", ".parts", ".candidates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one loop, some three minutes")
    parser.add_argument("--minutes", type=float, help="how long loops are begun (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and of the moments")
    options = parser.parse_args()
    minutes = options.minutes or (0.5 if options.quick else 30)
    sys.exit(0 if chaos(minutes, options.seed)["holds"] else 1)


def chaos(minutes: float, seed: int) -> dict:
    """Run one loop in peace, then disturbed ones for so many minutes; compare, report."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, store(Path(name), seed) as between:
        raw = write_tate(Path(name) / "raw", 1500, 200)
        calm = Loop(raw, f"s3://{BUCKET}/calm")
        for step in calm.steps():
            calm.run(step)
        expected = artifacts("calm")
        between.faults = Faults(FAULT_SHARE, seed)
        draw, began = random.Random(seed), time.monotonic()
        loops, differences, leftovers, totals = 0, list[str](), list[str](), Counter[str]()
        wrong: list[str] = []
        while loops == 0 or time.monotonic() - began < 60 * minutes:
            loop = Loop(raw, f"s3://{BUCKET}/loop-{loops}", draw)
            for step in loop.steps():
                loop.disturb(step)
            faults, between.faults = between.faults, Faults()
            made = artifacts(f"loop-{loops}")
            between.faults = faults
            differing_now = differing(expected, made)
            differences += differing_now
            leftovers += [key for key in made if any(mark in key for mark in LEFTOVERS)]
            totals += loop.counts
            wrong += loop.wrong
            loops += 1
            sys.stderr.write(f"loop {loops}: {dict(loop.counts)}, {len(differences)} differences\n")
            sys.stderr.writelines(f"{line}\n" for line in differing_now)
            fsspec.filesystem("s3").rm(f"{BUCKET}/loop-{loops - 1}", recursive=True)
        faults = between.faults
    for line in [*leftovers, *wrong]:
        sys.stderr.write(f"{line}\n")
    kills = sum(totals[kind] for kind in DISTURBANCES)
    return report(
        "a loop whose processes are killed, paused and doubled at random moments makes what an undisturbed one makes",
        {
            "minutes": round((time.monotonic() - began) / 60, 1),
            "loops": loops,
            "disturbances": {kind: totals[kind] for kind in DISTURBANCES},
            "commands started again": totals["started again"],
            "seconds in the longest command": totals["longest"],
            "artifacts compared": loops * len(expected),
            "requests": faults.requests,
            "faults": dict(faults.done),
        },
        {
            "differences": len(differences),
            "leftovers": len(leftovers),
            "wrong ends": len(wrong),
            "disturbances": kills,
        },
        {"differences": "<1", "leftovers": "<1", "wrong ends": "<1", "disturbances": 1},
    )


@dataclass
class Loop:
    """One loop below `place`: its commands in turn, and what became of them."""

    raw: Path
    place: str
    draw: random.Random = field(default_factory=random.Random)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def steps(self) -> list[list[str]]:
        """Return the commands, in order."""
        data, run, exported = (f"{self.place}/{name}" for name in ("data", "run", "export"))
        shard = ["--tokenizer", "train:1000", "--row-group-rows", "64", "--propensity", "0.55,1.5"]
        return [
            ["shard", str(self.raw), data, *shard, "--validation", "0.1"],
            ["run", "astra", data, run, *CHOICES, "--resume"],
            ["evaluate", data, run],
            ["fuse", data, run, "--queries", "100"],
            ["export", data, run, exported],
            ["predict", exported, "--data", data, f"{self.place}/predictions.jsonl"],
        ]

    def run(self, step: list[str]) -> float:
        """Run a command to its end, which has to be good; the seconds that it took."""
        began = time.monotonic()
        process = start(step)
        _, said = process.communicate(timeout=COMMAND_SECONDS)
        if process.returncode:
            raise SystemExit(f"chaos: {step[0]} ended with {process.returncode}, undisturbed:\n{said}")
        return time.monotonic() - began

    def disturb(self, step: list[str]) -> None:
        """Run a command, disturb it now and then, and start it again until it has ended well."""
        for number in range(TRIES):
            began = time.monotonic()
            rivals = [start(step)]
            # The first try is disturbed for certain, and later ones less and less.
            if self.draw.random() < 0.9**number:
                self._strike(step, rivals)
            statuses = [self._end(step, process) for process in rivals]
            self.counts["longest"] = max(self.counts["longest"], int(time.monotonic() - began))
            if 0 in statuses:
                return
            self.counts["started again"] += 1
        raise SystemExit(f"chaos: {step[0]} did not end well in {TRIES} tries")

    def _strike(self, step: list[str], rivals: list[subprocess.Popen]) -> None:
        """Disturb the command at a random moment; a second process of it is added to `rivals`."""
        seconds = {"run": 40.0, "shard": 14.0}.get(step[0], 8.0)
        until = time.monotonic() + self.draw.uniform(0.3, seconds)
        kind = self.draw.choices(list(DISTURBANCES), list(DISTURBANCES.values()))[0]
        process = rivals[0]
        if kind == "rival":
            time.sleep(self.draw.uniform(0, 2))
            rivals.append(start(step))
            self.counts[kind] += 1
            return
        while time.monotonic() < until:
            if process.poll() is not None:
                return
            time.sleep(0.05)
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        if kind == "kill a child" and len(family) == 1:
            kind = "kill the command"
        self.counts[kind] += 1
        if kind == "pause, and another takes over":
            with paused(process.pid):
                rivals.append(start(step))
                time.sleep(PAUSE_SECONDS)
            return
        targets = {"kill all": family, "kill a child": [self.draw.choice(family[1:] or family)]}.get(kind, family[:1])
        for target in targets:
            try:
                target.send_signal(signal.SIGTERM if kind == "terminate" else signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue

    def _end(self, step: list[str], process: subprocess.Popen) -> int:
        """Wait for a command's end, and look whether it ended as commands may."""
        try:
            _, said = process.communicate(timeout=COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            _, said = process.communicate()
            self.wrong.append(f"{step[0]}: no end within {COMMAND_SECONDS:g} seconds: {said[-2000:]}")
            return -1
        status = process.returncode
        is_told = status in (1, 2, 143) and sum(line.startswith("error: ") for line in said.splitlines()) == 1
        if status == 2 and not any(words in said for words in OWNED):
            is_told = False
        if (status not in (0, -signal.SIGKILL, -signal.SIGTERM) and not is_told) or "Traceback" in said:
            self.wrong.append(f"{step[0]} ended with {status}: {said[-2000:]}")
        return status


def start(step: list[str]) -> subprocess.Popen:
    """Start a command as a process of its own."""
    return subprocess.Popen(
        command(*step),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def artifacts(prefix: str) -> dict[str, bytes]:
    """Return what is below `prefix`, by key, without what a clock measured."""
    filesystem = fsspec.filesystem("s3")
    filesystem.invalidate_cache()
    keys = [str(key) for key in filesystem.find(f"{BUCKET}/{prefix}")]
    contents = {key.removeprefix(f"{BUCKET}/{prefix}/"): filesystem.cat_file(key) for key in keys}
    return {key: timeless(key, content) for key, content in contents.items() if not key.endswith(UNEQUAL)}


def timeless(key: str, content: bytes) -> bytes:
    """Return the content of an artifact without what a clock measured."""
    if key.endswith("fusion") or ("/fusion/" in key and key.endswith("manifest.json")):
        body = json.loads(content)
        body["parameters"].pop("memory_ms", None)
        return json.dumps({**body, "digest": ""}).encode()
    if not key.endswith("metrics.jsonl"):
        return content
    records: list[dict[str, Any]] = [json.loads(line) for line in content.splitlines()]
    kept = [{name: value for name, value in record.items() if not name.startswith(TIMED)} for record in records]
    return "\n".join(map(json.dumps, kept)).encode()


def differing(expected: dict[str, bytes], made: dict[str, bytes]) -> list[str]:
    """Name the artifacts that differ, are missing, or are there besides."""
    return [
        f"{key}: {_difference(expected.get(key), made.get(key))}"
        for key in sorted({*expected, *made})
        if expected.get(key) != made.get(key)
    ]


def _difference(expected: bytes | None, made: bytes | None) -> str:
    """Say how two contents differ: of text, by the first line that is another."""
    if expected is None or made is None:
        return "missing" if made is None else "not expected"
    pairs = itertools.zip_longest(expected.splitlines(), made.splitlines())
    number, lines = next((number, lines) for number, lines in enumerate(pairs) if lines[0] != lines[1])
    was, is_now = (str(line)[:300] for line in lines)
    return f"differs from line {number + 1} on: {was} is now {is_now}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
