"""Run flows on Dask, stage by stage, as the local runner does; each task of a stage is a Dask task.

Of Beam's own Dask runner, only the options are used, because that runner executes only the last step and mixes up
tagged outputs (docs/decisions/0006).
"""

import functools
import itertools
import logging
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.dask.dask_runner import DaskOptions
from dask.distributed import Client, KilledWorker, LocalCluster, as_completed

from pipelines.common.flow import Flow, Outputs, by_tag
from pipelines.common.progress import Count
from pipelines.runners.local import Runner, StageTask, run_stages, silence_loggers
from schemas.errors import ExtremisError, InputError
from schemas.manifest import code_version
from schemas.waits import Wait, waiting

TASKS_PER_THREAD = 2
_CONNECT_SECONDS = 30
_DRAIN_SECONDS = 600
_STOPPED: set[str] = set()  # on a worker: runs whose tasks must stop
_RUNNING_TASKS: Counter[str] = Counter()  # on a worker: number of running tasks, by run


class DaskRunner(Runner):
    """Runner for `--runner=DaskRunner`: uses the scheduler at `--dask_client_address`, or starts its own workers."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._options = PipelineOptions(list(flags)).view_as(DaskOptions)
        if self._options.partition_size:
            raise InputError("--dask_partition_size has no effect. Give --dask_npartitions, or neither option.")

    def _run(self, flow: Flow) -> Mapping[str, Count]:
        """Run `flow`. Raises the errors of workers, and ExtremisError if there are no workers or if workers die.

        After an error, no task of the flow is still running. Returns no counts, because the workers report the counts.
        """
        with silence_loggers(["distributed"]), _connect(self._options) as client:
            count = self._options.npartitions or TASKS_PER_THREAD * sum(client.nthreads().values())
            run_stages(flow, functools.partial(_compute, client, uuid.uuid4().hex), count)
        return {}


def work_on(run: str, task: StageTask) -> Outputs:
    """Execute a task of the run with the id `run` on a worker. Raises the errors of the work."""
    _RUNNING_TASKS[run] += 1
    try:
        goes_on = itertools.takewhile(lambda _: run not in _STOPPED, task.elements)
        return by_tag(task.work(goes_on), task.tags)
    finally:
        _RUNNING_TASKS[run] -= 1


def _compute(client: Client, run: str, tasks: Sequence[StageTask]) -> list[Outputs]:
    """Execute the tasks of a stage, and return their outputs in order."""
    # With pure=True, Dask would return the result of an earlier task with the same arguments.
    futures = client.map(functools.partial(work_on, run), tasks, pure=False)
    try:
        made = dict(as_completed(futures, with_results=True))
        return [made[future] for future in futures]
    except BaseException as error:
        client.cancel(futures, force=True)
        # A task that is still running would write into folders that are cleared or written again.
        for _ in waiting("the Dask workers to finish their tasks", seconds=_DRAIN_SECONDS):
            if not any(client.run(stop, run, on_error="ignore").values()):
                break
        if isinstance(error, KilledWorker):
            raise ExtremisError(
                f"a Dask worker died several times in the same task: {error}. Most likely it ran out of memory: give "
                "the workers more memory or fewer threads (the docs of the pipelines list what each step needs)."
            ) from error
        raise


def stop(run: str) -> int:
    """Stop the tasks of `run` on this worker after the current elements; return the number of running tasks."""
    _STOPPED.add(run)
    return _RUNNING_TASKS[run]


@contextmanager
def _connect(options: DaskOptions) -> Iterator[Client]:
    """Connect to Dask workers. Raises ExtremisError if there is no scheduler or worker, or if their code differs."""
    names = ("address", "timeout", "scheduler_file", "name")
    settings = options.get_all_options(drop_default=True, current_only=True)
    settings = {name: value for name, value in settings.items() if name in names}
    if not {"address", "scheduler_file"} & settings.keys():
        try:
            cluster = LocalCluster(threads_per_worker=1, dashboard_address=None, silence_logs=logging.CRITICAL)
        except RuntimeError as error:
            raise ExtremisError(
                f"Dask cannot start workers here: {error} Check that /dev/shm is writable and has room (docker run "
                "--shm-size=1g), or give the address of a running scheduler (--dask_client_address)."
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
            f"the workers of the Dask scheduler {where} lack Extremis ({error}). Install Extremis in their environment."
        ) from error
    with client:
        other = {worker: version for worker, version in versions.items() if version != code_version()}
        if other:
            worker, version = min(other.items())
            raise ExtremisError(
                f"the Dask worker {worker} has Extremis {version}, but this process has {code_version()}. Install the "
                "same version."
            )
        yield client
