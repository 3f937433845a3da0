"""Needs of the pipelines on a cluster: Beam's options, memory of a slot, staging and network, hours."""

from dataclasses import dataclass
from typing import Any

from extremis.planning.workload import Workload
from schemas.errors import InputError

PIPELINES = ("shard", "mine", "cluster")  # steps of a run that are pipelines

# Bytes of a line of JSON: four sets have 4.2 to 5.2 characters a token, names of fields and quotes around them.
_TOKEN, _POINT, _LABEL, _REFERENCE = 4.7, 40, 25, 4
_STAGED = 1.05  # most bytes in staging at a time, tables included, over those of the input: 1.00 to 1.06 measured
_WRITTEN = 1.2  # bytes that are written to staging in all, over those of the input: 0.7 to 1.4 on four sets
_MACHINES = {"n2-highmem-2": 16 << 30, "n2-highmem-4": 32 << 30, "n2-highmem-8": 64 << 30, "n2-highmem-16": 128 << 30}

_JOB_SERVER = (
    "--runner=PortableRunner --job_endpoint=JOBSERVER:8099 --artifact_endpoint=JOBSERVER:8098 "
    '--environment_type=PROCESS --environment_config=\'{{"command": "/opt/extremis/bin/extremis-worker"}}\' '
    "--parallelism={workers}"
)
_DATAFLOW = (
    "--runner=DataflowRunner --project=PROJECT --region=REGION --temp_location=gs://BUCKET/tmp "
    "--sdk_container_image=IMAGE --sdk_location=container --machine_type={machine} --max_num_workers={workers} "
    "--number_of_worker_harness_threads=1 --experiments=no_use_multiple_sdk_containers"
)


@dataclass(frozen=True)
class Engine:
    """Costs of an engine beside those of its Python workers.

    `options`: as Beam takes them; `slot`: bytes of Java beside a worker, 0 where that is not ours to say. `times`: its
    seconds over those of as many workers in process, `start`: seconds of each pipeline besides; None: not measured.
    """

    options: str
    slot: int
    times: float | None
    start: float = 0.0


# Bulk data goes through files, so that Java's memory does not grow with it. Times: `python -m benchmarks.engines`.
ENGINES = {
    "flink": Engine(_JOB_SERVER, 1728 << 20, 1.0, 7),  # a TaskManager of one slot, as Flink has it by default
    "spark": Engine(_JOB_SERVER, 1320 << 20, 1.0, 13),  # an executor of 1,200 MiB, and a tenth beside
    "dataflow": Engine(_DATAFLOW, 0, None),
}
_PIPELINES_OF_A_STEP = {"shard": 5, "mine": 2, "cluster": 3}  # the check of workers among them


def input_bytes(workload: Workload) -> int:
    """Estimate the bytes of the input as lines of JSON, uncompressed."""
    reference = workload.key_bytes + _REFERENCE
    point = _TOKEN * workload.tokens + workload.key_bytes + workload.labels_per_query * reference + _POINT
    return int(workload.queries * point + workload.labels * (workload.text_bytes + workload.key_bytes + _LABEL))


def plan_engine(
    name: str, workload: Workload, memory: dict[str, int], tables: int, seconds: dict[str, float] | None
) -> dict[str, Any]:
    """Return what the pipelines take on the engine `name`: `memory` of each step's process, and its `seconds`.

    `tables`: bytes of queries and labels. Raises InputError: no machine of Dataflow that is large enough.
    """
    engine = ENGINES[name]
    worker = max(memory[step] for step in PIPELINES if step in memory)
    source = input_bytes(workload)
    machine = next((machine for machine, size in _MACHINES.items() if size >= worker), None)
    if machine is None and name == "dataflow":
        most = ", ".join(_MACHINES)
        raise InputError(f"--engine dataflow: a worker needs {worker:,} bytes, more than {most} have. Lower --memory.")
    hours = None
    if seconds is not None and engine.times is not None:
        hours = {
            step: (seconds[step] * engine.times + engine.start * _PIPELINES_OF_A_STEP[step]) / 3600
            for step in PIPELINES
            if step in seconds and step in memory
        }
    return {
        "engine": name,
        "workers": workload.workers,
        "options": engine.options.format(workers=workload.workers, machine=machine),
        "worker_bytes": worker,
        "slot_bytes": worker + engine.slot,
        "input_bytes": source,
        "staging_bytes": int(_STAGED * source),
        "network_bytes": int(source + 2 * _WRITTEN * source + tables),
        "is_measured": engine.times is not None,
        "hours": hours,
    }
