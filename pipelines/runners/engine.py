"""Engines: clusters of Flink or Spark behind a Beam job server, and a check of their workers before a flow starts.

    numbers ─▶ answer: versions, cores, memory; read INPUT, write beside the output

What is wrong is one message that names the worker and the remedy, where a flow would fail late, or wait for ever.
"""

import contextlib
import json
import os
import platform
import queue
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, Protocol
from urllib.parse import urlsplit

import apache_beam
from apache_beam.options import pipeline_options as options
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.runners.runner import PipelineResult, PipelineRunner

from pipelines.common.flow import Flow
from pipelines.common.progress import Progress
from schemas import storage
from schemas.cores import cores
from schemas.errors import ExtremisError, InputError, StorageError
from schemas.manifest import code_version
from schemas.sizes import say_bytes
from schemas.storage import join
from schemas.waits import Wait

START_SECONDS = 60.0  # for the first answer of a worker
_CONNECT_SECONDS = 5.0


class StartOptions(options.PipelineOptions):
    """Our own Beam option: `--start_timeout`, seconds."""

    @classmethod
    def _add_argparse_args(cls, parser: "options._BeamArgumentParser") -> None:
        parser.add_argument(
            "--start_timeout",
            "--start-timeout",
            type=float,
            default=START_SECONDS,
            help="Seconds for the workers of Flink or Spark to answer before the pipeline starts. 0: do not ask.",
        )


def is_engine(runner: PipelineRunner | None) -> bool:
    """Return true where `runner` gives the pipeline to a job server."""
    return isinstance(runner, PortableRunner)


def prepare(pipeline_options: options.PipelineOptions) -> None:
    """Set what an engine is better off with: Beam would ask pip, for a second a job, what is installed here."""
    pipeline_options.view_as(options.DebugOptions).add_experiment("disable_logging_submission_environment")


def start_timeout(beam_options: Sequence[str]) -> float:
    """Return `--start_timeout`, in seconds."""
    return float(options.PipelineOptions(list(beam_options)).view_as(StartOptions).start_timeout)


def describe_environment(beam_options: Sequence[str]) -> tuple[str, str]:
    """Return the type of environment that workers run in, and its configuration."""
    portable = options.PipelineOptions(list(beam_options)).view_as(options.PortableOptions)
    settings = portable.environment_config or ",".join(portable.environment_options or ())
    return portable.environment_type or "DOCKER", settings


def require_job_server(beam_options: Sequence[str]) -> None:
    """Raise ExtremisError where nothing listens at the endpoints of the job server; Beam waits for minutes."""
    portable = options.PipelineOptions(list(beam_options)).view_as(options.PortableOptions)
    for flag, endpoint in (("job_endpoint", portable.job_endpoint), ("artifact_endpoint", portable.artifact_endpoint)):
        if endpoint and endpoint != "embed":
            host, port = _split(flag, endpoint)
            try:
                socket.create_connection((host, port), _CONNECT_SECONDS).close()
            except OSError as error:
                raise ExtremisError(
                    f"no job server at --{flag}={endpoint}: {error.strerror or error}. Start Beam's job server of your "
                    "engine there, or give the address where it listens."
                ) from None


def _split(flag: str, endpoint: str) -> tuple[str, int]:
    with contextlib.suppress(ValueError):
        parts = urlsplit(f"//{endpoint}")
        if parts.hostname and parts.port:
            return parts.hostname, parts.port
    raise InputError(f"--{flag}={endpoint}: give host and port, such as localhost:8099.")


@contextlib.contextmanager
def cancelling(results: Sequence[PipelineResult]) -> Iterator[None]:
    """Cancel the jobs of `results` where Ctrl-C, SIGTERM or SIGHUP ends the block: a job outlives its launcher."""
    main = threading.current_thread() is threading.main_thread()
    ends = (signal.SIGTERM, signal.SIGHUP) if main else ()
    ours = [number for number in ends if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _end)
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        for result in results:
            cancel(result)
        raise
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def cancel(result: PipelineResult) -> None:
    """Cancel a job, and wait some seconds at most for a job server that may be gone."""

    def ask() -> None:
        with contextlib.suppress(Exception):
            result.cancel()

    thread = threading.Thread(target=ask, name="cancel-job", daemon=True)
    thread.start()
    thread.join(2 * _CONNECT_SECONDS)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


_QUESTIONS = 32  # dealt out over the workers; each answers once
_ANSWERED: set[str] = set()  # on a worker: checks that it has answered
_PASSED: set[tuple[str, ...]] = set()  # Beam options whose workers have answered this process
_LAUNCHER = "launcher.json"


@dataclass(frozen=True)
class Versions:
    """Versions that launcher and workers share: of Extremis, Beam, and Python without its last part."""

    extremis: str
    beam: str
    python: str

    @staticmethod
    def here() -> "Versions":
        """Return those of this process."""
        return Versions(code_version(), apache_beam.version.__version__, ".".join(platform.python_version_tuple()[:2]))

    def __str__(self) -> str:
        return f"Extremis {self.extremis}, Beam {self.beam}, Python {self.python}"


@dataclass(frozen=True)
class Question:
    """Question to every worker: are the versions these, can it read `reads`, and write below `folder`?"""

    id: str
    versions: Versions
    reads: tuple[str, ...]
    folder: str
    asked: float  # seconds since 1970 by the launcher's clock


class _Runner(Protocol):
    def run(self, flow: Flow, *, started: Callable[[PipelineResult], Any]) -> None: ...


def check_workers(
    runner: _Runner, beam_options: Sequence[str], reads: Sequence[str], folder: str, say: Progress
) -> None:
    """Ask the workers of an engine before a flow that reads `reads` and writes below `folder`; once a process.

    Nothing is asked with `--start_timeout=0`. Raises ExtremisError: no job server, no worker within the time, another
    version, a place that a worker cannot reach; what the engine itself says is wrong.
    """
    seconds = start_timeout(beam_options)
    require_job_server(beam_options)
    if not seconds or tuple(beam_options) in _PASSED:
        return
    say("asking the workers")
    folder = join(folder, "check")
    question = Question(uuid.uuid4().hex, Versions.here(), tuple(reads), folder, time.time())
    storage.write_bytes(join(folder, _LAUNCHER), json.dumps(asdict(question)).encode(), durable=False)
    flow = Flow()
    flow.create("Questions", range(_QUESTIONS)).map("Answer", answer, question)
    _run_within(runner, flow, beam_options, seconds)
    answers = [json.loads(storage.read_bytes(join(folder, name))) for name in storage.list_names(folder)]
    workers = sorted((each for each in answers if "worker" in each), key=lambda each: str(each["worker"]))
    if not workers:
        raise ExtremisError(
            f"the workers answered, but nothing of it is in {folder}: they write elsewhere under this path. Use a "
            "shared file system or an object store for DATA, RUN and OUT."
        )
    _PASSED.add(tuple(beam_options))
    machines = {str(each["host"]): f"{each['cores']} cores, {say_bytes(each['memory'])}" for each in workers}
    last = max(each["seconds"] for each in workers)
    hosts = "; ".join(f"{host}: {facts}" for host, facts in sorted(machines.items()))
    say(f"{len(workers)} worker{'s' * (len(workers) > 1)} answered, the last after {last:.1f} s ({hosts})")


def answer(number: int, question: Question) -> None:
    """Answer on a worker, once a process. Raises ExtremisError, which names this worker and what it lacks."""
    if question.id in _ANSWERED:
        return
    host = socket.gethostname()
    worker = f"{host}, process {os.getpid()}"
    versions = Versions.here()
    if versions != question.versions:
        raise ExtremisError(
            f"the worker {worker} has {versions}; the launching process has {question.versions}. Install the same "
            "versions on every machine of the engine, or in the image of its workers."
        )
    for url in (join(question.folder, _LAUNCHER), *question.reads):
        _require_readable(worker, url)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts = {
        "worker": worker,
        "host": host,
        "cores": cores(),
        "memory": memory,
        "seconds": time.time() - question.asked,
    }
    try:
        body = json.dumps(facts).encode()
        storage.write_bytes(join(question.folder, f"{host}-{os.getpid()}.json"), body, durable=False)
    except (StorageError, OSError) as error:
        raise ExtremisError(
            f"the worker {worker} cannot write to {question.folder}: {error} Give it the right, or another place."
        ) from None
    _ANSWERED.add(question.id)


def _require_readable(worker: str, url: str) -> None:
    remedy = "Use a shared file system or an object store that every machine reaches under the same URL."
    try:
        if storage.exists(url):
            with storage.open_read(url) as file:
                file.read(1)
            return
    except (ExtremisError, OSError) as error:
        raise ExtremisError(f"the worker {worker} cannot read {url}: {error} {remedy}") from None
    raise ExtremisError(f"the worker {worker} sees no file {url}, which is there for the launching process. {remedy}")


def _run_within(runner: _Runner, flow: Flow, beam_options: Sequence[str], seconds: float) -> None:
    """Run `flow`; cancel it where it has not ended after `seconds`. Raises as `run`, and ExtremisError."""
    ended: queue.Queue[BaseException | None] = queue.Queue()
    started: list[PipelineResult] = []

    def work() -> None:
        try:
            runner.run(flow, started=started.append)
            ended.put(None)
        except BaseException as error:
            ended.put(error)

    threading.Thread(target=work, name="check-workers", daemon=True).start()
    with cancelling(started), Wait("an answer of the workers", seconds=seconds):
        try:
            error = ended.get(timeout=seconds)
        except queue.Empty:
            for result in started:
                cancel(result)
            raise _no_worker(beam_options, seconds, bool(started)) from None
    if error is not None:
        raise error


def _no_worker(beam_options: Sequence[str], seconds: float, submitted: bool) -> ExtremisError:
    if not submitted:
        return ExtremisError(
            f"the job server did not take the job within {seconds:g} s. See its log, and that it reaches its engine."
        )
    kind, settings = describe_environment(beam_options)
    remedies = {
        "PROCESS": f"On every machine of the engine try its command by hand, with --help: {settings}. It needs "
        "Extremis and Beam as here",
        "DOCKER": f"Every machine of the engine needs Docker and the image {settings or 'of Beam'}",
        "EXTERNAL": f"Beside every machine of the engine, `extremis-worker --worker_pool` has to listen at {settings}",
        "LOOPBACK": "The engine's machines have to reach this one as localhost: LOOPBACK is for one machine",
    }
    remedy = remedies.get(kind, f"See what the environment {kind} needs")
    return ExtremisError(
        f"no worker answered within {seconds:g} s. {remedy}; or the engine has no free slot, see its page. "
        "--start-timeout sets how long to wait."
    )
