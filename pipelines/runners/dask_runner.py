"""Flows on Dask: each stage becomes tasks over partitions; what passes between stages is held by the workers.

Of Beam it has the options alone: Beam's own Dask runner carries out the last step alone, and mixes tagged outputs
(docs/decisions/0006).
"""

import logging
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.dask.dask_runner import DaskOptions
from dask import delayed
from dask.delayed import Delayed
from dask.distributed import Client, KilledWorker, LocalCluster, as_completed

from pipelines.common.flow import MAIN, Elements, Flow, Output, Stage, by_tag, group_by_key
from pipelines.common.progress import Watch
from pipelines.runners.local import Runner
from schemas.errors import ExtremisError, InputError
from schemas.manifest import code_version
from schemas.waits import Wait, waiting

PARTITIONS_A_THREAD = 2
_CONNECT_SECONDS = 30
_DRAIN_SECONDS = 600
_STOPPED: set[str] = set()  # on a worker: runs whose bundles should end
_AT_WORK: Counter[str] = Counter()  # on a worker: bundles at work, by run


class DaskRunner(Runner):
    """Runner of `--runner=DaskRunner`: on the scheduler that `--dask_client_address` names, or its own workers."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._options = PipelineOptions(list(flags)).view_as(DaskOptions)
        if self._options.partition_size:
            raise InputError("--dask_partition_size means nothing here; give --dask_npartitions, or neither.")

    def run(self, flow: Flow, watch: Watch | None = None) -> None:
        """Run `flow` to its end. Raises what a worker raised; ExtremisError where there are no workers, or they die.

        When it raises, no task of the flow is at work any more.
        """
        logger = logging.getLogger("distributed")
        level, run = logger.level, uuid.uuid4().hex
        logger.setLevel(logging.CRITICAL)  # tracebacks that are raised anyway
        try:
            watching = nullcontext() if watch is None else watch.watching()
            with watching as settle, _connect(self._options) as client:
                partitions = self._options.npartitions or PARTITIONS_A_THREAD * sum(client.nthreads().values())
                _compute(client, _tasks(flow, run, partitions), run)
                if settle is not None:
                    settle({})
        finally:
            logger.setLevel(level)


def _tasks(flow: Flow, run: str, partitions: int) -> list[Delayed]:
    """Return the tasks whose results nobody reads, and which need all others."""
    parts: dict[Output, list[Delayed]] = {}

    def read(outputs: Sequence[Output]) -> list[Delayed]:
        return [part for output in outputs for part in parts[output]]

    for number, stage in enumerate(flow.stages):
        inputs, main = read(stage.reads), Output(number, MAIN)
        if stage.given is not None:
            parts[main] = [_task(list)(stage.given[part::partitions]) for part in range(partitions)]
        elif stage.work is None:
            split = [_task(split_by_key)(part, partitions) for part in inputs]
            parts[main] = [_task(group)([part[place] for part in split]) for place in range(partitions)]
        else:
            sides = {place: read(outputs) for place, outputs in stage.sides.items()}
            bundles = [_task(run_bundle)(run, stage, part, sides) for part in inputs]
            for place, tag in enumerate(stage.tags):
                parts[Output(number, tag)] = [bundle[place] for bundle in bundles]
    return [_task(len)(part) for output in flow.unread() for part in parts[output]]


def run_bundle(run: str, stage: Stage, elements: Elements, sides: dict[int, list[Elements]]) -> list[Elements]:
    """Do the work of `stage` on the elements of one partition, beside all partitions of its sides.

    One list for each of the stage's tags. Raises what the work raises.
    """
    if not elements:
        return [[] for _ in stage.tags]
    work = stage.with_sides({place: dict(pair for part in side for pair in part) for place, side in sides.items()})
    _AT_WORK[run] += 1
    try:
        outputs = by_tag(work(_until_stopped(run, elements)), stage.tags)
    finally:
        _AT_WORK[run] -= 1
    return [outputs[tag] for tag in stage.tags]


def _until_stopped(run: str, elements: Elements) -> Iterator[Any]:
    for element in elements:
        if run in _STOPPED:
            return
        yield element


def split_by_key(pairs: Elements, partitions: int) -> list[Elements]:
    """Split pairs (key, value) by the partitions of their keys: the same on every worker, as a key's `repr` is."""
    split: list[Elements] = [[] for _ in range(partitions)]
    for pair in pairs:
        split[zlib.crc32(repr(pair[0]).encode()) % partitions].append(pair)
    return split


def group(parts: Sequence[Elements]) -> Elements:
    """Group pairs of `split_by_key` to (key, values)."""
    return group_by_key(pair for part in parts for pair in part)


def _task(function: Any) -> Any:
    # Not pure: Dask would name a task by its arguments, and hand out the result of an earlier run of the same name.
    return delayed(function, pure=False)


def _compute(client: Client, tasks: Sequence[Delayed], run: str) -> None:
    """Run `tasks` and all that they need; their results stay on the workers."""
    futures = client.compute(list(tasks))
    try:
        for _ in as_completed(futures, with_results=True):
            pass
    except BaseException as error:
        client.cancel(futures, force=True)
        _drain(client, run)
        if isinstance(error, KilledWorker):
            raise ExtremisError(
                f"a Dask worker died at the same task several times: {error}. It was out of memory, most likely: give "
                "the workers more of it, or fewer threads (the pipelines' pages say what each step needs)."
            ) from error
        raise


def _drain(client: Client, run: str) -> None:
    """Wait until no bundle of `run` is at work: one that went on would write into what is cleared, or made again."""
    for _ in waiting("the Dask workers to end what they are at", seconds=_DRAIN_SECONDS):
        if not any(client.run(stop, run, on_error="ignore").values()):
            return


def stop(run: str) -> int:
    """Ask the bundles of `run` on this worker to end after their element; return how many are at work."""
    _STOPPED.add(run)
    return _AT_WORK[run]


@contextmanager
def _connect(options: DaskOptions) -> Iterator[Client]:
    """Connect to workers that run this very code. Raises ExtremisError: no scheduler, no worker, other code."""
    names = ("address", "timeout", "scheduler_file", "name")
    settings = options.get_all_options(drop_default=True, current_only=True)
    settings = {name: value for name, value in settings.items() if name in names}
    if not {"address", "scheduler_file"} & settings.keys():
        try:
            cluster = LocalCluster(threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL)
        except RuntimeError as error:
            raise ExtremisError(
                f"Dask cannot start workers here: {error} Look whether /dev/shm can be written and has room (docker "
                "run --shm-size=1g), or name a scheduler elsewhere (--dask_client_address)."
            ) from error
        with cluster, Client(cluster) as client:
            yield client
        return
    where = settings.get("address") or settings.get("scheduler_file")
    try:
        with Wait(f"a worker of the Dask scheduler {where}", seconds=2 * _CONNECT_SECONDS):
            client = Client(**{"timeout": _CONNECT_SECONDS, **settings})
            client.wait_for_workers(1, timeout=_CONNECT_SECONDS)
            versions = client.run(code_version)
    except (OSError, ValueError) as error:
        raise ExtremisError(f"the Dask scheduler {where} cannot be used: {error or type(error).__name__}.") from error
    except ImportError as error:
        raise ExtremisError(
            f"the workers of the Dask scheduler {where} have no Extremis ({error}). Install it in their environment."
        ) from error
    with client:
        other = {worker: version for worker, version in versions.items() if version != code_version()}
        if other:
            worker, version = min(other.items())
            raise ExtremisError(
                f"the Dask worker {worker} has Extremis {version}, this process has {code_version()}. Install the same."
            )
        yield client
