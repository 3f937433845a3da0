"""Beam pipelines on Dask: each step becomes tasks over partitions; tagged outputs, side inputs and every sink count.

Beam's own Dask runner carries out the last step alone and mixes tagged outputs (docs/decisions), so only its options
are used. For bounded pipelines of Impulse, ParDo, GroupByKey, Flatten and Reshuffle, and what Beam makes of these:
Create, CoGroupByKey, Combine. What passes from step to step is held, and spilled, by the workers.
"""

import logging
import uuid
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam
from apache_beam.coders import FastPrimitivesCoder
from apache_beam.internal import pickler
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pipeline import AppliedPTransform, PipelineVisitor, PTransformOverride
from apache_beam.pvalue import PCollection
from apache_beam.runners.common import DoFnRunner, Receiver
from apache_beam.runners.dask.dask_runner import DaskOptions
from apache_beam.runners.runner import PipelineResult, PipelineRunner, PipelineState
from apache_beam.transforms.core import Impulse, Windowing
from apache_beam.transforms.sideinputs import SideInputMap
from apache_beam.transforms.window import GlobalWindows
from apache_beam.utils.windowed_value import WindowedValue
from dask import delayed
from dask.delayed import Delayed
from dask.distributed import Client, KilledWorker, LocalCluster, as_completed

from schemas.errors import ExtremisError, InputError
from schemas.manifest import code_version
from schemas.waits import Wait, waiting

PARTITIONS_A_THREAD = 2
_CONNECT_SECONDS = 30
_DRAIN_SECONDS = 600
_KEYS = FastPrimitivesCoder().as_deterministic_coder("a key is a number, a string, or a tuple of them")
_STOPPED: set[str] = set()  # on a worker: runs whose bundles should end
_AT_WORK: Counter[str] = Counter()  # on a worker: bundles at work, by run

Elements = list[Any]


class DaskRunner(PipelineRunner):
    """Runner of `--runner=DaskRunner`: on the scheduler that `--dask_client_address` names, or on workers of its own.

    Raises what a worker raised; ExtremisError where there are no workers, or they die. When it raises, no task of the
    pipeline is at work any more.
    """

    @staticmethod
    def is_fnapi_compatible() -> bool:
        return True  # the pipeline is walked as it was built, without a translation to and fro

    def run_pipeline(self, pipeline: beam.Pipeline, options: PipelineOptions) -> PipelineResult:
        dask_options = options.view_as(DaskOptions)
        if dask_options.partition_size:
            raise InputError("--dask_partition_size means nothing here; give --dask_npartitions, or neither.")
        pipeline.replace_all([_Deal()])
        with _connect(dask_options) as client:
            threads = sum(client.nthreads().values())
            graph = _Graph(uuid.uuid4().hex, dask_options.npartitions or PARTITIONS_A_THREAD * threads)
            pipeline.visit(graph)
            _compute(client, graph)
        return PipelineResult(PipelineState.DONE)


class Rebalance(beam.PTransform):
    """Reshuffle as one step: elements are dealt out over the partitions in turn."""

    def expand(self, pcoll: PCollection) -> PCollection:
        return PCollection.from_(pcoll)


class _Deal(PTransformOverride):
    def matches(self, applied: AppliedPTransform) -> bool:
        return isinstance(applied.transform, beam.Reshuffle)

    def get_replacement_transform_for_applied_ptransform(self, applied: AppliedPTransform) -> beam.PTransform:
        return Rebalance()


@dataclass(frozen=True)
class Step:
    """One ParDo, as a worker gets it: its run, its pickled DoFn and arguments, its outputs' tags."""

    run: str
    fn: bytes
    tags: tuple[str | None, ...]


@dataclass
class _Graph(PipelineVisitor):
    """The pipeline as Dask tasks: the partitions of each collection, and those that no step reads."""

    run: str
    partitions: int
    parts: dict[PCollection, list[Delayed]] = field(default_factory=dict)
    unread: dict[PCollection, list[Delayed]] = field(default_factory=dict)

    def visit_transform(self, applied: AppliedPTransform) -> None:
        transform = applied.transform
        inputs = [self._read(pcoll) for pcoll in applied.inputs if isinstance(pcoll, PCollection)]
        if isinstance(transform, Impulse):
            self._write(applied, None, [_task(list)([b""])])
        elif isinstance(transform, beam.ParDo):
            self._add_bundles(applied, inputs[0])
        elif isinstance(transform, beam.GroupByKey):
            split = [_task(split_by_key)(part, self.partitions) for part in inputs[0]]
            groups = [_task(group)([part[number] for part in split]) for number in range(self.partitions)]
            self._write(applied, None, groups)
        elif isinstance(transform, beam.Flatten):
            self._write(applied, None, [part for parts in inputs for part in parts])
        elif isinstance(transform, Rebalance):
            dealt = [_task(deal)(inputs[0], number, self.partitions) for number in range(self.partitions)]
            self._write(applied, None, dealt)
        else:
            raise InputError(f"the Dask runner cannot run {type(transform).__name__} ({applied.full_label}).")

    def _add_bundles(self, applied: AppliedPTransform, inputs: list[Delayed]) -> None:
        transform: Any = applied.transform
        views = [(type(side), side._view_options()) for side in applied.side_inputs]
        packed = pickler.dumps((transform.fn, transform.args, transform.kwargs, views))
        tags: dict[Any, Any] = applied.outputs
        step = Step(self.run, packed, tuple(tags))
        sides = [self._read(side.pvalue) for side in applied.side_inputs]
        bundles = [_task(run_bundle)(step, part, sides) for part in inputs]
        for number, tag in enumerate(step.tags):
            self._write(applied, tag, [bundle[number] for bundle in bundles])

    def _read(self, pcoll: PCollection) -> list[Delayed]:
        self.unread.pop(pcoll, None)
        return self.parts[pcoll]

    def _write(self, applied: AppliedPTransform, tag: str | None, parts: list[Delayed]) -> None:
        pcoll: Any = applied.outputs[tag]
        self.parts[pcoll] = self.unread[pcoll] = parts


def run_bundle(step: Step, elements: Elements, sides: Sequence[Sequence[Elements]]) -> list[Elements]:
    """Pass elements of one partition through the DoFn of `step`, beside all partitions of each side input.

    One list for each of the step's tags. Raises what the DoFn raises.
    """
    outputs: defaultdict[str | None, _Collected] = defaultdict(_Collected)
    kept = [outputs[tag].values for tag in step.tags]
    if not elements:
        return kept
    fn, args, kwargs, views = pickler.loads(step.fn)
    maps = [
        SideInputMap(view, options, [GlobalWindows.windowed_value(value) for part in parts for value in part])
        for (view, options), parts in zip(views, sides, strict=True)
    ]
    runner = DoFnRunner(fn, args, kwargs, maps, Windowing(GlobalWindows()), outputs)
    _AT_WORK[step.run] += 1
    try:
        runner.setup()
        runner.start()
        for element in elements:
            if step.run in _STOPPED:
                break
            runner.process(GlobalWindows.windowed_value(element))
        runner.finish()
        runner.teardown()
    finally:
        _AT_WORK[step.run] -= 1
    return kept


def split_by_key(pairs: Elements, partitions: int) -> list[Elements]:
    """Split pairs (key, value) by the partitions of their keys, as (encoded key, pair): the same on every worker."""
    split: list[Elements] = [[] for _ in range(partitions)]
    for pair in pairs:
        encoded = _KEYS.encode(pair[0])
        split[zlib.crc32(encoded) % partitions].append((encoded, pair))
    return split


def group(parts: Sequence[Elements]) -> Elements:
    """Group pairs of `split_by_key` to (key, values), in the order of arrival."""
    groups: dict[bytes, tuple[Any, Elements]] = {}
    for part in parts:
        for encoded, (key, value) in part:
            groups.setdefault(encoded, (key, []))[1].append(value)
    return list(groups.values())


def deal(parts: Sequence[Elements], number: int, partitions: int) -> Elements:
    """Take every `partitions`-th element of all `parts`, from `number` on."""
    return [element for part in parts for element in part][number::partitions]


class _Collected(Receiver):
    def __init__(self) -> None:
        self.values: Elements = []

    def receive(self, windowed_value: WindowedValue) -> None:
        self.values.append(windowed_value.value)


def _task(function: Any) -> Any:
    # Not pure: Dask would name a task by its arguments, and hand out the result of an earlier run of the same name.
    return delayed(function, pure=False)


def _compute(client: Client, graph: _Graph) -> None:
    """Run all tasks, the sinks too; their results stay on the workers."""
    futures = client.compute([_task(len)(part) for parts in graph.unread.values() for part in parts])
    try:
        for _ in as_completed(futures, with_results=True):
            pass
    except BaseException as error:
        client.cancel(futures, force=True)
        _drain(client, graph.run)
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
