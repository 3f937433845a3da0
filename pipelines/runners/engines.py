"""Engines (Flink, Spark and Prism) behind a Beam job server, which runs the jobs of a command one after the other.

Flink's REST interface cancels jobs, and tells what a job server reports late or not at all. What an engine says of a
failure becomes one message: for the failures that users meet, it names what to change, otherwise the cause.
"""

import contextlib
import copy
import functools
import json
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import apache_beam as beam
import grpc
from apache_beam.options import pipeline_options as options
from apache_beam.portability.api import beam_job_api_pb2
from apache_beam.runners.portability.job_server import SubprocessJobServer
from apache_beam.runners.portability.portable_runner import PortableMetrics, PortableRunner
from apache_beam.runners.runner import PipelineResult
from apache_beam.utils.subprocess_server import pick_port
from google.protobuf import json_format

from pipelines.progress import Progress, silent
from pipelines.runners.worker import OPTION, Question, serve_pool
from schemas import storage
from schemas.errors import AccessError, ExtremisError, InputError, PeerError, RoomError, option
from schemas.waits import Wait, waiting

START_SECONDS = 60.0  # timeout for the first answer of a worker
_CONNECT_SECONDS = 5.0
_SERVER_SECONDS = 120.0  # timeout for our own job server to start listening
_CANCEL_SECONDS = 10.0
# Time between checks: of a job, of answers in local storage, of answers in remote storage.
_POLL_SECONDS, _LOCAL_SECONDS, _REMOTE_SECONDS = 0.2, 0.5, 5.0
# A stage reuses the worker of the previous stage. The time is shorter than Flink's wait before a retry (1 s), because
# otherwise each retry would find a dead worker.
_CACHE_MILLISECONDS = "500"
_CHECKED_OPTIONS: set[tuple[str, ...]] = set()  # Beam options for which workers have already answered this process
# A job server ends with this process in every case, because the pipe on its standard input closes.
_SERVER_SCRIPT = 'exec 3<&0; "$@" 3<&- & server=$!; { cat <&3; kill $server; } > /dev/null 2>&1 & wait $server'
_SERVER_REMEDIES = {
    "FlinkRunner": "Give Beam's jar for your Flink as --flink_job_server_jar=PATH",
    "SparkRunner": "Give Beam's jar for your Spark as --spark_job_server_jar=PATH",
    "PrismRunner": "Build Prism with Go (go install github.com/apache/beam/sdks/v2/go/cmd/prism@v{version}), and give "
    "the program as --prism_location=PATH",
}
_ANSWER_SECONDS = 5.0
_SLOT_SECONDS = 5.0  # time until the slots of a job that has just ended are free
_ENDED = ("FINISHED", "FAILED", "CANCELED")
_JAVA_ERROR = re.compile(r"^\s*((?:[\w$]+\.)+[\w$]*(?:Error|Exception|Failure)\b.*)$", re.MULTILINE)
_PYTHON_CAUSE = re.compile(
    r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*?)(?: \[while running '|$)", re.MULTILINE
)
_LONGEST = 300  # characters of an unknown cause
_STARTS_MANAGERS = ("kubernetes.cluster-id", "yarn.application.id")  # settings of a JobManager that starts TaskManagers


class StartOptions(options.PipelineOptions):
    """Beam options that Extremis adds: `--start_timeout` in seconds, and the start-up question for the workers."""

    @classmethod
    def _add_argparse_args(cls, parser: "options._BeamArgumentParser") -> None:
        parser.add_argument(
            "--start_timeout",
            "--start-timeout",
            type=float,
            default=START_SECONDS,
            help="Seconds to wait for the first answer of an engine's workers. 0: skip this check.",
        )
        parser.add_argument(
            f"--{OPTION}", help="Internal: the start-up check that workers answer. Extremis sets this option itself."
        )


class Engine:
    """The engine named by the Beam options, for the jobs of one command.

    `start` and `close` manage the job server and the LOOPBACK workers. Raises InputError if the options name no engine.
    """

    def __init__(self, runner: PortableRunner, beam_options: options.PipelineOptions, flags: Sequence[str]) -> None:
        self._runner, self._options, self._flags = runner, beam_options, tuple(flags)
        self._portable = beam_options.view_as(options.PortableOptions)
        if type(runner) is PortableRunner and not self._portable.job_endpoint:
            raise InputError("--runner=PortableRunner needs the address of a job server: --job_endpoint=HOST:PORT.")
        debug = beam_options.view_as(options.DebugOptions)
        # Beam would ask pip for the installed packages, which takes a second per job.
        debug.add_experiment("disable_logging_submission_environment")
        debug.add_experiment("disable_prism_server_singleton")
        if not any(flag.startswith("--environment_cache_millis") for flag in flags):
            self._portable.environment_cache_millis = _CACHE_MILLISECONDS
        self._flink = Flink.of(beam_options)
        self._has_external_server = self._portable.job_endpoint not in (None, "embed")
        if self._has_external_server and type(runner) is PortableRunner:  # the job server knows the address of Flink
            beam_options.view_as(options.FlinkRunnerOptions).flink_master = "[auto]"
        self._name = beam_options.view_as(options.GoogleCloudOptions).job_name or "extremis"
        self._stack, self._environment = contextlib.ExitStack(), ""  # a kind of environment once the servers run
        self._say: Progress = silent
        self._seconds = float(beam_options.view_as(StartOptions).start_timeout)
        self.question: Question | None = None

    def ask(self, reads: Sequence[str], folder: str, say: Progress) -> None:
        """Make the workers check, when the first job starts, that they can read `reads` and write below `folder`.

        Asks only once per process, and never with `--start_timeout=0`. Raises ExtremisError if there is no job server
        or no free slot.
        """
        self._say = say
        self.start()
        if self._flags in _CHECKED_OPTIONS or not self._seconds:
            return
        if self._flink is not None:
            self._flink.require_slots(max(1, self._options.view_as(options.FlinkRunnerOptions).parallelism))
        self.question = Question.ask(reads, folder)
        self._options.view_as(StartOptions).extremis_question = json.dumps(asdict(self.question))

    def start(self) -> None:
        """Start the servers that the jobs need, unless they are running. Raises ExtremisError, InputError."""
        if self._environment:
            return
        _silence_beam()
        portable = self._portable
        try:
            self._runner.default_environment(self._options)  # sets environment_type where LOOPBACK is the default
        except ValueError as error:
            raise InputError(f"Beam options: {error}") from None
        require_job_server(portable)
        kind = portable.environment_type or "DOCKER"
        if kind == "LOOPBACK":
            port = self._stack.enter_context(serve_pool(silent=True))
            portable.environment_type, portable.environment_config = "EXTERNAL", f"localhost:{port}"
        if not portable.job_endpoint:
            self._start_job_server()
        self._environment = kind

    def close(self) -> None:
        """Stop the servers that `start` has started."""
        self._stack.close()

    def name_job(self) -> str:
        """Return a name for the next job, and set the name in the options that all following pipelines use."""
        self.start()
        name = f"{self._name}-{secrets.token_hex(4)}"
        self._options.view_as(options.GoogleCloudOptions).job_name = name
        return name

    def run(self, pipeline: beam.Pipeline, name: str) -> Any:
        """Run a pipeline to its end and return its metrics. Raises ExtremisError, RuntimeError.

        After an error, the job is cancelled. If the job may still be running, the message says so.
        """
        result: PipelineResult | None = None
        with _exit_on_signals():
            try:
                result = pipeline.run()
                job = _in_thread(result.wait_until_finish)
                self._wait(job, name)
                if self.question is not None and self._flags not in _CHECKED_OPTIONS:
                    self._say(self.question.summarize())
                    _CHECKED_OPTIONS.add(self._flags)
                with contextlib.suppress(Exception):  # any error: a runner without metrics, a lost job server
                    return result.metrics() if job.done() or self._flink is None else self._flink.metrics(name)
            except BaseException as error:
                # Beam raises RuntimeError for a failed job; an interrupt may come after a job has begun and before
                # Beam reports the job.
                begun = result is not None or not isinstance(error, Exception)
                remains = self._cancel(result, name) if begun and not isinstance(error, RuntimeError) else ""
                if isinstance(error, ExtremisError):
                    raise type(error)(f"{error} {remains}".strip()) from None
                if isinstance(error, grpc.RpcError):
                    raise PeerError(f"{self._explain_lost_server(error)} {remains}".strip()) from None
                if remains:
                    self._say(remains)
                raise
        return None

    def _wait(self, job: "futures.Future[Any]", name: str) -> None:
        """Wait for the end of a job. Raises its error, what a worker lacks, PeerError if none answers."""
        began, question = time.monotonic(), self.question
        answered = question is None or self._flags in _CHECKED_OPTIONS
        pause = _LOCAL_SECONDS if question is not None and storage.is_local(question.folder) else _REMOTE_SECONDS
        due = began + pause
        with contextlib.ExitStack() as waits:
            if not answered:
                waits.enter_context(Wait("an answer from the workers", seconds=self._seconds))
            while not futures.wait([job], _POLL_SECONDS).done:
                if self._flink is not None and self._flink.find(name)[1] == "FINISHED":
                    return
                if question is None or time.monotonic() < due:
                    continue
                due = time.monotonic() + pause
                if question.answers():
                    answered = True
                    waits.close()
                elif not answered and time.monotonic() > began + self._seconds:
                    raise self._no_answer_error()
        job.result()

    def _no_answer_error(self) -> PeerError:
        portable, kind = self._portable, self._environment
        settings = portable.environment_config or ",".join(portable.environment_options or ())
        remedies = {
            "PROCESS": (
                f"On every machine of the engine, try {settings} with --help. The environment of this program needs "
                "the same versions of Extremis and Beam"
            ),
            "DOCKER": f"Every machine of the engine needs Docker and the image {settings or 'of Beam'}",
            "EXTERNAL": f"On each machine of the engine, `extremis-worker --worker_pool` has to listen at {settings}",
            "LOOPBACK": "LOOPBACK works only on a single machine: the engine must reach this process at localhost",
        }
        return PeerError(
            f"no worker answered within {self._seconds:g} s. {remedies.get(kind, f'See what {kind} needs')}. Also "
            f"check on the engine's web page that a slot is free. {option('start_timeout')} sets how long to wait."
        )

    def _explain_lost_server(self, error: grpc.RpcError) -> str:
        where = f"the job server at {self._portable.job_endpoint}"
        code = error.code() if isinstance(error, grpc.Call) else None
        if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
            return f"{where} has ended, or cannot be reached. See the server's log."
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"{where} does not answer. See the server's log, and check that the server can reach the engine."
        return str(explain(str(error)))

    def _cancel(self, result: PipelineResult | None, name: str) -> str:
        """Cancel a job. Returns "" if the job has ended, else a message that says where it may still be running."""
        asked = [] if result is None else [_in_thread(result.cancel)]
        if self._flink is not None:
            if self._flink.cancel(name, _CANCEL_SECONDS):
                return ""
            where = f"{self._flink.url}/jobs/{self._flink.find(name)[0] or 'ID'}?mode=cancel"
            return f"The job {name} may still be using slots on Flink. End the job with: curl -X PATCH '{where}'."
        futures.wait(asked, _CANCEL_SECONDS)
        if not self._has_external_server:
            return ""  # the job ends with its job server
        return (
            f"The job {name} was cancelled on the job server, but may still be using slots on Flink: see Flink's web "
            "page. With --flink_master=HOST:PORT, Extremis also ends the job on Flink."
        )

    def _start_job_server(self) -> None:
        """Start the runner's own job server, which serves all jobs. Raises InputError."""
        name = type(self._runner).__name__
        remedy = _SERVER_REMEDIES.get(name, "See the runner's documentation").format(version=beam.version.__version__)
        (port,) = pick_port(None)
        own = self._options.view_as(options.JobServerOptions)
        own.job_port = own.job_port or port
        server = self._runner.default_job_server(copy.deepcopy(self._options))  # the call changes the options
        # Beam would stop the server with a signal handler, which only the main thread may set.
        server = getattr(server, "_job_server", server)
        if not isinstance(server, SubprocessJobServer):  # the server runs in this process
            return
        server._local_temp_root = folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="extremis-"))
        try:
            command, endpoint = server.subprocess_cmd_and_endpoint()
        except Exception as error:  # any error, for example if Beam cannot download the server
            raise InputError(f"cannot start a job server for {name}: {first_cause(str(error))}. {remedy}.") from None
        if shutil.which(str(command[0])) is None:
            raise InputError(f"{name} needs the program {command[0]}, which was not found. {remedy}.")
        log = Path(folder) / "job-server.log"
        with log.open("w") as out:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _SERVER_SCRIPT, "sh", *map(str, command)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C must reach only this process, which cancels its job first
            )
        self._stack.callback(process.communicate)  # closes the pipe
        for _ in waiting("the job server to start", seconds=_SERVER_SECONDS, every=_POLL_SECONDS):
            if process.poll() is not None:
                break
            with contextlib.suppress(OSError), _connect(endpoint):
                self._portable.job_endpoint = endpoint
                return
        said = " ".join(log.read_text(errors="replace").split())[-300:]
        raise InputError(f"the job server for {name} did not start ({command[0]}): {said or 'no output'}. {remedy}.")


def _in_thread(function: Callable[[], Any]) -> "futures.Future[Any]":
    """Call a function that may never return in a thread that ends with this process."""
    future = futures.Future[Any]()

    def work() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, name="extremis-job", daemon=True).start()
    return future


@functools.cache
def _silence_beam() -> None:
    """Suppress errors that Beam's waiting threads print about a lost job server; `Engine.run` reports the loss."""
    before = threading.excepthook

    def hook(ended: threading.ExceptHookArgs) -> None:
        if ended.thread is None or not ended.thread.name.startswith("wait_until_finish"):
            before(ended)

    threading.excepthook = hook


def require_job_server(portable: options.PortableOptions) -> None:
    """Raise PeerError if nothing listens at the job server's endpoints; without this check, Beam waits for minutes."""
    for flag, endpoint in (("job_endpoint", portable.job_endpoint), ("artifact_endpoint", portable.artifact_endpoint)):
        if endpoint and endpoint != "embed":
            try:
                _connect(endpoint).close()
            except ValueError:
                raise InputError(f"--{flag}={endpoint}: expected host and port, such as localhost:8099.") from None
            except OSError as error:
                raise PeerError(
                    f"no job server at --{flag}={endpoint}: {error.strerror or error}. Start Beam's job server for "
                    "your engine, or give the address of a running job server."
                ) from None


def _connect(endpoint: str) -> socket.socket:
    """Connect to an address. Raises OSError, ValueError."""
    parts = urlsplit(f"//{endpoint}")
    if not parts.hostname or not parts.port:
        raise ValueError(endpoint)
    return socket.create_connection((parts.hostname, parts.port), _CONNECT_SECONDS)


@contextlib.contextmanager
def _exit_on_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block as Ctrl-C does. Otherwise, a job would outlive its launcher."""
    ends = (signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    ours = [number for number in ends if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@dataclass(frozen=True)
class Flink:
    """Flink's JobManager at `url`, the address in --flink_master."""

    url: str

    @staticmethod
    def of(beam_options: options.PipelineOptions) -> "Flink | None":
        """Return the JobManager that the options name, or None."""
        master = beam_options.view_as(options.FlinkRunnerOptions).flink_master or ""
        if not master or master.startswith("["):
            return None
        return Flink((master if "://" in master else f"http://{master}").rstrip("/"))

    def ask(self, path: str, method: str = "GET") -> Any:
        """Return the JobManager's answer to a request. Raises OSError, ValueError."""
        request = urllib.request.Request(f"{self.url}/{path}", method=method)
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            return json.load(answer)

    def require_slots(self, parallelism: int) -> None:
        """Check for free slots. Raises PeerError if there are too few, or if Flink does not answer."""
        counts: dict[str, Any] = {}
        try:
            for _ in waiting("free slots on Flink", seconds=_SLOT_SECONDS, every=0.5):
                counts = self.ask("overview")
                if counts["slots-available"] >= parallelism:
                    return
            settings = {each["key"] for each in self.ask("jobmanager/config")}
        except (OSError, ValueError, KeyError) as error:
            raise PeerError(
                f"no Flink JobManager answers at --flink_master={self.url}: {getattr(error, 'reason', error)}. "
                "Start the JobManager, or give the address of its REST interface."
            ) from None
        if settings.isdisjoint(_STARTS_MANAGERS):
            raise PeerError(
                f"Flink at {self.url} has too few free slots for the job: {counts['slots-available']} of "
                f"{counts['slots-total']} slots are free on {counts['taskmanagers']} TaskManagers, {parallelism} are "
                f"needed, and {counts['jobs-running']} jobs are running. Lower the parallelism, start TaskManagers, "
                "raise taskmanager.numberOfTaskSlots, or end other jobs."
            )

    def find(self, name: str) -> tuple[str, str]:
        """Return the job's id and state; both are empty if no job has this name, or if Flink does not answer."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            for job in self.ask("jobs/overview")["jobs"]:
                if job["name"] == name:
                    return job["jid"], job["state"]
        return "", ""

    def cancel(self, name: str, seconds: float) -> bool:
        """Cancel the job `name` as soon as Flink lists the job; return whether the job ended within `seconds`."""
        for _ in waiting("Flink to cancel the job", seconds=seconds, every=0.3):
            number, state = self.find(name)
            if state in _ENDED:
                return True
            if number:
                with contextlib.suppress(OSError, ValueError):
                    self.ask(f"jobs/{number}?mode=cancel", "PATCH")
        return False

    def metrics(self, name: str) -> PortableMetrics:
        """Return Beam's metrics of a finished job. Raises OSError, ValueError, LookupError."""
        found = self.ask(f"jobs/{self.find(name)[0]}/accumulators")["user-task-accumulators"]
        values = {each["name"]: each["value"] for each in found}
        response = json_format.Parse(values["__metricscontainers"], beam_job_api_pb2.GetJobMetricsResponse())
        return PortableMetrics(response)


# Failures that users meet: a pattern of what an engine says, and the message, with the pattern's groups in it. An
# InputError is one of options or set-up, which lasts; a PeerError may pass, such as an engine that is not there yet.
_FAILURES: tuple[tuple[str, type[ExtremisError], str], ...] = (
    (
        r"OutOfMemoryError: Metaspace",
        RoomError,
        "the engine ran out of memory for Java's classes (metaspace). Put Beam's jar into the engine's folder lib on "
        "each machine, so that jobs do not load their own copies, or set taskmanager.memory.jvm-metaspace.size to "
        "512mb or more.",
    ),
    (
        r"OutOfMemoryError: ([^\n]+)",
        RoomError,
        "the engine ran out of memory ({0}). Give more: on Flink taskmanager.memory.task.heap.size (1gb or more) or "
        ".task.off-heap.size (512mb or more), on Spark spark.executor.memory (2500m or more).",
    ),
    (
        r"Insufficient number of network buffers: required ([\d,]+), but only ([\d,]+) available",
        InputError,
        "Flink has too few network buffers: a task needs {0}, and {1} are free. On each TaskManager set "
        "taskmanager.memory.network.min and .max to 256mb or more, or use one slot, or lower --parallelism.",
    ),
    (
        r"NoResourceAvailableException|Could not acquire the minimum required resources|Slot request .* timed? ?out|"
        r"TimeoutException: Timeout has occurred: \d+ ms",  # the remaining text of a request for slots
        PeerError,
        "Flink has no free slot for the job. Start TaskManagers, end other jobs, raise "
        "taskmanager.numberOfTaskSlots, or lower --parallelism to the number of free slots.",
    ),
    (
        r'(?:Cannot run program "[^"]+"[^\n]*?|IOException: )error=\d+, ([^\n.]+)',
        InputError,
        "a machine of the engine cannot start its workers ({0}). With --environment_type=PROCESS, every machine needs "
        "the command of --environment_config: bin/extremis-worker of an environment at the same path. With DOCKER (the "
        "default), every machine needs Docker.",
    ),
    (
        r"Process died with exit code (?!137\b)(-?\d+)",
        InputError,
        "a worker ended with status {0} before it answered. Try `extremis-worker --help` on a machine of the engine: "
        "its environment needs the same versions of Extremis and Beam. The engine's log has details.",
    ),
    (
        r"(?:ClassNotFoundException|NoClassDefFoundError): (org[./]apache[./](?:beam|flink|spark)[\w./$]*)",
        InputError,
        "the engine lacks the class {0}: Beam's job server was built for another version of the engine.",
    ),
    (
        r"(?:ConnectException|Connection refused)[^\n]*?localhost/127\.0\.0\.1:(\d+)",
        PeerError,
        "nothing listens on localhost:{0}, where the engine expects its master or a worker pool. Start this server, or "
        "give an address that the engine's machines can reach.",
    ),
    (
        r"ConnectException|Connection refused",
        PeerError,
        "the job server cannot reach the master of its engine at the address in its options. Start the master, or "
        "start the job server with another address. With --flink_master=HOST:PORT, Extremis checks Flink first.",
    ),
    (
        r"TaskManager with id (\S+) (?:is no longer reachable|timed out)|ExecutorLostFailure \((executor \S+) exited",
        PeerError,
        "the engine lost {0}{1} repeatedly; most likely it ran out of memory. Give it more memory, on Flink with "
        "taskmanager.memory.process.size, on Spark with spark.executor.memory. To let Flink retry, set "
        "restart-strategy.type: fixed-delay.",
    ),
    (
        r"Process died with exit code 137|Multiplexer hanging up|Runner closed connection|"
        r"[Cc]all (?:is|already) (?:closed|cancelled)",
        PeerError,
        "a worker process ended too early; most likely it ran out of memory. Give the machine more memory, or start "
        "fewer workers. To let Flink retry, set restart-strategy.type: fixed-delay.",
    ),
)


def explain(text: str) -> ExtremisError:
    """Return the error for the engine failure described in `text`, which may contain Java stack traces."""
    for pattern, kind, message in _FAILURES:
        if match := re.search(pattern, text):
            return kind(message.format(*match.groups(default="")))
    return PeerError(f"the engine failed: {first_cause(text)}. The engine's log has details; -v shows more.")


def failure(text: str, service: bool = False) -> Exception:
    """Return the error that a message from an engine or service describes: a worker's error or an engine failure."""
    faults = _PYTHON_CAUSE.findall(text) if "Traceback (most recent call last):" in text else []
    if faults:
        return RuntimeError(f"on a worker: {faults[-1].strip()}")
    if service:
        kind = AccessError if re.search(r"'status': '40[13]'|default credentials", text) else PeerError
        return kind(
            f"Dataflow refused the job, ended the job, or cannot be reached: {first_cause(text)}. See the job's page, "
            "and check that this machine has credentials (GOOGLE_APPLICATION_CREDENTIALS) for the project and the "
            "buckets."
        )
    return explain(text)


def first_cause(text: str) -> str:
    """Return the innermost cause in a stack trace, as one line."""
    text = re.sub(r"^Pipeline \S+ failed in state \w+: ", "", text)  # Beam's text before the engine's message
    causes = re.findall(r"^\s*Caused by: (.+)$", text, re.MULTILINE) or _JAVA_ERROR.findall(text)
    last = causes[-1] if causes else text.strip() or "the engine gives no reason"
    return " ".join(last.split())[:_LONGEST].rstrip(". ")
