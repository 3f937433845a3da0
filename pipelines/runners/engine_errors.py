"""Failures of engines as messages: of known ones what to set, of others the first cause in one line."""

import re
from collections.abc import Callable

from schemas.errors import ExtremisError, InputError

_MEBIBYTE = 1 << 20
_SPARE = 2  # times what was lacking first: the tasks behind it have taken none yet

_CAUSE = re.compile(r"^\s*(?:Caused by: )?((?:[\w$]+\.)+[\w$]*(?:Error|Exception|Failure)\b.*)$", re.MULTILINE)
_CAUSED_BY = re.compile(r"^\s*Caused by: (.+)$", re.MULTILINE)
_STATE = re.compile(r"^Pipeline \S+ failed in state \w+: ")  # Beam's words ahead of the engine's
_PYTHON = re.compile(r"Traceback \(most recent call last\):")
_PYTHON_CAUSE = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*?)(?: \[while running '|$)", re.MULTILINE
)
# Beam's own check, where workers have another boot program than ours.
_OTHER_BEAM = re.compile(r"Submission environment: \S+/(\S+?)\. Runtime environment: \S+/(\S+?)\.(?:\s|$)")
_LONGEST = 300  # characters of an unknown cause


def _network_buffers(match: re.Match[str], text: str) -> str:
    required, available = int(match[1].replace(",", "")), int(match[2].replace(",", ""))
    total = re.search(r"currently set to ([\d,]+) of ([\d,]+) bytes", text)
    number, size = (int(each.replace(",", "")) for each in total.groups()) if total else (available, 32768)
    mebibytes = -(-(number + required - available) * size * _SPARE // _MEBIBYTE)
    return (
        f"Flink has too few network buffers: a task needs {required:,}, {available:,} are free. On each TaskManager "
        f"set taskmanager.memory.network.min and .max to {mebibytes}mb or more, or give it one slot, or lower "
        "--parallelism."
    )


def _direct_memory(match: re.Match[str], text: str) -> str:
    limit = re.search(r"limit: (\d+)", text)
    now = f" (now {int(limit[1]) / _MEBIBYTE:.0f}mb in all)" if limit else ""
    return (
        f"Flink has too little direct memory{now}: a worker asked for {match[1]} bytes. Keep --exchange files, or set "
        "taskmanager.memory.task.off-heap.size to 512mb or more on each TaskManager."
    )


Messages = dict[str, str | Callable[[re.Match[str], str], str]]

# By a pattern of what an engine says: the message, with what the groups matched, or what makes it of match and text.
_MEMORY: Messages = {
    r"Cannot reserve (\d+) bytes of direct buffer memory": _direct_memory,
    r"OutOfMemoryError: Direct buffer memory()": _direct_memory,
    r"OutOfMemoryError: Metaspace()": (
        "the engine ran out of memory for Java's classes (metaspace). Put Beam's jar into the lib of each machine, so "
        "that no job brings its own; or set taskmanager.memory.jvm-metaspace.size to 512mb or more."
    ),
    r"OutOfMemoryError: (Java heap space|GC overhead limit exceeded)": (
        "the engine ran out of heap ({0}). Keep --exchange files, or give it more: on Flink "
        "taskmanager.memory.task.heap.size (1gb or more), on Spark spark.executor.memory (2500m or more)."
    ),
}
# What options or the set-up say wrong, before any work begins.
_SETUP: Messages = {
    r"Insufficient number of network buffers: required ([\d,]+), but only ([\d,]+) available": _network_buffers,
    r"NoResourceAvailableException|Could not acquire the minimum required resources|Slot request .* timed? ?out|"
    r"TimeoutException: Timeout has occurred: \d+ ms": (  # what is left of a request for slots
        "Flink has no free slot for the job. Start TaskManagers, end other jobs, raise "
        "taskmanager.numberOfTaskSlots, or lower --parallelism to the slots that are free."
    ),
    r'Cannot run program "docker"': (
        "the workers' machines have no Docker, which the environment DOCKER (the default) needs. Give "
        '--environment_type=PROCESS and --environment_config=\'{{"command": "/path/to/extremis-worker"}}\'.'
    ),
    r'Cannot run program "([^"]+)"[^\n]*?(No such file or directory|Permission denied)': (
        "a worker's machine cannot start {0} ({1}), the command of --environment_config. Install Extremis with its "
        "extra `pipelines` at the same path on every machine, and name its bin/extremis-worker."
    ),
    r"IOException: error=\d+, ([^\n.]+)": (  # what is left of it where the engine tells the innermost cause alone
        "a machine of the engine cannot start its workers ({0}): with --environment_type=PROCESS the command of "
        "--environment_config, bin/extremis-worker of an environment at the same path on every machine; with "
        "DOCKER (the default) docker."
    ),
    r"Process died with exit code (-?\d+)": (
        "a worker ended with status {0} before it answered. Try its command by hand on a machine of the engine "
        "(`extremis-worker --help`): its environment needs Extremis and Beam as here. The engine's log has more."
    ),
    r"(?:ClassNotFoundException|NoClassDefFoundError): (org[./]apache[./](?:beam|flink|spark)[\w./$]*)": (
        "the engine has no class {0}: its version is not the one that Beam's job server was built for."
    ),
    r"(?:ConnectException|Connection refused)[^\n]*?localhost/127\.0\.0\.1:(\d+)": (
        "nothing listens on localhost:{0}, where the engine looked for its master or for a worker pool. Start it, "
        "or give the address that the engine's machines know it by."
    ),
    r"ConnectException|Connection refused": (
        "the job server does not reach the master of its engine, whose address is among its own options. Start the "
        "master, or the job server with another address; --flink_master=HOST:PORT has Extremis ask Flink first."
    ),
    r"(?i)(?:artifact[^\n]*(?:denied|refused|no such file|not found)|FileNotFoundException[^\n]*artifact)": (
        "the engine refused the job's artifacts. Give the job server an --artifacts-dir that it and the engine's "
        "machines can read and write, and --artifact_endpoint the address that it listens on."
    ),
}
_RUNNING: Messages = {
    r"TaskManager with id (\S+) is no longer reachable|Heartbeat of TaskManager with id (\S+) timed out": (
        "Flink lost the TaskManager {0}{1}; it was out of memory, most likely. Give it more, and have Flink try "
        "again: restart-strategy.type: fixed-delay."
    ),
    r"Only one SparkContext should be running in this JVM()": (
        "Spark's job server runs one job at a time, and has one, of a command that was killed, maybe. Wait until "
        "it has ended, or start the job server again."
    ),
    r"ExecutorLostFailure \(executor (\S+) exited": (
        "Spark lost executor {0} again and again; it was out of memory, most likely. Give it more, by "
        "spark.executor.memory, or fewer cores."
    ),
    r"Multiplexer hanging up|Runner closed connection|[Cc]all (?:is|already) (?:closed|cancelled)": (
        "a worker process ended before its work was done. It was out of memory, most likely: give the machine more "
        "of it, or start fewer workers. Flink tries again with restart-strategy.type: fixed-delay."
    ),
}


def explain(text: str) -> ExtremisError:
    """Return the error for the failure of an engine that `text` tells of, with Java's traces or without."""
    for pattern, message in (_MEMORY | _SETUP | _RUNNING).items():
        if match := re.search(pattern, text):
            said = message(match, text) if callable(message) else message.format(*match.groups(default=""))
            return InputError(said) if pattern in _SETUP else ExtremisError(said)
    return ExtremisError(f"the engine failed: {first_cause(text)}. The engine's log has more, and so has -v.")


def failure(text: str, service: bool = False) -> Exception:
    """Return the error behind what an engine or a service says: a fault of ours on a worker, or one of its own."""
    if versions := _OTHER_BEAM.search(text):
        return InputError(
            f"a worker has {versions[2]}; the launching process has {versions[1]}. Install the same versions of Python "
            "and Beam on every machine of the engine, or in the image of its workers."
        )
    fault = python_cause(text)
    if fault:
        return RuntimeError(f"on a worker: {fault}")
    if service:
        return ExtremisError(
            f"Dataflow refused the job, ended it, or is not reached: {first_cause(text)}. See the job's page, if there "
            "is one, and that this machine has credentials (GOOGLE_APPLICATION_CREDENTIALS) for project and buckets."
        )
    return explain(text)


def first_cause(text: str) -> str:
    """Return the innermost cause of a trace on one line."""
    text = _STATE.sub("", text)
    causes = _CAUSED_BY.findall(text) or _CAUSE.findall(text) or [text.strip() or "it does not say why"]
    return " ".join(causes[-1].split())[:_LONGEST].rstrip(". ")


def python_cause(text: str) -> str | None:
    """Return the last line of a worker's own traceback in `text`; None where there is none."""
    lines = _PYTHON_CAUSE.findall(text) if _PYTHON.search(text) else []
    return lines[-1].strip() if lines else None
