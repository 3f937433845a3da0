"""Turn engine failures into messages. For a known failure, the message names the setting to change; else the cause."""

import re
from collections.abc import Callable

from schemas.errors import ExtremisError, InputError

_MEBIBYTE = 1 << 20
_SPARE = 2  # factor on the amount that was lacking: later tasks have not taken their share yet

_CAUSE = re.compile(r"^\s*(?:Caused by: )?((?:[\w$]+\.)+[\w$]*(?:Error|Exception|Failure)\b.*)$", re.MULTILINE)
_CAUSED_BY = re.compile(r"^\s*Caused by: (.+)$", re.MULTILINE)
_STATE = re.compile(r"^Pipeline \S+ failed in state \w+: ")  # Beam's text before the engine's message
_PYTHON = re.compile(r"Traceback \(most recent call last\):")
_PYTHON_CAUSE = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*?)(?: \[while running '|$)", re.MULTILINE
)
# Beam's own check, if workers use a different boot program.
_OTHER_BEAM = re.compile(r"Submission environment: \S+/(\S+?)\. Runtime environment: \S+/(\S+?)\.(?:\s|$)")
_LONGEST = 300  # characters of an unknown cause


def _network_buffers(match: re.Match[str], text: str) -> str:
    required, available = int(match[1].replace(",", "")), int(match[2].replace(",", ""))
    total = re.search(r"currently set to ([\d,]+) of ([\d,]+) bytes", text)
    number, size = (int(each.replace(",", "")) for each in total.groups()) if total else (available, 32768)
    mebibytes = -(-(number + required - available) * size * _SPARE // _MEBIBYTE)
    return (
        f"Flink has too few network buffers: a task needs {required:,}, and {available:,} are free. On each "
        f"TaskManager set taskmanager.memory.network.min and .max to {mebibytes}mb or more, or use one slot, or lower "
        "--parallelism."
    )


def _direct_memory(match: re.Match[str], text: str) -> str:
    limit = re.search(r"limit: (\d+)", text)
    now = f" (now {int(limit[1]) / _MEBIBYTE:.0f}mb in total)" if limit else ""
    return (
        f"Flink has too little direct memory{now}: a worker asked for {match[1]} bytes. Set "
        "taskmanager.memory.task.off-heap.size to 512mb or more on each TaskManager."
    )


Messages = dict[str, str | Callable[[re.Match[str], str], str]]

# Each pattern of an engine's text has a message with the matched groups, or a function that makes the message.
_MEMORY: Messages = {
    r"Cannot reserve (\d+) bytes of direct buffer memory": _direct_memory,
    r"OutOfMemoryError: Direct buffer memory()": _direct_memory,
    r"OutOfMemoryError: Metaspace()": (
        "the engine ran out of memory for Java's classes (metaspace). Put Beam's jar into the engine's folder lib on "
        "each machine, so that jobs do not load their own copies, or set taskmanager.memory.jvm-metaspace.size to "
        "512mb or more."
    ),
    r"OutOfMemoryError: (Java heap space|GC overhead limit exceeded)": (
        "the engine ran out of heap ({0}). Give more heap: on Flink "
        "taskmanager.memory.task.heap.size (1gb or more), on Spark spark.executor.memory (2500m or more)."
    ),
}
# Errors of options or set-up, before any work begins.
_SETUP: Messages = {
    r"Insufficient number of network buffers: required ([\d,]+), but only ([\d,]+) available": _network_buffers,
    r"NoResourceAvailableException|Could not acquire the minimum required resources|Slot request .* timed? ?out|"
    r"TimeoutException: Timeout has occurred: \d+ ms": (  # the remaining text of a request for slots
        "Flink has no free slot for the job. Start TaskManagers, end other jobs, raise taskmanager.numberOfTaskSlots, "
        "or lower --parallelism to the number of free slots."
    ),
    r'Cannot run program "docker"': (
        "the workers' machines have no Docker, which the environment DOCKER (the default) needs. Give "
        '--environment_type=PROCESS and --environment_config=\'{{"command": "/path/to/extremis-worker"}}\'.'
    ),
    r'Cannot run program "([^"]+)"[^\n]*?(No such file or directory|Permission denied)': (
        "a worker's machine cannot start {0} ({1}), the command of --environment_config. Install Extremis with its "
        "extra `pipelines` at the same path on every machine, and give the path of its bin/extremis-worker."
    ),
    r"IOException: error=\d+, ([^\n.]+)": (  # the remaining text if the engine reports only the innermost cause
        "a machine of the engine cannot start its workers ({0}). With --environment_type=PROCESS, every machine needs "
        "the command of --environment_config: bin/extremis-worker of an environment at the same path. With DOCKER (the "
        "default), every machine needs Docker."
    ),
    r"Process died with exit code (-?\d+)": (
        "a worker ended with status {0} before it answered. Try `extremis-worker --help` on a machine of the engine: "
        "its environment needs the same versions of Extremis and Beam. The engine's log has details."
    ),
    r"(?:ClassNotFoundException|NoClassDefFoundError): (org[./]apache[./](?:beam|flink|spark)[\w./$]*)": (
        "the engine lacks the class {0}: Beam's job server was built for another version of the engine."
    ),
    r"(?:ConnectException|Connection refused)[^\n]*?localhost/127\.0\.0\.1:(\d+)": (
        "nothing listens on localhost:{0}, where the engine expects its master or a worker pool. Start this server, or "
        "give an address that the engine's machines can reach."
    ),
    r"ConnectException|Connection refused": (
        "the job server cannot reach the master of its engine at the address in its options. Start the master, or "
        "start the job server with another address. With --flink_master=HOST:PORT, Extremis checks Flink first."
    ),
    r"(?i)(?:artifact[^\n]*(?:denied|refused|no such file|not found)|FileNotFoundException[^\n]*artifact)": (
        "the engine refused the job's artifacts. Start the job server with an --artifacts-dir that the job server and "
        "the engine's machines can read and write. Set --artifact_endpoint to the address that the job server listens "
        "on."
    ),
}
_RUNNING: Messages = {
    r"TaskManager with id (\S+) is no longer reachable|Heartbeat of TaskManager with id (\S+) timed out": (
        "Flink lost the TaskManager {1}{0}; most likely it ran out of memory. Give the TaskManager more memory, and "
        "let Flink retry with restart-strategy.type: fixed-delay."
    ),
    r"Only one SparkContext should be running in this JVM()": (
        "Spark's job server runs one job at a time, and a job is running, perhaps from a command that was killed. Wait "
        "until that job has ended, or restart the job server."
    ),
    r"ExecutorLostFailure \(executor (\S+) exited": (
        "Spark lost executor {0} repeatedly; most likely it ran out of memory. Give executors more memory with "
        "spark.executor.memory, or fewer cores."
    ),
    r"Multiplexer hanging up|Runner closed connection|[Cc]all (?:is|already) (?:closed|cancelled)": (
        "a worker process ended too early; most likely it ran out of memory. Give the machine more memory, or start "
        "fewer workers. To let Flink retry, set restart-strategy.type: fixed-delay."
    ),
}


def explain(text: str) -> ExtremisError:
    """Return the error for the engine failure described in `text`, which may contain Java stack traces."""
    for pattern, message in (_MEMORY | _SETUP | _RUNNING).items():
        if match := re.search(pattern, text):
            said = message(match, text) if callable(message) else message.format(*match.groups(default=""))
            return InputError(said) if pattern in _SETUP else ExtremisError(said)
    return ExtremisError(f"the engine failed: {first_cause(text)}. The engine's log has details; -v shows more.")


def failure(text: str, service: bool = False) -> Exception:
    """Return the error that a message from an engine or service describes: a worker's error or an engine failure."""
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
            f"Dataflow refused the job, ended the job, or cannot be reached: {first_cause(text)}. See the job's page, "
            "and check that this machine has credentials (GOOGLE_APPLICATION_CREDENTIALS) for the project and the "
            "buckets."
        )
    return explain(text)


def first_cause(text: str) -> str:
    """Return the innermost cause in a stack trace, as one line."""
    text = _STATE.sub("", text)
    causes = _CAUSED_BY.findall(text) or _CAUSE.findall(text) or [text.strip() or "the engine gives no reason"]
    return " ".join(causes[-1].split())[:_LONGEST].rstrip(". ")


def python_cause(text: str) -> str | None:
    """Return the last line of a worker's Python traceback in `text`; None if `text` has no traceback."""
    lines = _PYTHON_CAUSE.findall(text) if _PYTHON.search(text) else []
    return lines[-1].strip() if lines else None
