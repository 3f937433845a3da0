"""Choose the runner of a flow from the options after `--`; run flows on this machine, also in threads or processes."""

import functools
import importlib
import os
import queue
import signal
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Literal

from pipelines.flow import MAIN, Elements, Flow, Output, Outputs, Work, by_tag, group_by_key
from pipelines.progress import Count, Progress, process_counts, silent, sum_counts
from pipelines.runners.base import Runner
from schemas import storage
from schemas.errors import ExtremisError, InputError, PeerError, RoomError, missing_extra
from schemas.logs import log_as
from schemas.process import cores, end_with_parent, free_memory, python_command
from schemas.sizes import say_bytes
from schemas.waits import Wait

_WORTH_PROCESSES = 8 << 20  # bytes
_MOST_WORKERS = 16
# Runners other than the local runner and Beam's runners, each with the extra that it needs.
RUNNERS: dict[str, tuple[str, str]] = {}
# Names of Beam's own local runners; the local runner accepts their options.
_LOCAL_RUNNERS = ("", "DirectRunner", "SwitchingDirectRunner", "FnApiRunner")
# Beam's runners that write the same bytes as the local runner.
_BEAM_RUNNERS = ("PortableRunner", "FlinkRunner", "SparkRunner", "PrismRunner", "DataflowRunner")
_TASKS_PER_WORKER = 4  # tasks of a stage per worker: a worker that is done takes the next task
_STOP_SECONDS = 20.0  # timeout for an idle worker process to end

Mode = Literal["in_memory", "multi_threading", "multi_processing"]


def choose_runner(
    beam_options: Sequence[str] = (), urls: Sequence[str] = (), worker_bytes: int = 1, say: Progress = silent
) -> Runner:
    """Return the runner that `beam_options` specify (`--runner=...`), by default the local runner; do not start it.

    By default, the local runner uses one worker process per core if the files at `urls` are large and workers can read
    these files (memory:// exists only in this process). It starts fewer workers if they do not fit into the memory,
    `worker_bytes` each; their number never decides bytes. Raises InputError for an unknown runner or option.
    """
    name, mode, workers = _parse_options(tuple(beam_options))
    if name in RUNNERS:
        return _import_runner(name)(beam_options)
    if name not in _LOCAL_RUNNERS:
        from pipelines.runners.beam import BeamRunner

        return BeamRunner(beam_options)
    if not any(flag.startswith(("--direct_num_workers", "--direct_running_mode")) for flag in beam_options):
        reached = cores() > 1 and not any(url.startswith("memory://") for url in urls)
        sizes = (storage.size(url) for url in urls if storage.exists(url))
        worth_processes = reached and sum(sizes) >= _WORTH_PROCESSES  # a process takes a second to start
        mode, workers = "multi_processing" if worth_processes else "in_memory", min(cores(), _MOST_WORKERS)
    workers, free = workers or cores(), free_memory()
    started = max(1, min(workers, free // worker_bytes))
    if started < workers and mode != "in_memory":
        say(f"{started} of {workers} workers: {say_bytes(free)} are free, each needs up to {say_bytes(worker_bytes)}")
    return LocalRunner(mode, started)


def is_local(beam_options: Sequence[str]) -> bool:
    """Return whether workers run on this machine, in this process's working directory."""
    return _parse_options(tuple(beam_options))[0] in _LOCAL_RUNNERS


def for_workers(beam_options: Sequence[str], url: str) -> str:
    """Return the URL at which workers find `url`: an absolute path, unless workers share this working directory."""
    return url if is_local(beam_options) else absolute_path(url)


def absolute_path(url: str) -> str:
    """Return a local path as an absolute path, and any other URL unchanged."""
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))


@functools.cache
def _parse_options(flags: tuple[str, ...]) -> tuple[str, Mode, int]:
    """Return the runner's name, and a local runner's mode and number of workers. Raises InputError for a bad option."""
    if not flags:  # do not import Beam: the import takes as long as much of the work
        return "", "in_memory", 1
    from apache_beam.options import pipeline_options as options

    from pipelines.runners.beam import refuse_unknown_options

    name = _full_name(options.PipelineOptions(list(flags)).view_as(options.StandardOptions).runner or "")
    if name in RUNNERS:
        _import_runner(name)  # the import declares the runner's options
    elif name not in _LOCAL_RUNNERS:
        return name, "in_memory", 1
    refuse_unknown_options(flags)
    direct = options.PipelineOptions(list(flags)).view_as(options.DirectOptions)
    return name, direct.direct_running_mode, int(direct.direct_num_workers)


def _full_name(name: str) -> str:
    """Return the full name of a runner; `name` may be short, such as flink. Raises InputError for an unknown runner."""
    known = (*_LOCAL_RUNNERS, *RUNNERS, *_BEAM_RUNNERS)
    short = name.rpartition(".")[2].lower().removesuffix("runner")
    for each in known:
        if each.lower().removesuffix("runner") == short:
            return each
    raise InputError(
        f"cannot use the Beam runner {name!r}: it writes different tables, or was never tested. Use one of "
        f"{', '.join(known[1:])}, or leave --runner out to run in this process."
    )


def _import_runner(name: str) -> Callable[[Sequence[str]], Runner]:
    """Import the class of the runner `name` in RUNNERS. Raises InputError if its extra is missing."""
    module, extra = RUNNERS[name]
    try:
        runner: Callable[[Sequence[str]], Runner] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise missing_extra(f"{name} is not installed ({error})", extra) from None
    return runner


@dataclass(frozen=True)
class StageTask:
    """Some elements of a stage, and the work to do on these elements."""

    work: Work
    elements: Elements
    tags: tuple[str, ...]

    def __call__(self) -> Outputs:
        """Do the work and return the outputs per tag. Raises the errors of the work."""
        return by_tag(self.work(self.elements), self.tags)


class LocalRunner(Runner):
    """Runner on this machine. Worker processes serve all flows, and live until the `with` block ends."""

    def __init__(self, mode: Mode = "in_memory", workers: int = 1) -> None:
        self._mode, self._workers = mode, 1 if mode == "in_memory" else workers
        self.in_process = mode == "in_memory"  # in this process, one task after the other
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._started: list[Worker] = []

    def __exit__(self, *error: object) -> None:
        for worker in self._started:
            worker.end(at_once=error[0] is not None)

    def _run(self, flow: Flow) -> Mapping[str, Count]:
        """Run `flow`. Raises workers' errors, and ExtremisError if a worker died. No work continues after an error."""
        if self._mode == "in_memory":
            run_stages(flow, lambda tasks: [task() for task in tasks], 1)
        else:
            self._run_beside(flow)
        return sum_counts(worker.counts for worker in self._started)

    def _run_beside(self, flow: Flow) -> None:
        if self._mode == "multi_processing" and not self._started:
            self._started = [Worker() for _ in range(self._workers)]
            for worker in self._started:
                self._idle.put(worker)
        do = self._on_idle_worker if self._started else StageTask.__call__
        count = 1 if self._workers == 1 else _TASKS_PER_WORKER * self._workers
        pool = ThreadPoolExecutor(self._workers, "extremis-worker")
        try:
            run_stages(flow, lambda tasks: _results([pool.submit(do, task) for task in tasks]), count)
        except BaseException:
            for worker in self._started:
                worker.end(at_once=True)
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def _on_idle_worker(self, task: StageTask) -> Outputs:
        worker = self._idle.get()
        try:
            return worker.do(task)
        finally:
            self._idle.put(worker)


def _results(tasks: Sequence[Future[Outputs]]) -> list[Outputs]:
    """Return the results in order. Raises the first error as soon as a task fails."""
    for task in wait(tasks, return_when=FIRST_EXCEPTION).done:
        task.result()
    return [task.result() for task in tasks]


def run_stages(flow: Flow, do: Callable[[list[StageTask]], list[Outputs]], count: int) -> None:
    """Run the stages of `flow` in order, each in at most `count` tasks; release outputs that no later stage reads."""
    last = {output: number for number, stage in enumerate(flow.stages) for output in stage.inputs}
    held: dict[Output, Elements] = {}
    for number, stage in enumerate(flow.stages):
        elements = [element for output in stage.reads for element in held[output]]
        if stage.given is not None:
            made: Outputs = {MAIN: list(stage.given)}
        elif stage.work is None:
            made = {MAIN: group_by_key(elements)}
        else:
            sides = {
                place: dict(pair for output in outputs for pair in held[output])
                for place, outputs in stage.sides.items()
            }
            tasks = [StageTask(stage.with_sides(sides), some, stage.tags) for some in _split_evenly(elements, count)]
            done = do(tasks)
            made = {tag: [element for each in done for element in each[tag]] for tag in stage.tags}
        held |= {Output(number, tag): some for tag, some in made.items()}
        held = {output: some for output, some in held.items() if last.get(output, -1) > number}


def _split_evenly(elements: Elements, most: int) -> list[Elements]:
    """Split elements into at most `most` lists of about equal size, in order."""
    count = min(len(elements), most)
    return [elements[len(elements) * n // count : len(elements) * (n + 1) // count] for n in range(count)]


class Worker:
    """Worker process that does one task at a time."""

    def __init__(self) -> None:
        self._pipe, theirs = Pipe()
        with theirs:
            program = f"from pipelines.runners.local import serve; serve({theirs.fileno()})"
            command = python_command(program)
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        self.counts: dict[str, Count] = {}  # counts of steps since the start of the process

    def do(self, task: StageTask) -> Outputs:
        """Do `task` in the process. Raises the errors of the work; RoomError, PeerError if the process ends."""
        try:
            self._pipe.send(task)
            outputs, error, self.counts = self._pipe.recv()
        except (EOFError, OSError):
            status = self._process.wait()
            kind = RoomError if status == -signal.SIGKILL else PeerError
            raise kind(
                f"a worker process ended too early (status {status}); most likely it ran out of memory. Give the step "
                "more memory, or start fewer workers (--direct_num_workers)."
            ) from None
        if error is not None:
            raise error
        made: Outputs = outputs
        return made

    def end(self, at_once: bool) -> None:
        """End the process when it is idle, or immediately if `at_once`."""
        if at_once:
            self._process.kill()
        self._pipe.close()
        try:
            with Wait("a worker process to end", seconds=_STOP_SECONDS):
                self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def serve(place: int) -> None:
    """Do the tasks that arrive on the pipe with the file descriptor `place`, until the pipe closes.

    Each answer contains the outputs, an error or None, and the counts so far. The process ends when its parent ends.
    """
    log_as("worker")
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launching process ends this process
    pipe = Connection(place)
    while True:
        try:
            task: StageTask = pipe.recv()
        except EOFError:
            return
        outputs: Outputs = {}
        error: BaseException | None = None
        try:
            outputs = task()
        except Exception as raised:
            error = raised
            if not isinstance(raised, ExtremisError):  # its class may be unknown to the launching process
                error = RuntimeError("on a worker: " + "".join(traceback.format_exception(raised)))
        pipe.send((outputs, error, process_counts()))
