"""Process of one rank that reads the joined stream under `torchrun`, records every batch, and resumes where it was.

    torchrun --nproc-per-node 2 -m tests.rank READING.json

Rank 0 decides which negatives an epoch trains on, the others follow. Each rank appends to its own record
`rank-0.batches` (where it starts; epoch, step and digest of each batch), and saves the stream's state in RUN every few
steps.
"""

import gc
import hashlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from torch.utils.data import DataLoader

from schemas import storage
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import open_manifest
from schemas.storage import join
from trainer.methods.recipe import Recipe
from trainer.refresh.adoption import adopt, follow
from trainer.stream import JoinedStream, Ranks, open_sources, ranks_of_environment

# A newer table is taken at every epoch from the second on.
RECIPE = Recipe.model_validate(
    {"negatives": {"hard": 2}, "refresh": {"start": 2, "every": 1}, "train": {"epochs": 100_000}}
)


@dataclass(frozen=True)
class Reading:
    """Settings of a reader, and where its records go.

    `out` is a folder; its file `epochs`, once it is there, says how many epochs are read. `kill`: (rank, epoch, step)
    at which that rank ends itself with SIGKILL.
    """

    data: str
    run: str
    out: str
    batch: int = 32
    streams: int = 4
    threads: int = 2
    workers: int = 0  # of a DataLoader
    save_every: int = 5
    pause: float = 0.0
    kill: tuple[int, int, int] | None = None

    def write(self, place: Path) -> Path:
        place.write_text(json.dumps(asdict(self)))
        return place

    @property
    def epochs(self) -> float:
        try:
            return int((Path(self.out) / "epochs").read_text())
        except FileNotFoundError:
            return float("inf")


def main() -> None:
    body = json.loads(Path(sys.argv[1]).read_text())
    reading = Reading(**{**body, "kill": body["kill"] and tuple(body["kill"])})
    read(reading, ranks_of_environment())


def read(reading: Reading, ranks: Ranks) -> None:
    """Read epochs until there are enough."""
    out, run, data = Path(reading.out), RunLayout(reading.run), DataLayout(reading.data)
    sources = open_sources(data, "train", label_texts=True)
    stream = JoinedStream(
        sources,
        open_manifest(data.labels, "labels").rows,
        batch=reading.batch,
        streams=reading.streams,
        window_groups=2,
        threads=reading.threads,
        rank=ranks.rank,
        ranks=ranks.ranks,
    )
    loader = DataLoader(stream, batch_size=None, num_workers=reading.workers, persistent_workers=reading.workers > 0)
    place = join(reading.run, "ranks", f"rank-{ranks.rank}.json")
    state: dict[str, Any] | None = json.loads(storage.read_bytes(place)) if storage.exists(place) else None
    epoch = 0 if state is None else state["epoch"]
    record = out / f"rank-{ranks.rank}.batches"
    with record.open("a") as batches, (out / f"rank-{ranks.rank}.health").open("a") as health:
        batches.write(f"\nstart {epoch} {0 if state is None else state['step']} {stream.steps}\n")
        while epoch < reading.epochs:
            if ranks.rank == 0:
                _, joined = adopt(run, RECIPE, sources, epoch, print)
            else:
                _, joined = follow(run, RECIPE, sources, epoch)
            stream.set_epoch(epoch, joined)
            if state is not None:
                stream.load_state_dict(state)
                state = None
            last = None
            for batch in loader:
                if reading.kill == (ranks.rank, batch.epoch, batch.step):
                    os.kill(os.getpid(), signal.SIGKILL)
                batches.write(f"{batch.epoch} {batch.step} {digest_of(batch)}\n")
                batches.flush()
                if (batch.step + 1) % reading.save_every == 0:
                    storage.write_bytes(place, json.dumps(stream.state_dict(after=batch)).encode())
                time.sleep(reading.pause)
                last = batch
            if last is not None:  # else it was saved at the epoch's end
                storage.write_bytes(place, json.dumps(stream.state_dict(after=last)).encode())
            health.write(json.dumps({"pid": os.getpid(), "epoch": epoch, **resources()}) + "\n")
            health.flush()
            epoch += 1


def resources() -> dict[str, int]:
    """Count what may leak: threads of the stream, all threads, open files, child processes."""
    gc.collect()
    names = [thread.name for thread in threading.enumerate()]
    return {
        "stream_threads": sum(name.startswith("extremis-stream") for name in names),
        "threads": len(names),
        "files": psutil.Process().num_fds(),
        "processes": len(psutil.Process().children(recursive=True)),
    }


def digest_of(batch: Any) -> str:
    """Return the digest of every array of a batch: its name, type, shape and bytes."""
    digest = hashlib.sha256()

    def add(name: str, value: Any) -> None:
        if isinstance(value, np.ndarray):
            digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).data)
        elif hasattr(value, "__dataclass_fields__"):
            for field in value.__dataclass_fields__:
                add(f"{name}.{field}", getattr(value, field))
        elif hasattr(value, "_asdict"):
            for field, item in value._asdict().items():
                add(f"{name}.{field}", item)
        else:
            digest.update(f"{name} {value!r}\n".encode())

    add("batch", batch)
    return digest.hexdigest()[:32]


def batches_of(out: Path, rank: int) -> tuple[dict[tuple[int, int], str], int]:
    """Return ({(epoch, step): digest}, batches read more than once) of a rank's record, without a line that a kill cut.

    Raises AssertionError where a batch that was read again was another, or where one was left out or read out of turn.
    """
    digests: dict[tuple[int, int], str] = {}
    count, due, steps = 0, 0, 1
    for words in map(str.split, (out / f"rank-{rank}.batches").read_text().splitlines()):
        if len(words) == 4 and words[0] == "start":
            steps = int(words[3])
            due = int(words[1]) * steps + int(words[2])
        elif len(words) == 3 and len(words[2]) == 32:
            position = (int(words[0]), int(words[1]))
            assert position == divmod(due, steps), f"rank {rank} read {position} when {divmod(due, steps)} was due"
            first = digests.setdefault(position, words[2])
            assert first == words[2], f"rank {rank} read another batch at (epoch, step) {position}"
            count, due = count + 1, due + 1
    return digests, count - len(digests)


if __name__ == "__main__":
    main()
