"""`--direct_running_mode=multi_processing`: Beam's worker processes, started quietly, whose death ends the run."""

import shlex
import sys
import threading
import time

from apache_beam.portability import python_urns
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.runners.portability.fn_api_runner.worker_handlers import SubprocessSdkWorkerHandler, WorkerHandler
from apache_beam.runners.portability.local_job_service import SubprocessSdkWorker
from apache_beam.transforms.environments import SubprocessSDKEnvironment

from schemas.errors import ExtremisError

_AGAIN_SECONDS = 0.1
_STOP_SECONDS = 20.0  # for a worker to end by itself


def make_runner() -> FnApiRunner:
    """Make the runner of this process, its work done by processes of `pipelines.runners.worker`."""
    # A shell starts it: with `exec`, the worker's parent is this process.
    command = f"exec {shlex.quote(sys.executable)} -m pipelines.runners.worker"
    return FnApiRunner(SubprocessSDKEnvironment.from_command_string(command))


@WorkerHandler.register_environment(python_urns.SUBPROCESS_SDK, bytes)
class WatchedWorker(SubprocessSdkWorkerHandler):
    """Worker process whose death ends the run; Beam's own handler waits for its answers for ever."""

    _closed = False

    def start_worker(self) -> None:
        self.worker = SubprocessSdkWorker(
            self._worker_command_line, self.control_address, self.provision_info, self.worker_id
        )
        self.worker_thread = threading.Thread(target=self._watch, name="run_worker", daemon=True)
        self.worker_thread.start()

    def _watch(self) -> None:
        try:
            self.worker.run()
        except RuntimeError as error:
            lost = ExtremisError(
                f"a worker process ended before its work was done ({error}). It was out of memory, most likely: give "
                "the step more of it, or start fewer workers (--direct_num_workers)."
            )
            while not self._closed:  # requests that are made from now on stay without an answer, too
                self.control_conn.abort(lost)
                time.sleep(_AGAIN_SECONDS)

    def close(self) -> None:
        self._closed = True
        super().close()

    def stop_worker(self) -> None:
        """Wait for its end. One that had not connected when another died is never told to stop: it ends with us."""
        self.worker_thread.join(_STOP_SECONDS)
