"""`--direct_running_mode=multi_processing`: Beam's worker processes, started quietly, whose death ends the run."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar

from apache_beam.portability import python_urns
from apache_beam.portability.api import endpoints_pb2
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.runners.portability.fn_api_runner.worker_handlers import (
    SUBPROCESS_LOCK,
    SubprocessSdkWorkerHandler,
    WorkerHandler,
)
from apache_beam.transforms.environments import SubprocessSDKEnvironment
from google.protobuf import json_format, text_format

from schemas.errors import ExtremisError
from schemas.waits import Wait, waiting

_STOP_SECONDS = 20.0  # for a worker to be done with a pipeline


class Process:
    """Process of `pipelines.runners.worker`, which serves one pipeline after another."""

    def __init__(self) -> None:
        answers, answer = os.pipe()
        command = [sys.executable, "-m", "pipelines.runners.worker", str(answer)]
        with SUBPROCESS_LOCK:
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[answer], text=True)
        os.close(answer)
        self._answers = open(answers, encoding="ascii")  # noqa: SIM115

    def serve(self, environment: dict[str, str]) -> None:
        """Serve the pipeline that `environment` leads to, to its end. Raises RuntimeError where the process ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(environment), file=self._process.stdin, flush=True)
        if not self._answers.readline():
            raise RuntimeError(f"worker process ended with status {self._process.wait()}")

    def end(self) -> None:
        """Let the process end; one that does not is killed."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._answers.close()
        try:
            with Wait("the end of a worker process", seconds=_STOP_SECONDS):
                self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_IDLE: ContextVar[list[Process] | None] = ContextVar("idle", default=None)


@contextlib.contextmanager
def keeping_workers() -> Iterator[None]:
    """Keep worker processes from one pipeline of the block to the next: each takes seconds to start."""
    idle: list[Process] = []
    token = _IDLE.set(idle)
    try:
        yield
    finally:
        _IDLE.reset(token)
        for process in idle:
            process.end()


def make_runner() -> FnApiRunner:
    """Make the runner of this process, its work done by processes of `pipelines.runners.worker`."""
    return FnApiRunner(SubprocessSDKEnvironment.from_command_string("pipelines.runners.worker"))


@WorkerHandler.register_environment(python_urns.SUBPROCESS_SDK, bytes)
class WatchedWorker(SubprocessSdkWorkerHandler):
    """Worker process whose death ends the run; Beam's own handler waits for its answers for ever."""

    def start_worker(self) -> None:
        self._closed = threading.Event()
        self._idle = _IDLE.get()
        self._process = self._idle.pop() if self._idle else Process()
        self.worker_thread = threading.Thread(target=self._watch, name="run_worker", daemon=True)
        self.worker_thread.start()

    def _watch(self) -> None:
        try:
            self._process.serve(self._environment())
            if self._idle is None:
                self._process.end()
            else:
                self._idle.append(self._process)
        except RuntimeError as error:
            lost = ExtremisError(
                f"a worker process ended before its work was done ({error}). It was out of memory, most likely: give "
                "the step more of it, or start fewer workers (--direct_num_workers)."
            )
            for _ in waiting("the end of a pipeline whose worker is lost", stop=self._closed):
                self.control_conn.abort(lost)  # requests that are made from now on stay without an answer, too

    def _environment(self) -> dict[str, str]:
        """Return what Beam's worker reads from its environment. It logs nowhere: its errors come as answers."""
        control = endpoints_pb2.ApiServiceDescriptor(url=self.control_address)
        return {
            "CONTROL_API_SERVICE_DESCRIPTOR": text_format.MessageToString(control),
            "PIPELINE_OPTIONS": json_format.MessageToJson(self.provision_info.provision_info.pipeline_options),
            "WORKER_ID": self.worker_id,
        }

    def close(self) -> None:
        self._closed.set()
        super().close()

    def stop_worker(self) -> None:
        """Wait for its end. One that had not connected when another died is never told to stop: it ends with us."""
        with Wait("the end of a worker process", seconds=_STOP_SECONDS):
            self.worker_thread.join(_STOP_SECONDS)
