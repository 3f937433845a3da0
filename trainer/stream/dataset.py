"""The joined stream: its batches, which threads deal ahead, its state, and its copies in a DataLoader's workers."""

import contextlib
import functools
import json
import math
import mmap
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch.utils.data import IterableDataset, get_worker_info

from schemas import arrow
from schemas.errors import InputError, TableError
from schemas.layout import CLUSTERS
from schemas.options import MOST_THREADS, Options, check, whole_number
from trainer.device import keep_freed_memory
from trainer.input_kinds import InputKind
from trainer.schedule import SINGLE_ROWS, ClusterSchedule
from trainer.stream.batch import Batch, Candidates
from trainer.stream.order import EpochOrder, OrderBySource, streams_of_rank
from trainer.stream.row_groups import ReadOptions, RowGroups
from trainer.stream.sources import Source, count_clusters
from trainer.stream.window import Damaged, Decoding, Window, decodings

THREAD = "extremis-stream"
_DEALS_AHEAD = 1  # calls of `_deal` (a few batches each) beyond the calls that threads work on
_OPTIONAL = {"batches", "clusters", "shares"}  # keys that a state has only if the stream uses the option
_BYTES = 1 << 16  # maximum bytes of a message to workers
WINDOWS_AHEAD = 1  # windows that threads decode ahead; the one after is requested, since a remote store takes long

Plan = Callable[[Batch], Candidates | None]


class StreamOptions(Options, arbitrary_types_allowed=True):
    """Options of a stream.

    `batch`: B. `streams`: S (`EpochOrder`). `inputs`: what the encoder reads. `threads`: number of threads that read,
    decode and gather ahead. They also call `plan`, which returns the candidates of a batch, and `prepare`, which
    prepares a batch for the encoder. With 0 threads, everything runs in the calling thread. `damaged`: a row group that
    cannot be decoded stops the stream (TableError), or is skipped and counted in `skipped_rows`. `clusters`: if all
    tables are in cluster order, deal whole clusters of these sizes. `tail`: keep the last batch of an epoch, which may
    be shorter, or drop it. `batches`: whether a batch mixes rows from all sources, or has rows of one source.
    """

    batch: int = Field(ge=1, le=1 << 24)
    streams: int = Field(ge=1)
    inputs: InputKind = "tokens"
    window_groups: int = Field(4, ge=1, le=1 << 20)
    clusters: ClusterSchedule = SINGLE_ROWS
    seed: int = Field(0, ge=0, lt=1 << 64)
    threads: int = Field(1, ge=0, le=MOST_THREADS)
    tail: Literal["keep", "drop"] = "keep"
    batches: Literal["mixed", "by_source"] = "mixed"
    rank: int = Field(0, ge=0)
    ranks: int = Field(1, ge=1)
    plan: Plan | None = None
    prepare: Callable[[Batch], Any] | None = None
    damaged: Damaged = "stop"
    reading: ReadOptions | None = None

    @model_validator(mode="after")
    def _check(self) -> "StreamOptions":
        if self.batch % self.streams:
            raise ValueError(f"streams = {self.streams} does not divide batch = {self.batch}. Change one of the two")
        if self.rank >= self.ranks:
            raise ValueError(f"rank = {self.rank}: expected less than ranks = {self.ranks}. Count ranks from 0")
        return self


class JoinedStream(IterableDataset):
    """One rank's part of each global batch, in the order that docs/stream.md describes, with its negatives joined.

    `sources`: tables that are dealt as one table, each as often as its weight specifies. `labels`: L. `options` are
    fields of `StreamOptions`. Iteration yields the rest of the current epoch as `Batch`es; call `set_epoch` for the
    next epoch. `state_dict` is small and the same on every rank; `load_state_dict` reads no data before the step at
    which the stream resumes. Raises InputError for invalid options, such as a `batch` that `streams` does not
    divide or more ranks than streams, for no sources or two with the same name, or a source that lacks the `inputs`.
    """

    def __init__(self, sources: list[Source], labels: int, **options: Any) -> None:
        super().__init__()
        self._options = check(StreamOptions, options)
        self._streams = streams_of_rank(self._options.streams, self._options.rank, self._options.ranks)
        self._label_type = arrow.label_type(whole_number("labels", labels, 1))
        self._set_sources(sources)
        names = [source.name for source in sources]
        if len(set(names)) < len(names):
            raise InputError(f"two sources have the same name: {', '.join(names)}. Give each source its own name.")
        if self._options.batches == "by_source" and self._options.clusters != SINGLE_ROWS:
            raise InputError("batches from a single source do not work with clusters: leave out clusters, or batches.")
        self._later: list[Source] | None = None  # sources of the next epoch, if a state had other weights
        self._epoch, self._step = 0, 0
        self._slice: WorkerSlice | None = None  # the slice that `_step` belongs to; None: all steps
        self._channel = WorkerChannel()
        self._last_read = self._channel.number

    @property
    def rows(self) -> int:
        """Number of rows in all sources, regardless of weights; row ids are below this number."""
        return int(self._groups.first_row[-1])

    @property
    def skipped_rows(self) -> int:
        """Number of rows skipped because they could not be decoded, in this process or in workers."""
        return self._channel.skipped

    @property
    def order(self) -> EpochOrder:
        """Order of the current epoch."""
        options, groups = self._options, self._groups
        fields = groups.group_rows, options.batch, options.streams, options.window_groups, options.seed, self._epoch
        if options.batches == "by_source":
            return OrderBySource(*fields, options.tail, groups.weighted_groups, dealt=groups.dealt)
        return EpochOrder(*fields, options.tail, groups.mix, *self._clusters, groups.dealt)

    @functools.cached_property
    def _clusters(self) -> tuple[int, np.ndarray | None]:
        """Most rows of a cluster (1: single rows) and, if above 1, the number of clusters in each row group [M]."""
        if self._options.clusters == SINGLE_ROWS:
            return 1, None
        if self._groups.mix:
            raise InputError(
                "weighted sources do not work with clusters: leave out data.mix, or set order.cluster = 1."
            )
        # A cluster fits into a stream's share of a batch, and into the clusters by which rows were ordered.
        share = self._options.batch // self._options.streams
        made = (source.table.parameters.get(CLUSTERS, {"size": share}) for source in self._sources)
        size = self._options.clusters.at(self._epoch, math.gcd(share, *(each["size"] for each in made)))
        clusters = count_clusters(self._sources, size) if size > 1 else None
        return (1, None) if clusters is None else (size, clusters)

    @property
    def steps(self) -> int:
        """Number of batches in an epoch, the same on every rank."""
        return self.order.steps

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int, sources: list[Source] | None = None) -> None:
        """Start `epoch`, in workers at the loader's next iteration; `sources`: new negatives and weights."""
        epoch = whole_number("epoch", epoch)
        sources, self._later = sources or self._later, None
        if sources is not None:
            self._set_sources(sources)
        self._go_to(epoch, 0)
        self._slice = None
        self._notify_workers()

    def __iter__(self) -> Generator[Batch, None, None]:
        self._sync_worker()
        order, stride = self.order, 1 if self._slice is None else self._slice.workers
        with contextlib.closing(self._batches(order, range(self._step, order.steps, stride))) as batches:
            for batch in batches:
                self._step = batch.step + stride
                yield batch

    def _batches(self, order: EpochOrder, steps: range) -> Generator[Batch, None, None]:
        keep_freed_memory()
        if not steps:
            return
        first, options = steps.start // order.steps_per_window, self._options
        coming = decodings(order, self._groups, self._streams, first, WINDOWS_AHEAD + 1, options.damaged)
        with contextlib.closing(self._groups), contextlib.ExitStack() as ended:
            if options.threads:
                pool = ThreadPoolExecutor(options.threads, thread_name_prefix=THREAD)
                ended.callback(pool.shutdown, cancel_futures=True)
                yield from self._deal_ahead(pool, coming, steps)
                return
            for decoding in coming:
                for task in decoding.tasks:
                    task()
                window = self._open(decoding)
                for few in window.split(steps):
                    yield from self._deal(window, few)
                window.close()

    def _deal_ahead(self, pool: Executor, coming: Iterator[Decoding], steps: range) -> Generator[Batch, None, None]:
        """Deal the batches in order. Tasks that decode the next window are spread over the deals of this window."""
        deals: deque[tuple[Future[list[Batch]], Window | None]] = deque()  # the last deal of a window closes it

        def finish() -> list[Batch]:
            future, window = deals.popleft()
            batches = future.result()
            if window is not None:
                window.close()
            return batches

        current = next(coming, None)
        running = [pool.submit(task) for task in current.tasks] if current is not None else []
        while current is not None:
            for future in running:
                future.result()
            window = self._open(current)
            todo, following = window.split(steps), next(coming, None)
            tasks, running = deque(following.tasks if following is not None else []), []
            for number, few in enumerate(todo, 1):
                deals.append((pool.submit(self._deal, window, few), window if number == len(todo) else None))
                due = -(-len(tasks) // (len(todo) - number + 1))
                running += [pool.submit(tasks.popleft()) for _ in range(due)]
                if len(deals) > self._options.threads + _DEALS_AHEAD:
                    yield from finish()
            running += [pool.submit(task) for task in tasks]
            current = following
        while deals:
            yield from finish()

    def _open(self, decoding: Decoding) -> Window:
        window = decoding.result()
        if self._slice is None or self._slice.worker == 0:  # every worker decodes every window: one of them counts
            self._channel.skip(window.skipped)
        return window

    def _deal(self, window: Window, steps: range) -> list[Batch]:
        batches, plan, prepare = window.batches(steps), self._options.plan, self._options.prepare
        if plan is not None:
            batches = [replace(batch, candidates=plan(batch)) for batch in batches]
        return batches if prepare is None else [replace(batch, prepared=prepare(batch)) for batch in batches]

    def state_dict(self, after: Batch | None = None) -> dict[str, Any]:
        """Return the state that lets `load_state_dict` continue after the newest batch, or after the batch `after`.

        If DataLoader workers deal the batches, only the workers know the newest batch: pass the batch, or use a
        `StatefulDataLoader`, whose state comes from its workers (and resumes only with the same number of workers).
        """
        self._sync_worker()
        position = {"epoch": self._epoch, "step": self._step}
        if after is not None:
            position = {"epoch": after.epoch, "step": after.step + 1}
        elif self._slice is not None:
            position |= asdict(self._slice)
        return {**position, **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the step of `state`. Raises InputError if the state belongs to a different order.

        The resumed epoch keeps the weights in `state`; if the current sources have other weights, those weights apply
        from the next epoch on.
        """
        state = state if isinstance(state, dict) else {}
        expected = {**self._identity, **dict.fromkeys(_OPTIONAL & state.keys() - self._identity.keys())}
        mix = state.get("mix") or []
        if [name for name, _ in mix] == [source.name for source in self._sources]:
            expected["mix"] = mix  # whatever the weights
        for name, value in expected.items():
            if state.get(name) != value:
                raise InputError(
                    f"cannot resume the stream: {name} was {state.get(name)!r} when it was saved and is {value!r} "
                    "now. Resume with the same data, recipe and tables, or start a new run."
                )
        self._slice = WorkerSlice(state["worker"], state.get("workers", 0)) if "worker" in state else None
        if self._slice is not None and self._slice != slice_of_process():
            raise InputError(
                f"cannot resume the stream: the state belongs to worker {self._slice.worker} of {self._slice.workers}. "
                "Resume with the same number of DataLoader workers, or save state_dict(after=batch), which works with "
                "any number."
            )
        epoch, step = (whole_number(f"state[{name!r}]", state.get(name)) for name in ("epoch", "step"))
        if mix != self._identity["mix"]:
            self._later = self._sources
            self._set_weights(mix)
        self._go_to(epoch, step)
        self._notify_workers()

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """Everything that determines the batches: what a state and a message to workers have to agree with."""
        return {
            "version": 1,
            "seed": self._options.seed,
            "rows": self.rows,
            "batch": self._options.batch,
            "streams": self._options.streams,
            "window_groups": self._options.window_groups,
            "tail": self._options.tail,
            "mix": [[source.name, source.weight] for source in self._sources],
            **({} if self._options.batches == "mixed" else {"batches": self._options.batches}),
            **({} if self._options.clusters == SINGLE_ROWS else {"clusters": [*self._options.clusters]}),
            **({} if self._groups.dealt is None else {"shares": {s.name: [*s.share] for s in self._sources}}),
            "tables": {s.name: s.table.manifest.digest for s in self._sources},
            "negatives": {s.name: s.negatives.manifest.digest for s in self._sources if s.negatives is not None},
        }

    def _go_to(self, epoch: int, step: int) -> None:
        self._epoch, self._step = epoch, step
        self.__dict__.pop("_clusters", None)

    def _set_sources(self, sources: list[Source]) -> None:
        if not isinstance(sources, list | tuple) or {*map(type, sources)} != {Source}:
            raise InputError(f"sources: expected a list of Source, as of open_sources, got {sources!r:.80}.")
        for source in sources:
            source.require_inputs(self._options.inputs)
        self._sources = sources
        self._groups = RowGroups(sources, self._label_type, self._options.inputs, self._options.reading)
        self.__dict__.pop("_identity", None)
        self.__dict__.pop("_clusters", None)

    def _set_weights(self, mix: list[list[Any]]) -> None:
        pairs = zip(self._sources, mix, strict=True)
        self._set_sources([replace(source, weight=weight) for source, (_, weight) in pairs])

    def _notify_workers(self) -> None:
        """In the main process, write the step and the sources for the copies in workers."""
        if slice_of_process() is not None:
            return
        negatives = {s.name: None if s.negatives is None else s.negatives.url for s in self._sources}
        self._channel.write({"epoch": self._epoch, "step": self._step, "urls": negatives, **self._identity})
        self._last_read = self._channel.number

    def _sync_worker(self) -> None:
        """In a worker, move this copy to the main process's step, and to its own slice of the steps."""
        own_slice = slice_of_process()
        if own_slice is None:
            return
        if self._last_read != self._channel.number:
            self._follow_message()
        if self._slice is None:
            self._slice, self._step = own_slice, self._step + own_slice.worker

    def _follow_message(self) -> None:
        message, self._last_read = self._channel.read(), self._channel.number
        if message["tables"] != self._identity["tables"]:
            raise InputError("set_epoch changed the tables: make a new DataLoader, whose workers open the new tables.")
        if message["mix"] != self._identity["mix"]:
            self._set_weights(message["mix"])
        if message["negatives"] != self._identity["negatives"]:
            self._set_sources([source.with_negatives(message["urls"][source.name], None) for source in self._sources])
            if message["negatives"] != self._identity["negatives"]:
                urls = ", ".join(filter(None, message["urls"].values()))
                raise TableError(f"{urls}: a table changed while it was in use. Start a new run.")
        self._go_to(message["epoch"], message["step"])
        self._slice = None


@dataclass(frozen=True)
class WorkerSlice:
    """Worker `worker` of `workers`: a loader takes batches from workers in turn, so each deals every `workers`-th."""

    worker: int
    workers: int


def slice_of_process() -> WorkerSlice | None:
    """Return the slice of this process; None outside DataLoader workers."""
    info = get_worker_info()
    return None if info is None else WorkerSlice(info.id, info.num_workers)


class WorkerChannel:
    """Shared memory with the last message of the main process to copies of a stream in persistent workers.

    If a loader spawns workers, the memory moves to /dev/shm, which may be small in a container. Writer and readers take
    turns: a loader's workers begin an epoch only after the owner has called `set_epoch`.
    """

    def __init__(self) -> None:
        self._text = torch.frombuffer(mmap.mmap(-1, _BYTES), dtype=torch.uint8)
        # (number, bytes of the text, skipped rows)
        self._header = torch.frombuffer(mmap.mmap(-1, 3 * 8), dtype=torch.int64)

    @property
    def number(self) -> int:
        """Number of messages written so far."""
        return int(self._header[0])

    def write(self, body: dict[str, Any]) -> None:
        """Write the next message. Raises InputError if the message does not fit."""
        text = json.dumps(body).encode()
        if len(text) > _BYTES:
            raise InputError(
                f"the URLs of the negatives take {len(text):,} bytes, and the limit for workers is {_BYTES:,}: use "
                "shorter URLs, or fewer sources."
            )
        self._text.numpy()[: len(text)] = np.frombuffer(text, np.uint8)
        self._header[1] = len(text)
        self._header[0] += 1

    def read(self) -> dict[str, Any]:
        """Read the last message."""
        body: dict[str, Any] = json.loads(self._text.numpy()[: int(self._header[1])].tobytes())
        return body

    @property
    def skipped(self) -> int:
        """Number of rows skipped so far, in all processes."""
        return int(self._header[2])

    def skip(self, rows: int) -> None:
        """Add `rows` to the number of skipped rows."""
        self._header[2] += rows
