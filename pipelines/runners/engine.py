"""Engines: clusters of Flink or Spark behind a Beam job server, and what travels to their workers."""

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from urllib.parse import urlsplit

from apache_beam.options import pipeline_options as options
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.runners.runner import PipelineResult, PipelineRunner

from schemas.errors import ExtremisError, InputError

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
