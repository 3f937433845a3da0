"""The whole loop with kills, rivals and faults: every artifact equals the artifact of an undisturbed loop.

A loop shards, runs with a miner, evaluates, fuses, exports and predicts, in turns on a local S3 server behind a proxy
that refuses, loses, resets, drops and delays requests, and on a small disk. At random moments SIGKILL hits a process
(the command, its miner, a worker of a pipeline, or all of them), or the command gets SIGTERM or SIGHUP, is paused for
longer than a lease while another process takes over, loses the reader of its log, or gets a rival with the same
command, perhaps with --overwrite; ended commands are restarted. Processes have different clocks, up to 20 minutes
apart, scratch files in memory or on a disk that fills and empties, and 1 MB of shared memory. At the end all objects
are compared with the objects of an undisturbed loop. With --clean, `extremis clean` runs all the time, and is killed
too; at the end it runs once in each loop, and the bytes of a loop are recorded over time. Mounts are in a separate
namespace; if namespaces are not allowed, there are no disks.

    python -m benchmarks.chaos [--quick] [--minutes M] [--seed S] [--server versitygw] [--clean] [--epochs E]
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fsspec
import psutil

from benchmarks.common.report import report
from benchmarks.stream_soak import ROOT, store
from schemas.owners import LEASE_SECONDS
from tests.command import command, environment, sets
from tests.faults import Faults, paused
from tests.pipelines.raw import write_tate

BUCKET = "soak"  # the bucket of `store`
FAULT_SHARE = 0.01
TRIES = 40  # attempts of a command until it succeeds
COMMAND_SECONDS = 1800.0
PAUSE_SECONDS = LEASE_SECONDS + 6
DISTURBANCES = {
    "kill all": 4,
    "kill the command": 4,
    "kill a child": 4,
    "terminate": 2,
    "hang up": 2,
    "pause, and another takes over": 1,
    "close the log": 2,
    "rival": 2,
    "rival with --overwrite": 2,
}
CONDITIONS = {
    "clocks apart": 0.5,
    "scratch in memory": 0.2,
    "scratch on a disk that fills": 0.2,
    "little shared memory": 0.2,
}
OVERWRITES = ("shard", "export")  # commands with the option
SIGNALS = {"terminate": signal.SIGTERM, "hang up": signal.SIGHUP}
NAMESPACE = "CHAOS_NAMESPACE"  # environment variable: words that give a command its own mounts
DISK_BYTES = 64 << 20
SILENT_SECONDS = 60  # longest silence allowed in a log
CLOCKS = """
import os, time
shift = os.getpid() * 7919 % 2401 - 1200
seconds, nanoseconds = time.time, time.time_ns
time.time, time.time_ns = lambda: seconds() + shift, lambda: nanoseconds() + shift * 10**9
"""  # a `sitecustomize`: error of a process's clock in seconds
CHOICES = sets(
    "order.batch=128",
    "refresh.source=table",
    "refresh.every=1",
    "refresh.stale=wait",  # no table is late, so that every run trains on the same tables
    "checkpoint.every_steps=5",
    "checkpoint.keep=1",
    "logging.tensorboard=false",
)
TIME_PREFIXES = ("seconds", "rows_per_second")  # prefixes of the names of measured times
NOT_COMPARED = ("spent.json", "commands.json", "run.log")  # times and durations of work, and command lines
TOLD = (2, 3, 5, 6, 143)  # statuses of a writer without room, without storage, or beside another, and of a stop
TEMPORARY_NAMES = (".claim", ".staging", ".tmp-", ".parts", ".candidates")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one loop, some three minutes")
    parser.add_argument("--minutes", type=float, help="how long loops are begun (30)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults and of the moments")
    parser.add_argument("--server", choices=["moto", "versitygw"], default="moto", help="what speaks S3")
    parser.add_argument("--clean", action="store_true", help="remove all the time what nobody needs")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of the run")
    options = parser.parse_args()
    if NAMESPACE not in os.environ:
        os.environ[NAMESPACE] = words = "unshare -m" if os.geteuid() == 0 else "unshare -rm"
        if subprocess.run([*words.split(), "true"], capture_output=True, check=False).returncode == 0:
            os.execvp("unshare", [*words.split(), *sys.orig_argv])
        os.environ[NAMESPACE] = ""
    minutes = options.minutes or (0.5 if options.quick else 30)
    sys.exit(0 if chaos(minutes, options)["holds"] else 1)


def chaos(minutes: float, options: argparse.Namespace) -> dict:
    """Run one undisturbed loop, then disturbed loops for `minutes`; compare and report."""
    seed, storage = options.seed, dict[str, list[tuple[int, int]]]()
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-"))
        between = stack.enter_context(store(Path(name), seed, options.server))
        raw, draw = write_tate(Path(name) / "raw", 1500, 200), random.Random(seed)
        machine = stack.enter_context(contextlib.closing(UnreliableMachine(Path(name) / "machine", draw)))
        undisturbed = Loop(raw, f"s3://{BUCKET}/undisturbed", machine, options.epochs)
        with undisturbed.weighed() as storage["undisturbed, nothing removed"]:
            for step in undisturbed.steps():
                undisturbed.run(step)
        if options.clean:
            undisturbed.run(undisturbed.cleaning)
        expected = artifacts(undisturbed.place)
        began, counts = time.monotonic(), Counter[str]()
        differences, leftovers, wrong = list[str](), list[str](), list[str]()
        loops, requests, longest, silence = 0, 0, 0.0, 0.0
        while loops == 0 or time.monotonic() - began < 60 * minutes:
            local = machine.mounts and (loops + seed) % 2
            loop = Loop(raw, f"{machine.disk if local else f's3://{BUCKET}'}/loop-{loops}", machine, options.epochs)
            between.faults = faults = Faults(FAULT_SHARE, seed + loops)
            with loop.weighed() as weights, loop.cleaned() if options.clean else contextlib.nullcontext():
                for step in loop.steps():
                    loop.disturb(step)
            between.faults = Faults()
            if options.clean:
                storage[f"loop {loops}"] = weights
                loop.run(loop.cleaning)
            made = artifacts(loop.place)
            differing_now = differing(expected, made)
            differences += differing_now
            leftovers += [key for key in made if any(mark in key for mark in TEMPORARY_NAMES)]
            counts.update(loop.counts)
            counts.update({f"fault: {kind}": count for kind, count in faults.done.items()})
            wrong += loop.wrong
            loops, requests = loops + 1, requests + faults.requests
            longest, silence = max(longest, loop.longest), max(silence, loop.silence)
            place = "on the disk" if local else "on S3"
            sys.stderr.write(f"loop {loops}, {place}: {dict(loop.counts)}, {len(differences)} differences\n")
            sys.stderr.writelines(f"{line}\n" for line in differing_now)
            filesystem, path = fsspec.core.url_to_fs(loop.place)
            filesystem.rm(path, recursive=True)
            for left in machine.disk.iterdir():  # scratch files of killed processes
                shutil.rmtree(left, ignore_errors=True)
    for line in [*leftovers, *wrong]:
        sys.stderr.write(f"{line}\n")
    disturbances = {kind: counts[kind] for kind in (*DISTURBANCES, *CONDITIONS)}
    return report(
        "a loop whose processes are killed, paused and doubled in bad weather makes what an undisturbed one makes",
        {
            "minutes": round((time.monotonic() - began) / 60, 1),
            "loops": loops,
            "disturbances": disturbances,
            "commands started again": counts["started again"],
            "commands without room": counts["without room"],
            "seconds in the longest command": round(longest),
            "seconds of the longest silence": round(silence, 1),
            "artifacts compared": loops * len(expected),
            "requests": requests,
            **({"cleaners": counts["cleaner"], "storage, bytes by second": storage} if options.clean else {}),
            "faults": {kind.removeprefix("fault: "): counts[kind] for kind in counts if kind.startswith("fault: ")},
        },
        {
            "differences": len(differences),
            "leftovers": len(leftovers),
            "wrong ends": len(wrong),
            "silence": silence,
            "disturbances": sum(disturbances.values()),
        },
        {
            "differences": "<1",
            "leftovers": "<1",
            "wrong ends": "<1",
            "silence": f"<{SILENT_SECONDS}",
            "disturbances": 1,
        },
    )


class UnreliableMachine:
    """Environment of commands, in `folder`: a small disk, a wrong clock, and other random conditions per command."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        self.draw, self.disk, self.mounts = draw, folder / "disk", os.environ.get(NAMESPACE, "").split()
        self._clocks, self._scratch = folder / "clocks", folder / "scratch"
        for place in (self.disk, self._clocks, self._scratch):
            place.mkdir(parents=True)
        (self._clocks / "sitecustomize.py").write_text(CLOCKS)
        if self.mounts:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", self.disk], check=True)

    def close(self) -> None:
        """Unmount the disk."""
        if self.mounts:
            subprocess.run(["umount", "-l", self.disk], check=True)

    def draw_conditions(self) -> list[str]:
        """Draw the conditions of one process."""
        kinds = [kind for kind, share in CONDITIONS.items() if self.draw.random() < share]
        return kinds if self.mounts else [kind for kind in kinds if kind == "clocks apart"]

    def start(self, step: list[str], conditions: list[str]) -> "Command":
        """Start a command under these conditions."""
        more, mounts = dict[str, str](), list[str]()
        if "clocks apart" in conditions:
            more["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self._clocks), os.environ.get("PYTHONPATH"))))
        if "scratch in memory" in conditions:
            mounts.append(f"mount -t tmpfs -o size=256m tmpfs {self._scratch}")
            more["TMPDIR"] = str(self._scratch)
        if "scratch on a disk that fills" in conditions:
            more["TMPDIR"] = str(self.disk)
        if "little shared memory" in conditions:
            mounts.append("mount -t tmpfs -o size=1m tmpfs /dev/shm")
        within = [*self.mounts, "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"] if mounts else []
        return Command([*within, *command(*step)], more)

    @contextlib.contextmanager
    def filling(self) -> Iterator[None]:
        """Fill and empty the disk repeatedly until the block ends."""
        over, filler = threading.Event(), self.disk / "filler"

        def fill() -> None:
            while self.mounts and not over.wait(draw.uniform(1, 8)):
                with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                    while True:
                        file.write(bytes(1 << 16))
                over.wait(draw.uniform(0.2, 4))
                filler.unlink()

        draw = random.Random(self.draw.random())
        with _beside(fill, over):
            yield


class Command:
    """A process of a command. Its log is read continuously into `said`; `silence`: longest silence in seconds."""

    def __init__(self, words: list[str], more: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            words, env=environment(more), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        self.said, self.silence, self.is_paused, self.is_reading_stopped = "", 0.0, False, False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def end(self) -> int:
        """Wait for the process and all holders of its log; return the status. Raises subprocess.TimeoutExpired."""
        status = self.process.wait(COMMAND_SECONDS)
        self._reader.join(COMMAND_SECONDS)
        return status

    def _read(self) -> None:
        log, heard, content = self.process.stderr, time.monotonic(), b""
        assert log is not None
        while not self.is_reading_stopped:
            if select.select([log], [], [], 0.1)[0]:
                chunk = os.read(log.fileno(), 1 << 16)
                if not chunk:
                    break
                content += chunk
                self.said, heard = content.decode(errors="replace"), time.monotonic()
            if self.is_paused or self.process.poll() is not None:
                heard = time.monotonic()
            self.silence = max(self.silence, time.monotonic() - heard)
        log.close()


@dataclass
class Loop:
    """One loop below `place`: its commands in order, and their outcomes."""

    raw: Path
    place: str
    machine: UnreliableMachine
    epochs: int
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest: float = 0.0  # seconds per command
    silence: float = 0.0

    def steps(self) -> list[list[str]]:
        """Return the commands, in order."""
        data, run, exported = (f"{self.place}/{name}" for name in ("data", "run", "export"))
        shard = ["--tokenizer", "train:1000", "--row-group-rows", "64", "--propensity", "0.55,1.5"]
        return [
            ["shard", str(self.raw), data, *shard, "--validation", "0.1"],
            ["run", "astra", data, run, *CHOICES, *sets(f"train.epochs={self.epochs}"), "--resume"],
            ["evaluate", data, run],
            ["fuse", data, run, "--queries", "100"],
            ["export", data, run, exported],
            ["predict", exported, "--data", data, f"{self.place}/predictions.jsonl", "--overwrite"],
        ]

    @property
    def cleaning(self) -> list[str]:
        """The command that removes what nobody needs."""
        return ["clean", self.place, "--older-than", "0"]

    @contextlib.contextmanager
    def cleaned(self) -> Iterator[None]:
        """Clean the loop's place all the time until the block ends; every fifth cleaner is killed."""
        over, draw = threading.Event(), random.Random(self.machine.draw.random())

        def clean() -> None:
            while not over.is_set():
                cleaner = self.machine.start(self.cleaning, [])
                if draw.random() < 0.2:
                    over.wait(draw.uniform(2, 10))
                    cleaner.process.kill()
                if self._end(self.cleaning, cleaner) == 0:
                    self.counts["cleaner"] += 1

        with _beside(clean, over):
            yield

    @contextlib.contextmanager
    def weighed(self) -> Iterator[list[tuple[int, int]]]:
        """Record (second, bytes below the loop's place) after each change until the block ends."""
        over, began, weights = threading.Event(), time.monotonic(), [(0, 0)]

        def weigh() -> None:
            filesystem, path = fsspec.core.url_to_fs(self.place)
            while not over.wait(1):
                with contextlib.suppress(Exception):  # a fault
                    filesystem.invalidate_cache()
                    size = filesystem.du(path)
                    if abs(size - weights[-1][1]) > 0.02 * size:
                        weights.append((round(time.monotonic() - began), size))

        with _beside(weigh, over):
            yield weights

    def run(self, step: list[str]) -> None:
        """Run a command to its end; it must succeed."""
        undisturbed = self.machine.start(step, [])
        if status := undisturbed.end():
            raise SystemExit(f"chaos: {step[0]} ended with {status}, undisturbed:\n{undisturbed.said}")

    def disturb(self, step: list[str]) -> None:
        """Run a command, disturb it from time to time, and restart it until it succeeds."""
        for number in range(TRIES):
            began = time.monotonic()
            # The first attempt is always disturbed, later attempts less and less often.
            if self.machine.draw.random() < 0.9**number:
                with self.machine.filling():
                    rivals = [self._start(step)]
                    self._apply_disturbance(step, rivals)
                    statuses = [self._end(step, rival) for rival in rivals]
            else:
                statuses = [self._end(step, self.machine.start(step, []))]
            self.longest = max(self.longest, time.monotonic() - began)
            if 0 in statuses:
                return
            self.counts["started again"] += 1
        raise SystemExit(f"chaos: {step[0]} did not end well in {TRIES} tries")

    def _start(self, step: list[str]) -> Command:
        conditions = self.machine.draw_conditions()
        self.counts.update(conditions)
        return self.machine.start(step, conditions)

    def _apply_disturbance(self, step: list[str], rivals: list[Command]) -> None:
        """Disturb the command at a random moment; a second process of the same command is added to `rivals`."""
        draw, first = self.machine.draw, rivals[0]
        seconds = {"run": 40.0, "shard": 14.0}.get(step[0], 8.0)
        until = time.monotonic() + draw.uniform(0.3, seconds)
        kind = draw.choices(list(DISTURBANCES), list(DISTURBANCES.values()))[0]
        if kind.startswith("rival"):
            time.sleep(draw.uniform(0, 2))
            if step[0] not in OVERWRITES:
                kind = "rival"
            rivals.append(self._start([*step, "--overwrite"] if kind.endswith("--overwrite") else step))
            self.counts[kind] += 1
            return
        while time.monotonic() < until:
            if first.process.poll() is not None:
                return
            time.sleep(0.05)
        try:
            process = psutil.Process(first.process.pid)
            family = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        if kind == "kill a child" and len(family) == 1:
            kind = "kill the command"
        self.counts[kind] += 1
        if kind == "close the log":
            first.is_reading_stopped = True
            return
        if kind == "pause, and another takes over":
            first.is_paused = True
            with paused(process.pid):
                rivals.append(self._start(step))
                time.sleep(PAUSE_SECONDS)
            first.is_paused = False
            return
        targets = {"kill all": family, "kill a child": [draw.choice(family[1:] or family)]}.get(kind, family[:1])
        for target in targets:
            try:
                target.send_signal(SIGNALS.get(kind, signal.SIGKILL))
            except psutil.NoSuchProcess:
                continue

    def _end(self, step: list[str], rival: Command) -> int:
        """Wait for a command's end, and check that the end is allowed."""
        try:
            status = rival.end()
        except subprocess.TimeoutExpired:
            rival.process.kill()
            self.wrong.append(f"{step[0]}: no end within {COMMAND_SECONDS:g} seconds: {rival.said[-2000:]}")
            return -1
        self.silence = max(self.silence, rival.silence)
        if rival.silence >= SILENT_SECONDS:
            self.wrong.append(f"{step[0]} was silent for {rival.silence:.0f} seconds: {rival.said[-2000:]}")
        said = rival.said
        self.counts["without room"] += "No space left" in said
        is_told = status in TOLD and sum(line.startswith("error: ") for line in said.splitlines()) == 1
        if status == 2 and " are free" not in said:
            is_told = False
        is_told = is_told or (rival.is_reading_stopped and status in TOLD)
        ends = (0, -signal.SIGKILL, *(-number for number in SIGNALS.values()))
        if (status not in ends and not is_told) or "Traceback" in said:
            self.wrong.append(f"{step[0]} ended with {status}: {said[-2000:]}")
        return status


@contextlib.contextmanager
def _beside(work: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """Let a thread work until the block ends, which sets `over`."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def artifacts(place: str) -> dict[str, bytes]:
    """Return the contents below `place` by key, without measured times."""
    filesystem, prefix = fsspec.core.url_to_fs(place)
    filesystem.invalidate_cache()
    keys = [str(key) for key in filesystem.find(prefix)]
    contents = {key.removeprefix(f"{prefix}/"): filesystem.cat_file(key) for key in keys}
    return {key: without_times(key, content) for key, content in contents.items() if not key.endswith(NOT_COMPARED)}


def without_times(key: str, content: bytes) -> bytes:
    """Return the content of an artifact without measured times."""
    if not key.endswith("metrics.jsonl"):
        return content
    records: list[dict[str, Any]] = [json.loads(line) for line in content.splitlines()]
    kept = [{name: value for name, value in record.items() if not name.startswith(TIME_PREFIXES)} for record in records]
    return "\n".join(map(json.dumps, kept)).encode()


def differing(expected: dict[str, bytes], made: dict[str, bytes]) -> list[str]:
    """Name the artifacts that differ, are missing, or are extra."""
    return [
        f"{key}: {_difference(expected.get(key), made.get(key))}"
        for key in sorted({*expected, *made})
        if expected.get(key) != made.get(key)
    ]


def _difference(expected: bytes | None, made: bytes | None) -> str:
    """Describe the difference between two contents; for text, by the first line that differs."""
    if expected is None or made is None:
        return "missing" if made is None else "not expected"
    pairs = itertools.zip_longest(expected.splitlines(), made.splitlines())
    number, lines = next((number, lines) for number, lines in enumerate(pairs) if lines[0] != lines[1])
    was, is_now = (str(line)[:300] for line in lines)
    return f"differs from line {number + 1} on: {was} is now {is_now}"


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
