"""`extremis-worker`: boot program of a worker on a cluster. It replaces the boot program of Beam's container image.

    engine ─▶ extremis-worker --id … (PROCESS, DOCKER) ─┐
    engine ─▶ extremis-worker --worker_pool (EXTERNAL) ─┼─▶ warm parent ─▶ worker
    engine ─▶ the launching process (LOOPBACK) ─────────┘

The engine gives a worker an id and the endpoint of the engine's provision service, which provides all other settings. A
warm parent is a process that has imported the worker's packages, and can fork a worker in milliseconds. A warm parent
uses no threads and no gRPC, because threads and gRPC do not survive a fork. The first request starts a warm parent,
which serves requests with the same program, modules and environment, and ends soon after its last worker. A worker ends
when the process that requested it ends. `extremis-worker` does not install packages: the environment must already
contain the packages of `--requirements_file`.

The start-up check of an engine's workers: do their versions match, can they read INPUT, and can they write?

    launcher.json ─▶ each worker, as it starts (versions) and at its first work (access) ─▶ HOST-PROCESS.json

The check runs with the first flow. A problem is reported in one message that names the worker and the remedy. Without
the check, a flow would fail late or wait forever.
"""

import argparse
import contextlib
import fcntl
import gc
import hashlib
import importlib
import json
import logging
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from schemas.errors import ExtremisError, InputError, StorageError
from schemas.process import end_with_parent, python_command

_PROVISION_SECONDS = 60.0  # timeout for the runner to describe this worker
_IDLE_SECONDS = 10.0  # time until a warm parent without workers ends
_POLL_SECONDS = 0.5  # time between two checks of a warm parent on its workers
_IMPORTED = (
    "apache_beam.runners.worker.sdk_worker_main",
    "pipelines.shard",
    "pipelines.mine",
    "schemas.manifest",
)
_PACKAGES = ("schemas", "search", "trainer", "pipelines")  # a change in these packages makes a warm parent stale
_LONGEST = 60  # characters of the path of a folder for sockets; the path of a socket has at most 107 characters
_CHUNK = 1 << 16  # bytes of an order that are read at a time
_FORKED = b"f"
POOL_PORT = 50000  # the port of Beam's image
OPTION = "extremis_question"  # Beam option that gives a worker the question before its work
_ANSWERED: set[str] = set()  # on a worker: ids of the questions that the worker has answered
_LAUNCHER = "launcher.json"


def main(arguments: Sequence[str] | None = None) -> None:
    """Become a worker or serve a pool of workers, depending on `arguments` (default: the command line)."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    parser, options = parse(words)
    if options.worker_pool:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a container's first process ignores SIGTERM
        with contextlib.suppress(KeyboardInterrupt), serve_pool(options.service_port):
            signal.pause()
    elif not options.id or not options.provision_endpoint:
        parser.error("--id and --provision_endpoint are missing; runners set them. Did you mean --worker_pool?")
    else:
        end_with_parent()
        sys.exit(_run_worker(words))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Return the command-line parser and the parsed `arguments`."""
    parser = argparse.ArgumentParser(
        "extremis-worker", description="Boot program of Beam workers (PROCESS, EXTERNAL, DOCKER).", allow_abbrev=False
    )
    parser.add_argument("--id", help="id of this worker; set by the runner")
    parser.add_argument("--provision_endpoint", help="endpoint of the runner's provision service")
    parser.add_argument("--control_endpoint", default="", help="control endpoint; default: from the provision service")
    parser.add_argument("--logging_endpoint", default="", help="logging endpoint; default: from the provision service")
    parser.add_argument("--semi_persist_dir", default="/tmp", help="folder for the worker's files")
    parser.add_argument("--worker_pool", action="store_true", help="serve runners with EXTERNAL environments")
    parser.add_argument("--service_port", type=int, default=POOL_PORT, help="port of the pool")
    options, _ = parser.parse_known_args(arguments)  # runners pass more options, for Beam's own boot program
    options.id = options.id and options.id.strip("'")  # Prism puts the id in quotes
    return parser, options


def worker_environments(options: argparse.Namespace) -> list[dict[str, str]]:
    """Ask the runner for the environment variables of this worker (first) and of its sibling workers.

    Raises grpc.RpcError if the runner does not answer.
    """
    import grpc
    from apache_beam.portability.api import beam_provision_api_pb2, beam_provision_api_pb2_grpc, endpoints_pb2
    from google.protobuf import json_format, text_format

    def describe(stated: str, provided: "endpoints_pb2.ApiServiceDescriptor") -> str:
        text: str = text_format.MessageToString(endpoints_pb2.ApiServiceDescriptor(url=stated) if stated else provided)
        return text

    with grpc.insecure_channel(options.provision_endpoint) as channel:
        service = beam_provision_api_pb2_grpc.ProvisionServiceStub(channel)
        request = beam_provision_api_pb2.GetProvisionInfoRequest()
        metadata = (("worker_id", options.id),)
        info = service.GetProvisionInfo(
            request, metadata=metadata, timeout=_PROVISION_SECONDS, wait_for_ready=True
        ).info
    shared = {
        "PIPELINE_OPTIONS": json_format.MessageToJson(info.pipeline_options, indent=None),
        "CONTROL_API_SERVICE_DESCRIPTOR": describe(options.control_endpoint, info.control_endpoint),
        "LOGGING_API_SERVICE_DESCRIPTOR": describe(options.logging_endpoint, info.logging_endpoint),
        "RUNNER_CAPABILITIES": " ".join(info.runner_capabilities),
        "SEMI_PERSISTENT_DIRECTORY": options.semi_persist_dir,
    }
    if info.status_endpoint.url:
        shared["STATUS_API_SERVICE_DESCRIPTOR"] = describe("", info.status_endpoint)
    return [{**shared, "WORKER_ID": name} for name in (options.id, *info.sibling_worker_ids)]


def _run_worker(words: Sequence[str]) -> int:
    """Let a warm parent fork the worker, and return the worker's exit status. If that fails, become the worker."""
    forked = False
    with contextlib.suppress(OSError), _order_worker({"words": words}, (1, 2)) as worker:
        forked = worker.recv(1) == _FORKED
        if forked and (status := worker.recv(1)):
            return status[0]
    if not forked:
        _work({"words": words})
    return int(forked)  # a worker that was killed sends nothing


def _work(order: Mapping[str, Any]) -> None:
    """Start the sibling workers, and work until the Beam runner that the order names ends."""
    own, *siblings = [order["environment"]] if "environment" in order else worker_environments(parse(order["words"])[1])
    beside = [_order_worker({"environment": each}, (1, 2)) for each in siblings]  # the siblings end with this process
    os.environ.update(own)
    # Beam logs to the runner. Without another handler, the first message would add a handler for standard error.
    logging.getLogger().addHandler(logging.NullHandler())
    from apache_beam.runners.worker import sdk_worker_main

    compare_versions(json.loads(own["PIPELINE_OPTIONS"]))
    sdk_worker_main.main([])
    del beside


@contextlib.contextmanager
def serve_pool(port: int = 0, silent: bool = False) -> Iterator[int]:
    """Serve runners with EXTERNAL environments from threads of this process until the block ends; yield the port.

    Several runners can share the pool, and can use the same names for their workers. So the pool ignores requests to
    stop a worker by name, and a worker ends when its runner closes the connection. `silent`: discard workers' output.
    """
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(open(os.devnull, "w")) if silent else None
        places = (output.fileno(), output.fileno()) if output else (1, 2)
        workers = {stack.enter_context(_order_worker({}, places))}  # an idle process that keeps the warm parent alive

        import grpc
        from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc
        from apache_beam.utils import thread_pool_executor

        class Pool(beam_fn_api_pb2_grpc.BeamFnExternalWorkerPoolServicer):
            def StartWorker(self, request: Any, context: Any) -> Any:
                ends = ("provision", "control", "logging")
                words = [f"--{end}_endpoint={getattr(request, f'{end}_endpoint').url}" for end in ends]
                worker = _order_worker({"words": [f"--id={request.worker_id}", *words]}, places)
                if worker.recv(1) != _FORKED:
                    return beam_fn_api_pb2.StartWorkerResponse(error="no worker could be forked: see the pool's output")
                workers.add(worker)
                threading.Thread(target=_forget_when_ended, args=(workers, worker), daemon=True).start()
                return beam_fn_api_pb2.StartWorkerResponse()

            def StopWorker(self, request: Any, context: Any) -> Any:
                return beam_fn_api_pb2.StopWorkerResponse()

        options = [("grpc.http2.max_pings_without_data", 0), ("grpc.http2.max_ping_strikes", 0)]
        server = grpc.server(thread_pool_executor.shared_unbounded_instance(), options=options)
        beam_fn_api_pb2_grpc.add_BeamFnExternalWorkerPoolServicer_to_server(Pool(), server)
        chosen = server.add_insecure_port(f"[::]:{port}")
        server.start()
        try:
            yield chosen
        finally:
            server.stop(0)
            for worker in list(workers):
                with contextlib.suppress(OSError):
                    worker.shutdown(socket.SHUT_RDWR)


def _forget_when_ended(workers: set[socket.socket], worker: socket.socket) -> None:
    with contextlib.suppress(OSError), worker:
        worker.recv(1)  # the status that the worker sends when it ends
    workers.discard(worker)


def _order_worker(order: Mapping[str, Any], places: tuple[int, int]) -> socket.socket:
    """Request a worker from the warm parent, which is started if necessary; return the socket to the worker.

    The worker ends when the socket is closed. The worker's output goes to the file descriptors `places`. The worker
    sends _FORKED through the socket when it starts, and its exit status when it ends. An empty order starts a process
    that only waits. Raises OSError if no socket can be created.
    """
    place, connection = _socket_place(), socket.socket(socket.AF_UNIX)
    with _locked(place.parent):
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
    socket.send_fds(connection, [json.dumps(order).encode() + b"\n"], places)
    return connection


def _socket_place() -> Path:
    """Return the path of the warm parent's socket for this program, environment and working folder. Raises OSError."""
    modules = (path for name in _PACKAGES for path in (Path(__file__).parents[2] / name).rglob("*.py"))
    newest = max(path.stat().st_mtime_ns for path in modules)
    facts = [sys.executable, sys.path, sorted(os.environ.items()), os.getcwd(), newest]
    base = tempfile.gettempdir()
    folder = Path(base if len(base) < _LONGEST else "/tmp") / f"extremis-worker-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"other users can access {folder}")
    return folder / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Prevent other processes from starting or ending warm parents until the block ends."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def serve_warm(number: int) -> None:
    """Run a warm parent until it has been idle for a while; `number` is the file descriptor of the listening socket."""
    listener = socket.socket(fileno=number)
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # memory pages that garbage collection does not touch stay shared
    needed = time.monotonic()
    while True:
        if _reap():
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


def _reap() -> bool:
    """Reap the workers that have ended; return whether any workers remain."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _be_worker(connection: socket.socket) -> NoReturn:
    """Execute the order that arrives on `connection`; end when the connection closes."""
    status = 1
    try:
        order, places, _, _ = socket.recv_fds(connection, _CHUNK, 2)
        while not order.endswith(b"\n"):
            order += connection.recv(_CHUNK)
        for target, place in enumerate(places, 1):
            os.dup2(place, target)
            os.close(place)
        connection.send(_FORKED)
        ended = threading.Thread(target=_end_with, args=(connection,), daemon=True)
        ended.start()
        if order := json.loads(order):
            _work(order)
        else:
            ended.join()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            connection.send(bytes([status]))
        os._exit(status)


def _end_with(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.recv(1)
    os._exit(1)


def versions() -> str:
    """Return the versions of Extremis, Beam and Python (such as 3.10), which must match on launcher and workers."""
    from apache_beam import version

    from schemas.manifest import code_version

    python = ".".join(platform.python_version_tuple()[:2])
    return f"Extremis {code_version()}, Beam {version.__version__}, Python {python}"


@dataclass(frozen=True)
class Question:
    """Question to every worker: does it have these versions, can it read `reads`, and write below `folder`?"""

    id: str
    versions: str
    reads: Sequence[str]
    folder: str
    asked: float  # seconds since 1970 by the launcher's clock

    @staticmethod
    def ask(reads: Sequence[str], folder: str) -> "Question":
        """Write a question for the workers below `folder`, and return it. Raises StorageError."""
        from schemas import storage

        question = Question(uuid.uuid4().hex, versions(), reads, f"{folder.rstrip('/')}/check", time.time())
        storage.write_bytes(question.place(_LAUNCHER), str(question).encode(), durable=False)
        return question

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    def place(self, name: str) -> str:
        """Return the URL of a file of the question or of an answer."""
        return f"{self.folder}/{name}"

    def answers(self) -> list[dict[str, Any]]:
        """Return the workers' answers so far. Raises StorageError, and InputError if a worker reports a problem."""
        from schemas import storage

        answers = []
        for name in storage.list_names(self.folder):
            with contextlib.suppress(FileNotFoundError, ValueError):
                answers.append(json.loads(storage.read_bytes(self.place(name))))
        for refusal in (each["lacks"] for each in answers if "lacks" in each):
            raise InputError(refusal)
        return sorted((each for each in answers if "worker" in each), key=lambda each: str(each["worker"]))

    def summarize(self, say: Callable[[str], None]) -> None:
        """Report which workers have answered. Raises InputError if the work is done, but no answer has arrived."""
        from schemas.sizes import say_bytes

        workers = self.answers()
        if not workers:
            raise InputError(
                f"the workers answered, but their files are not in {self.folder}: on the workers, this path is a "
                "different folder. Use a shared file system or an object store for DATA, RUN and OUT."
            )
        machines = {str(each["host"]): f"{each['cores']} cores, {say_bytes(each['memory'])}" for each in workers}
        last = max(each["seconds"] for each in workers)
        hosts = "; ".join(f"{host}: {facts}" for host, facts in sorted(machines.items()))
        say(f"{len(workers)} worker{'s' * (len(workers) > 1)} answered, the last after {last:.1f} s ({hosts})")


def compare_versions(beam_options: Mapping[str, Any]) -> None:
    """Compare a worker's versions with the versions in the runner's options. Raises InputError.

    This check runs before Beam's own check, which reports different versions only in a log.
    """
    asked = beam_options.get(f"beam:option:{OPTION}:v1")
    if asked:
        _answer(Question(**json.loads(asked)), write=False)


def answer(question: Question) -> None:
    """Answer the question on a worker, once per process. Raises InputError that names the worker and the problem."""
    if question.id not in _ANSWERED:
        _answer(question, write=True)
        _ANSWERED.add(question.id)


def _answer(question: Question, write: bool) -> None:
    from schemas import storage
    from schemas.process import cores

    host, here = socket.gethostname(), versions()
    worker = f"{host}, process {os.getpid()}"
    url = question.place(f"{host}-{os.getpid()}.json")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    seconds = time.time() - question.asked
    facts = {"worker": worker, "host": host, "cores": cores(), "memory": memory, "seconds": seconds}
    try:
        if here != question.versions:
            raise InputError(
                f"the worker {worker} has {here}; the launching process has {question.versions}. Install the same "
                "versions on every machine of the engine, or in the image of its workers."
            )
        if write:
            for read in (question.place(_LAUNCHER), *question.reads):
                _require_readable(worker, read)
            storage.write_bytes(url, json.dumps(facts).encode(), durable=False)
    except InputError as error:
        with contextlib.suppress(ExtremisError, OSError):  # the launcher may read this before the engine's error
            storage.write_bytes(url, json.dumps({"lacks": str(error)}).encode(), durable=False)
        raise
    except (StorageError, OSError) as error:
        raise InputError(
            f"the worker {worker} cannot write to {question.folder}: {error} Give the worker permission, or use "
            "another location."
        ) from None


def _require_readable(worker: str, url: str) -> None:
    from schemas import storage

    remedy = "Use a shared file system or an object store that every machine can access at the same URL."
    try:
        if storage.exists(url):
            with storage.open_read(url) as file:
                file.read(1)
            return
    except (ExtremisError, OSError) as error:
        raise InputError(f"the worker {worker} cannot read {url}: {error} {remedy}") from None
    raise InputError(f"the worker {worker} cannot see the file {url}, which the launching process can see. {remedy}")


if __name__ == "__main__":
    main()
