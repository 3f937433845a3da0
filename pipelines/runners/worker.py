"""`extremis-worker`: the program that engines start for each worker, in place of the program of Beam's container image.

    engine (PROCESS, DOCKER) ─▶ extremis-worker --id … ─────┐
    engine (EXTERNAL) ─▶ extremis-worker --worker_pool ─────┼─▶ warm parent ─▶ worker
    engine (LOOPBACK) ─▶ the launching process, as a pool ──┘

A worker asks the engine's provision service for its settings, compares versions, and becomes Beam's worker. Imports
take longer than a small job, so a warm parent has imported the packages, and forks the worker within milliseconds. The
parent uses no threads and no gRPC, because these do not survive a fork. The first program starts the parent, which
serves all programs with the same modules and environment, and ends soon after its last worker. A worker ends when the
program that asked for it ends. Nothing is installed: the environment must already contain the packages.

The first job checks the workers: do their versions match, can they read INPUT, and can they write?

    launcher.json ─▶ each worker, as it starts (versions) and at its first work (access) ─▶ HOST-PROCESS.json

A problem is one message that names the worker and the remedy. Without the check, a job would fail late or wait forever.
"""

import argparse
import contextlib
import fcntl
import functools
import gc
import hashlib
import importlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from schemas import code_version
from schemas.errors import AccessError, ExtremisError, InputError, RoomError, StorageError, failure_of
from schemas.logs import log_as
from schemas.process import end_with_parent, python_command

_PROVISION_SECONDS = 60.0  # timeout for the engine to describe this worker
_IDLE_SECONDS = 10.0  # time until a warm parent without workers ends
_POLL_SECONDS = 0.5  # time between two looks of a warm parent at its workers
_WARM = ("apache_beam.runners.worker.sdk_worker_main", "pipelines.shard", "pipelines.mine")  # what a parent imports
_PACKAGES = ("schemas", "search", "trainer", "pipelines")  # a change in these packages makes a warm parent stale
_FORKED = b"f"
POOL_PORT = 50000  # the port of Beam's image
OPTION = "extremis_question"  # Beam option that gives a worker the question before its work
_LAUNCHER = "launcher.json"


def main() -> None:
    """Become a worker, or serve a pool of workers, as the command line says."""
    log_as("worker")
    words = sys.argv[1:]
    parser, options = parse(words)
    if options.worker_pool:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a container's first process ignores SIGTERM
        with contextlib.suppress(KeyboardInterrupt), serve_pool(options.service_port):
            signal.pause()
        return
    if not options.id or not options.provision_endpoint:
        parser.error("--id and --provision_endpoint are missing; engines set them. Did you mean --worker_pool?")
    end_with_parent()
    with contextlib.suppress(OSError), _ask_for_worker(words) as worker:
        if worker.recv(1) == _FORKED:
            sys.exit((worker.recv(1) or bytes([128 + signal.SIGKILL]))[0])  # a worker that was killed sends nothing
    _work(words)  # there is no parent here, or it ended: the reason is seen here


def parse(words: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the command-line parser, and the options in `words`."""
    parser = argparse.ArgumentParser(
        "extremis-worker", description="Program of Beam's workers (PROCESS, EXTERNAL, DOCKER).", allow_abbrev=False
    )
    parser.add_argument("--id", help="id of this worker; set by the engine")
    parser.add_argument("--provision_endpoint", help="endpoint of the engine's provision service")
    parser.add_argument("--sibling", action="store_true", help=argparse.SUPPRESS)  # its siblings are started already
    parser.add_argument("--worker_pool", action="store_true", help="serve engines with EXTERNAL environments")
    parser.add_argument("--service_port", type=int, default=POOL_PORT, help="port of the pool")
    options, _ = parser.parse_known_args(words)  # engines pass more options, for Beam's own program
    options.id = options.id and options.id.strip("'")  # Prism puts the id in quotes
    return parser, options


def _ask_for_worker(words: Sequence[str], output: tuple[int, int] = (1, 2)) -> socket.socket:
    """Ask the warm parent for a worker that writes to the file descriptors `output`. Raises OSError.

    Returns a socket, with whose end the worker ends. The worker sends _FORKED when it starts, and at last its status.
    """
    parent = _warm_parent()
    socket.send_fds(parent, [json.dumps(words).encode()], output)
    return parent


@contextlib.contextmanager
def serve_pool(port: int = 0, silent: bool = False) -> Iterator[int]:
    """Start a worker for each request of an engine with an EXTERNAL environment until the block ends; yield the port.

    Several engines can share the pool, and can use the same names for their workers. So the pool ignores requests to
    stop a worker by name, and a worker ends when its engine closes the connection. `silent`: discard workers' output.
    """
    from apache_beam.portability.api import beam_fn_api_pb2
    from apache_beam.runners.worker.worker_pool_main import BeamFnExternalWorkerPoolServicer

    workers: set[socket.socket] = set()

    class Pool(BeamFnExternalWorkerPoolServicer):
        def StartWorker(self, request: Any, context: Any) -> Any:
            words = (f"--id={request.worker_id}", f"--provision_endpoint={request.provision_endpoint.url}")
            worker = _ask_for_worker(words, output)
            if worker.recv(1) != _FORKED:
                return beam_fn_api_pb2.StartWorkerResponse(
                    error="the pool cannot import apache_beam or pipelines.shard"
                )
            workers.difference_update(select.select(tuple(workers), (), (), 0)[0])  # of those that have ended
            workers.add(worker)
            return beam_fn_api_pb2.StartWorkerResponse()

        def StopWorker(self, request: Any, context: Any) -> Any:
            return beam_fn_api_pb2.StopWorkerResponse()

    # The parent begins to import, and a connection without words keeps it.
    with open(os.devnull, "w") as nothing, _warm_parent():
        output = (nothing.fileno(), nothing.fileno()) if silent else (1, 2)
        address, server = Pool.start(port=port)
        try:
            yield int(address.rpartition(":")[2])
        finally:
            server.stop(0)
            for worker in tuple(workers):
                worker.close()


def worker_environment(options: argparse.Namespace) -> tuple[dict[str, str], Sequence[str]]:
    """Ask the engine for the environment variables of this worker, and the ids of workers to be started beside it.

    Raises grpc.RpcError if the engine does not answer.
    """
    import grpc
    from apache_beam.portability.api import beam_provision_api_pb2, beam_provision_api_pb2_grpc
    from google.protobuf import json_format, text_format

    with grpc.insecure_channel(options.provision_endpoint) as channel:
        service = beam_provision_api_pb2_grpc.ProvisionServiceStub(channel)
        request, metadata = beam_provision_api_pb2.GetProvisionInfoRequest(), (("worker_id", options.id),)
        info = service.GetProvisionInfo(
            request, metadata=metadata, timeout=_PROVISION_SECONDS, wait_for_ready=True
        ).info
    environment = {
        "WORKER_ID": options.id,
        "PIPELINE_OPTIONS": json_format.MessageToJson(info.pipeline_options, indent=None),
        "RUNNER_CAPABILITIES": " ".join(info.runner_capabilities),
    }
    for name in ("control", "logging", "status"):
        if (endpoint := getattr(info, f"{name}_endpoint")).url:
            environment[f"{name.upper()}_API_SERVICE_DESCRIPTOR"] = text_format.MessageToString(endpoint)
    return environment, () if options.sibling else info.sibling_worker_ids


def _work(words: Sequence[str]) -> None:
    """Start the workers beside this one, and work until the engine closes the connection."""
    environment, siblings = worker_environment(parse(words)[1])
    beside = [_ask_for_worker([*words, f"--id={name}", "--sibling"]) for name in siblings]  # they end with this process
    os.environ.update(environment)
    from apache_beam.runners.worker import sdk_worker_main

    compare_versions(json.loads(environment["PIPELINE_OPTIONS"]))
    sdk_worker_main.main([])
    del beside


def _warm_parent() -> socket.socket:
    """Connect to the warm parent of this program, environment and folder; start it if there is none. Raises OSError."""
    modules = (path for name in _PACKAGES for path in (Path(__file__).parents[2] / name).rglob("*.py"))
    newest = max(path.stat().st_mtime_ns for path in modules)
    facts = json.dumps([sys.executable, sys.path, sorted(os.environ.items()), os.getcwd(), newest])
    folder = Path(f"/tmp/extremis-worker-{os.getuid()}")  # a short path: that of a socket has at most 107 characters
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"other users can access {folder}")
    place, connection = folder / hashlib.sha256(facts.encode()).hexdigest()[:16], socket.socket(socket.AF_UNIX)
    with _locked(folder):
        try:
            connection.connect(str(place))
        except OSError:
            place.unlink(missing_ok=True)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(str(place))
                listener.listen()
                program = f"from pipelines.runners.worker import serve_warm; serve_warm({listener.fileno()})"
                nothing = subprocess.DEVNULL
                subprocess.Popen(
                    python_command(program),
                    stdin=nothing,
                    stdout=nothing,
                    stderr=nothing,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
                connection.connect(str(place))
    return connection


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Prevent other processes from starting or ending warm parents until the block ends."""
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def serve_warm(number: int) -> None:
    """Run a warm parent until it has been idle for a while; `number` is the file descriptor of the listening socket."""
    listener = socket.socket(fileno=number)
    for name in _WARM:
        importlib.import_module(name)
    gc.freeze()  # memory pages that garbage collection does not touch stay shared
    needed = time.monotonic()
    while True:
        with contextlib.suppress(ChildProcessError):  # there is no worker
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            needed = time.monotonic()
        if select.select([listener], [], [], _POLL_SECONDS)[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _be_worker(connection)
            connection.close()
        elif time.monotonic() > needed + _IDLE_SECONDS:
            place = Path(listener.getsockname())
            with _locked(place.parent):
                if not select.select([listener], [], [], 0)[0]:
                    place.unlink(missing_ok=True)
                    return


def _be_worker(connection: socket.socket) -> NoReturn:
    """Do the work of the program on the other end of `connection`, if it sends its words; end when the program ends."""

    def end_with_program() -> None:
        with contextlib.suppress(OSError):
            connection.recv(1)
        os._exit(1)

    status = 1
    try:
        words, places, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        for target, place in enumerate(places, 1):  # the program's standard output and standard error
            os.dup2(place, target)
            os.close(place)
        log_as("worker")
        connection.send(_FORKED)
        threading.Thread(target=end_with_program, daemon=True).start()
        _work(json.loads(words))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            connection.send(bytes([status]))
        os._exit(status)


def versions() -> str:
    """Return the versions of Extremis, Beam and Python (such as 3.10), which must match on launcher and workers."""
    from apache_beam import version

    python = ".".join(platform.python_version_tuple()[:2])
    return f"Extremis {code_version()}, Beam {version.__version__}, Python {python}"


@dataclass(frozen=True)
class Question:
    """Question to every worker: does it have these versions, can it read `reads`, and write below `folder`?"""

    id: str
    versions: str
    reads: tuple[str, ...]
    folder: str
    asked: float  # seconds since 1970 by the launcher's clock

    @staticmethod
    def ask(reads: Sequence[str], folder: str) -> "Question":
        """Write a question for the workers below `folder`, and return it. Raises StorageError."""
        question = Question(uuid.uuid4().hex, versions(), tuple(reads), f"{folder.rstrip('/')}/check", time.time())
        question.report(asdict(question), _LAUNCHER)
        return question

    def report(self, facts: Mapping[str, Any], name: str = "") -> None:
        """Write a file of the check, by default a worker's. Raises StorageError."""
        from schemas import storage  # at its start, this program imports little

        url = f"{self.folder}/{name or f'{socket.gethostname()}-{os.getpid()}.json'}"
        storage.write_bytes(url, json.dumps(facts).encode(), durable=False)

    def answers(self) -> list[dict[str, Any]]:
        """Return the workers' answers so far. Raises StorageError, and the problem that a worker reports."""
        from schemas import storage

        answers = []
        for name in storage.list_names(self.folder):
            with contextlib.suppress(FileNotFoundError, ValueError):
                answers.append(json.loads(storage.read_bytes(f"{self.folder}/{name}")))
        for each in answers:
            if "lacks" in each:
                raise _REFUSALS[each["kind"]](each["lacks"])
        return [each for each in answers if "host" in each]

    def summarize(self) -> str:
        """Return a line on the workers that answered. Raises InputError if the work is done, but no answer is there."""
        workers = self.answers()
        if not workers:
            raise InputError(
                f"the workers answered, but their files are not in {self.folder}: on the workers, this path is a "
                "different folder. Use a shared file system or an object store for DATA, RUN and OUT."
            )
        hosts, last = ", ".join(sorted({each["host"] for each in workers})), max(each["seconds"] for each in workers)
        return f"{len(workers)} worker{'s' * (len(workers) > 1)} answered, the last after {last:.1f} s ({hosts})"


def compare_versions(beam_options: Mapping[str, Any]) -> None:
    """Compare a worker's versions with the launcher's, by the engine's options. Raises InputError.

    This check runs before Beam's own check, which reports different versions only in a log.
    """
    if asked := beam_options.get(f"beam:option:{OPTION}:v1"):
        _require_versions(Question(**json.loads(asked)))


@functools.cache
def answer(question: Question) -> None:
    """Answer the question on a worker, once per process. Raises ExtremisError that names the worker and the problem."""
    from schemas import storage

    _require_versions(question)
    remedy = "Use a shared file system or an object store that every machine can access at the same URL."
    for url in (f"{question.folder}/{_LAUNCHER}", *question.reads):
        try:
            with storage.open_read(url) as file:
                file.read(1)
        except FileNotFoundError:
            problem = f"cannot see the file {url}, which the launching process can see. {remedy}"
            raise _refusal(question, problem) from None
        except (StorageError, InputError, OSError) as error:
            raise _refusal(question, f"cannot read {url}: {error} {remedy}", error) from None
    try:
        question.report({"host": socket.gethostname(), "seconds": time.time() - question.asked})
    except (StorageError, OSError) as error:
        remedy = "Give the worker permission, or use another location."
        raise _refusal(question, f"cannot write to {question.folder}: {error} {remedy}", error) from None


def _require_versions(question: Question) -> None:
    if (here := versions()) != question.versions:
        raise _refusal(
            question,
            f"has {here}; the launching process has {question.versions}. Install the same versions on every machine of "
            "the engine, or in the image of its workers.",
        )


_REFUSALS = {kind.__name__: kind for kind in (InputError, StorageError, AccessError, RoomError)}


def _refusal(question: Question, problem: str, cause: Exception | None = None) -> ExtremisError:
    """Return the error of this worker, after writing it where the launcher may read it before the engine reports it."""
    said = f"the worker {socket.gethostname()}, process {os.getpid()} {problem}"
    kind = failure_of(cause) if isinstance(cause, OSError) else type(cause)
    name = kind.__name__ if kind.__name__ in _REFUSALS else InputError.__name__
    with contextlib.suppress(ExtremisError, OSError):
        question.report({"lacks": said, "kind": name})
    return _REFUSALS[name](said)
