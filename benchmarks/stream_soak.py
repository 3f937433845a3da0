"""The stream under kill -9, a failing network and changing tables: every batch equals a batch of an undisturbed run.

Ranks under `torchrun` read the joined stream from a local S3 server, through a proxy that refuses, loses, resets, drops
and delays requests. A new negatives table is published every minute, followed by half of another table. At each epoch
rank 0 chooses a table for all ranks. At random moments a rank, one of its DataLoader workers or all processes are
killed with SIGKILL and started again, with two workers per rank or none. Afterwards the same epochs are read from a
local disk with the same choices, and compared batch by batch.

    python -m benchmarks.stream_soak [--quick] [--minutes M] [--kills K] [--ranks G]
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import boto3
import fsspec
import psutil

from benchmarks.common.report import report
from schemas import storage
from schemas.layout import RunLayout, shard_name
from schemas.manifest import open_manifest
from schemas.storage import join
from tests.builders import SmallData, build_data, build_negatives
from tests.faults import Faults, Proxy, proxy
from tests.rank import Reading, batches_of, read
from tests.s3 import serve
from trainer.stream import Ranks

ROOT = Path(__file__).parents[1]
BUCKET = "soak"
SHAPE: dict[str, Any] = {
    "rows": {"train": 6000},
    "labels": 400,
    "shards": 6,
    "row_group_rows": 128,
    "label_group_rows": 64,
}
WIDTH = 8
FAULT_SHARE = 0.02
START_SECONDS = 120  # wait until started ranks have read a batch
END_SECONDS = 300  # wait until ranks that were told to end have ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="half a minute, two kills")
    parser.add_argument("--minutes", type=float, help="how long batches are read (30)")
    parser.add_argument("--kills", type=int, help="how often something is killed (20)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the faults and of the moments to kill")
    options = parser.parse_args()
    minutes = options.minutes or (0.5 if options.quick else 30)
    kills = (2 if options.quick else 20) if options.kills is None else options.kills
    holds = soak(minutes, kills, options.ranks, options.seed)["holds"]
    sys.exit(0 if holds else 1)


def soak(minutes: float, kills: int, ranks: int, seed: int = 0) -> dict:
    """Run disturbed, read undisturbed, compare, and print the report."""
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        with store(folder, seed) as between:
            build_data(f"s3://{BUCKET}/data", **SHAPE)
            between.faults = Faults(FAULT_SHARE, seed)
            soaked = Soak(folder, ranks, random.Random(seed))
            soaked.disturb(minutes * 60, kills)
            faults, between.faults = between.faults, Faults()
            local = undisturbed(folder, soaked)
            leaks = leaks_of(soaked, shared)
            sockets = sum(map(is_socket, soaked.scratch.iterdir()))
            tables = adopted(soaked)
        records = [batches_of(soaked.out, rank) for rank in range(ranks)]
        expected = [batches_of(local, rank)[0] for rank in range(ranks)]
    same = sum(
        digest == batches.get(position)
        for (batches, _), undisturbed_batches in zip(records, expected, strict=True)
        for position, digest in undisturbed_batches.items()
    )
    total = sum(map(len, expected))
    return report(
        "ranks killed at random moments read, batch for batch, what an undisturbed run reads",
        {
            "minutes": minutes,
            "ranks": ranks,
            "epochs": soaked.epochs,
            "batches": total,
            "batches not of the undisturbed run": sum(len(batches) for batches, _ in records) - same,
            "batches read again after a kill, to the same bytes": sum(again for _, again in records),
            "killed": dict(soaked.killed),
            "started with": dict(soaked.workers),
            "tables published": soaked.published,
            "tables adopted": tables,
            "requests": faults.requests,
            "faults": dict(faults.done),
            "leaks": leaks,
            "sockets of killed workers, left by multiprocessing": sockets,
        },
        {
            "batches equal": same / max(total, *[len(batches) for batches, _ in records], 1) if total else 0.0,
            "kills": sum(soaked.killed.values()),
            "tables adopted": tables,
            "leaks": sum(map(len, leaks.values())),
        },
        {"batches equal": 1.0, "kills": kills, "tables adopted": min(2, soaked.published), "leaks": "<1"},
    )


@contextmanager
def store(folder: Path, seed: int, server: str = "moto") -> Iterator[Proxy]:
    """Yield the proxy of a bucket of a `server`; environment variables lead this process and its children to it."""
    credentials = {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # botocore's own retries would hide the number of our retries
    }
    with serve(folder / f"{server}.log", server) as port, proxy(("127.0.0.1", port)) as between:
        os.environ.update(credentials, AWS_ENDPOINT_URL=between.url)
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield between


@dataclass
class Soak:
    """The disturbed run with its processes, tables and kills."""

    folder: Path
    ranks: int
    draw: random.Random
    killed: Counter[str] = field(default_factory=Counter)
    workers: Counter[str] = field(default_factory=Counter)
    published: int = 0
    epochs: int = 0
    orphans: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.out, self.scratch = self.folder / "out", self.folder / "scratch"
        self.out.mkdir()
        self.scratch.mkdir()
        self.reading = Reading(f"s3://{BUCKET}/data", f"s3://{BUCKET}/run", str(self.out), pause=0.01, save_every=20)
        self.run = RunLayout(self.reading.run)
        self._stop = threading.Event()

    def disturb(self, seconds: float, kills: int) -> None:
        """Read for `seconds` with `kills` kills, and stop at the end of an epoch."""
        data = build_data(str(self.folder / "data"), **SHAPE)
        process = self.start()
        publisher = threading.Thread(target=self.publish, args=(data, min(60.0, seconds / 5)))
        publisher.start()
        try:
            began = time.monotonic()
            for number in range(kills):
                # One kill per slot at a random moment: while reading, waiting for a decision, or starting again.
                sleep_until(began + (number + self.draw.random()) * seconds / kills)
                self.kill(process)
                process = self.start()
            sleep_until(began + seconds)
        finally:
            self._stop.set()
            publisher.join()
        self.epochs = self.epoch + 2  # a rank may already be in the epoch after its last record
        storage.write_bytes(str(self.out / "epochs"), str(self.epochs).encode())
        status = process.wait(END_SECONDS)
        self.require(status == 0, f"torchrun ended with {status}")

    def start(self) -> subprocess.Popen:
        """Start the ranks; return once each rank has read a batch."""
        before = self.sizes()
        workers = self.draw.choice([0, 2])
        place = replace(self.reading, workers=workers).write(self.folder / "reading.json")
        self.workers[f"{workers} workers"] += 1
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        environment = {**os.environ, "TMPDIR": str(self.scratch), "OMP_NUM_THREADS": "1"}
        with (self.folder / "ranks.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, f"--log-dir={self.folder / 'logs'}", "-m", "tests.rank", place],
                cwd=ROOT,
                env=environment,
                stdout=log,
                stderr=log,
            )
        limit = time.monotonic() + START_SECONDS
        while any(size == old for size, old in zip(self.sizes(), before, strict=True)):
            self.require(process.poll() is None, "the ranks ended")
            self.require(time.monotonic() < limit, "the ranks read nothing")
            time.sleep(0.1)
        return process

    def kill(self, process: subprocess.Popen) -> None:
        """Send SIGKILL to a rank or a worker (torchrun then ends the others), or to all processes at once."""
        launcher = psutil.Process(process.pid)
        ranks = launcher.children()
        workers = [target for rank in ranks for target in rank.children(recursive=True)]
        every = [*workers, *ranks, launcher]
        victim = self.draw.choice(["a rank", "everything", *(["a worker"] if workers else [])])
        targets = every if victim == "everything" else [self.draw.choice(ranks if victim == "a rank" else workers)]
        for target in targets:
            target.send_signal(signal.SIGKILL)
        process.wait(END_SECONDS)
        _, left = psutil.wait_procs(every, timeout=30)
        for target in left:
            self.orphans.append(f"process {' '.join(target.cmdline())}")
            target.kill()
        self.killed[victim] += 1
        sys.stderr.write(f"killed {victim} in epoch {self.epoch}\n")

    def publish(self, data: SmallData, seconds: float) -> None:
        """Publish a table for the next epoch every `seconds` seconds, and then half of another table."""
        last = 0
        while not self._stop.is_set():
            last = max(last, self.epoch) + 1
            for name in ("labels", "queries"):
                table = data.layout.labels if name == "labels" else data.layout.queries("train")
                points = data.label_points if name == "labels" else data.points["train"]
                url = self.run.negatives(last, name)
                build_negatives(url, open_manifest(table), points.positives, data.labels, WIDTH, seed=last)
                half = join(self.run.negatives(last + 1, name), shard_name(0, 6))
                storage.write_bytes(half, b"the miner was killed here")
            self.published += 1
            self._stop.wait(seconds)

    @property
    def epoch(self) -> int:
        """Return the newest epoch of which a rank has read a batch."""
        records = [self.out / f"rank-{rank}.batches" for rank in range(self.ranks)]
        lines = [last_line(place) for place in records if place.exists()]
        return max((int(line.split()[0]) for line in lines if line), default=0)

    def sizes(self) -> list[int]:
        records = [self.out / f"rank-{rank}.batches" for rank in range(self.ranks)]
        return [place.stat().st_size if place.exists() else 0 for place in records]

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            log = (self.folder / "ranks.log").read_text(errors="replace")
            raise SystemExit(f"soak: {message}. The end of what the ranks said:\n{log[-4000:]}")


def undisturbed(folder: Path, soaked: Soak) -> Path:
    """Read the same epochs from a local disk in this process, with the same choices of tables; return the record."""
    run, out = folder / "run", folder / "undisturbed"
    out.mkdir()
    (out / "epochs").write_text(str(soaked.epochs))
    filesystem = fsspec.filesystem("s3")
    filesystem.invalidate_cache()
    for name in ("adoptions", "negatives"):
        filesystem.get(f"{BUCKET}/run/{name}/", f"{run / name}/", recursive=True)
    reading = replace(soaked.reading, data=str(folder / "data"), run=str(run), out=str(out), pause=0.0)
    for rank in range(soaked.ranks):
        read(reading, Ranks(rank, soaked.ranks))
    return out


def adopted(soaked: Soak) -> int:
    """Return the number of tables used for training."""
    names = storage.list_names(soaked.run.adoptions)
    decisions = [json.loads(storage.read_bytes(join(soaked.run.adoptions, name))) for name in names]
    return len({decision["table_epoch"] for decision in decisions} - {None})


def leaks_of(soaked: Soak, shared: set[str]) -> dict[str, list[str]]:
    """List leftovers by kind."""
    filesystem = fsspec.filesystem("s3")
    stored = [str(key) for key in filesystem.find(BUCKET) if storage.TEMPORARY in key]
    local = [str(place.relative_to(soaked.folder)) for place in soaked.out.rglob(f"{storage.TEMPORARY}*")]
    scratch = [str(place.relative_to(soaked.folder)) for place in soaked.scratch.iterdir() if not is_socket(place)]
    segments = [name for name in sorted(set(os.listdir("/dev/shm")) - shared) if not in_use(f"/dev/shm/{name}")]
    threads: list[str] = []
    for rank in range(soaked.ranks):
        first: dict[int, dict] = {}
        for line in (soaked.out / f"rank-{rank}.health").read_text().splitlines():
            latest = json.loads(line)
            earliest = first.setdefault(latest["pid"], latest)
            more = {name: latest[name] - earliest[name] for name in ("threads", "files", "processes")}
            if latest["stream_threads"] or more["threads"] > 1 or more["files"] > 16 or more["processes"] > 0:
                threads.append(f"rank {rank}: {latest}, at first {earliest}")
    return {
        "files": [*stored, *local, *scratch],
        "shared memory": segments,
        "threads, open files and processes of a rank": threads,
        "processes that outlived theirs": soaked.orphans,
    }


def is_socket(place: Path) -> bool:
    """Return whether `place` is the folder of a multiprocessing socket, which a killed worker leaves behind."""
    return place.name.startswith("pymp-") and all(file.is_socket() for file in place.iterdir())


def in_use(place: str) -> bool:
    """Return whether any process has `place` open or mapped, because other programs may run on this machine."""
    for process in psutil.process_iter():
        try:
            if any(place in mapping.path for mapping in process.memory_maps()):
                return True
            if any(os.readlink(fd) == place for fd in Path(f"/proc/{process.pid}/fd").iterdir()):
                return True
        except (psutil.Error, OSError):
            continue
    return False


def last_line(place: Path) -> str:
    """Return the last complete line of a growing file; "" if there is none yet."""
    with place.open("rb") as file:
        file.seek(max(0, place.stat().st_size - 256))
        lines = file.read().decode().split("\n")[:-1]
    return lines[-1] if lines else ""


def sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


if __name__ == "__main__":
    main()
