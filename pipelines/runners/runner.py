"""Choice of a Beam runner; and a worker's failure turned back into the error it was."""

import contextlib
import difflib
import functools
import logging
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options import pipeline_options as options
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.runners.runner import PipelineResult, PipelineRunner, create_runner

from pipelines.common.progress import Watch
from pipelines.runners import engine, engine_errors, processes
from pipelines.runners.parsed_options import ParsedOptions
from schemas import storage
from schemas.errors import ExtremisError, InputError, MissingExtra

_WORTH_PROCESSES = 8 << 20  # bytes
_MOST_WORKERS = 16  # each takes some 300 MB
# Beam's own local runner looks for a binary to download; the one in this process needs nothing.
_IN_PROCESS = ("", "DirectRunner", "FnApiRunner")
_LOGGERS = ("apache_beam", "distributed")
_ROOT_LOGGER = ""  # Beam's portable runners tell it what the engine says
# Beam ends a worker's message with the step it was in; the traceback's last line names the class.
_STEP = re.compile(r" \[while running '[^']*'\]")


def make_pipeline(beam_options: Sequence[str] = ()) -> beam.Pipeline:
    """Make an empty pipeline on the runner that `beam_options` name (`--runner=...`); in this process by default.

    `--direct_num_workers` and `--direct_running_mode` hold for the in-process runner as well; the rest goes to Beam
    unchanged. Run it with `run`. Raises InputError for an unknown runner or option.
    """
    flags = list(beam_options)
    runner = _runner(flags)
    _refuse_unknown(tuple(flags))
    pipeline_options = ParsedOptions(flags)
    # Nothing of ours is defined in a main module, so no worker needs a copy of one.
    pipeline_options.view_as(options.SetupOptions).save_main_session = False
    direct = pipeline_options.view_as(options.DirectOptions)
    if isinstance(runner, FnApiRunner) and direct.direct_running_mode == "multi_processing":
        direct.direct_running_mode = "in_memory"  # else Beam starts workers of its own
        runner = processes.make_runner()
    if engine.is_engine(runner):
        engine.prepare(pipeline_options)
    try:
        pipeline = beam.Pipeline(runner=runner, options=pipeline_options)
    except ValueError as error:  # a runner's own checks: a bucket or project that is none
        raise InputError(f"Beam options {flags}: {str(error).strip()}") from None
    # For transforms in other languages, of which there are none; Beam would leave it behind.
    os.rmdir(pipeline.local_tempdir)
    return pipeline


def local_workers(beam_options: Sequence[str], urls: Sequence[str]) -> list[str]:
    """Add a worker process a core to `beam_options` that leave the choice, where the files at `urls` are worth it.

    Starting processes takes seconds, and they do not share memory:// files.
    """
    flags = list(beam_options)
    decided = any(flag.startswith(("--direct_num_workers", "--direct_running_mode")) for flag in flags)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if decided or cores < 2 or not isinstance(_runner(flags), FnApiRunner):
        return flags
    if any(url.startswith("memory://") for url in urls):
        return flags
    if sum(storage.size(url) for url in urls if storage.exists(url)) < _WORTH_PROCESSES:
        return flags
    return [*flags, f"--direct_num_workers={min(cores, _MOST_WORKERS)}", "--direct_running_mode=multi_processing"]


def run(
    pipeline: beam.Pipeline,
    started: Callable[[PipelineResult], Any] | None = None,
    watch: Watch | None = None,
) -> None:
    """Run `pipeline` to its end. A worker's ExtremisError is raised here as it was raised there, on any runner.

    Raises ExtremisError, too, where workers of this machine or of Dask died, and where an engine failed. `started` is
    called with the job of an engine, which is cancelled where this process is ended. `watch` shows the steps meanwhile.
    """
    on_engine = engine.is_engine(pipeline.runner)
    local = type(pipeline.runner).__name__ in ("FnApiRunner", "DaskRunner")
    loggers = (*_LOGGERS, _ROOT_LOGGER) if on_engine else _LOGGERS if local else None
    watching = watch.watching() if watch is not None else contextlib.nullcontext()
    with _quiet(loggers) if loggers else contextlib.nullcontext(), watching as settle:
        try:
            result = pipeline.run()
            with engine.cancelling([result]) if on_engine else contextlib.nullcontext():
                if started is not None:
                    started(result)
                result.wait_until_finish()
            if settle is not None:
                settle(result)
        except Exception as error:
            cause = unwrap(error)
            if cause is not None:
                raise cause from None
            if on_engine:
                raise _engine_failure(str(error)) from error
            raise


def _engine_failure(text: str) -> Exception:
    """Return the error behind what an engine says: a fault of ours on a worker, or one of the engine's own."""
    fault = engine_errors.python_cause(text)
    return RuntimeError(f"on a worker: {fault}") if fault else ExtremisError(engine_errors.explain(text))


def unwrap(error: BaseException) -> ExtremisError | None:
    """Return the ExtremisError that a runner wrapped into `error`, or None.

    Runners in this process chain or re-raise the exception; the others pass its traceback on as text.
    """
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ExtremisError):
            return type(seen)(_STEP.sub("", str(seen)))
        seen = seen.__cause__ or seen.__context__
    classes = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in (ExtremisError, *_subclasses(ExtremisError))}
    names = "|".join(re.escape(name) for name in classes)
    # A chain of tracebacks repeats the message; its last copy ends the text, or Java's trace follows, or the step.
    ends = r" \[while running '|^\n(?:During handling|The above)|^\s*\tat |\Z"
    matches = re.findall(rf"^({names}): (.*?)(?={ends})", str(error), re.DOTALL | re.MULTILINE)
    if not matches:
        return None
    name, message = matches[-1]
    return classes[name](message.strip())


@functools.cache
def _runner_name(flags: tuple[str, ...]) -> str:
    return options.PipelineOptions(list(flags)).view_as(options.StandardOptions).runner or ""


def _runner(flags: Sequence[str]) -> PipelineRunner:
    name = _runner_name(tuple(flags))
    if name in _IN_PROCESS:
        return FnApiRunner()
    if name == "DaskRunner":
        try:
            from pipelines.runners.dask_runner import DaskRunner
        except ImportError as error:
            raise MissingExtra(f"no Dask here ({error})", "dask") from None
        return DaskRunner()
    try:
        return create_runner(name)
    except (ValueError, ImportError, AttributeError) as error:
        raise InputError(
            f"cannot use the Beam runner {name!r}: {error}. Leave --runner out to run in this process."
        ) from None


@functools.cache
def _refuse_unknown(flags: tuple[str, ...]) -> None:
    """Refuse options that Beam does not know; it drops them with a warning."""
    parser = options._BeamArgumentParser(allow_abbrev=False, exit_on_error=False)
    for kind in _subclasses(options.PipelineOptions):
        with contextlib.suppress(Exception):  # two classes may declare the same option
            kind._add_argparse_args(parser)  # type: ignore[attr-defined]
    try:
        _, unknown = parser.parse_known_args(list(flags))
    except Exception as error:
        raise InputError(f"Beam options {list(flags)}: {error}.") from None
    if not unknown:
        return
    names = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(unknown[0].split("=")[0], names, n=1)
    hint = f" Did you mean {near[0]}?" if near else " Everything after `--` goes to Beam; see its runner's page."
    raise InputError(f"unknown Beam option {unknown[0]!r}.{hint}")


def _subclasses(kind: type) -> list[type]:
    children: list[type] = kind.__subclasses__()
    return [deep for child in children for deep in (child, *_subclasses(child))]


@contextlib.contextmanager
def _quiet(names: Sequence[str]) -> Iterator[None]:
    """Silence tracebacks that runners log, to loggers of these names, or print: `run` raises them anyway."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    hook = threading.excepthook
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    threading.excepthook = lambda ended: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        threading.excepthook = hook
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def for_workers(beam_options: Sequence[str], url: str) -> str:
    """Return `url` as workers of `beam_options` are told: they do not share this process's working directory."""
    return url if isinstance(_runner(beam_options), FnApiRunner) else engine.absolute_path(url)
