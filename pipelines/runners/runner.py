"""Choose the runner of a flow from the options after `--`: this machine, or Beam."""

import functools
import importlib
import os
from collections.abc import Callable, Sequence

from pipelines.runners.local import LocalRunner, Mode, Runner
from schemas import storage
from schemas.cores import cores
from schemas.errors import InputError, MissingExtra

_WORTH_PROCESSES = 8 << 20  # bytes
_MOST_WORKERS = 16
# Runners other than the local runner and Beam's runners, each with the extra that it needs.
RUNNERS: dict[str, tuple[str, str]] = {}
# Names of Beam's own local runners; the local runner accepts their options.
_LOCAL_RUNNERS = ("", "DirectRunner", "SwitchingDirectRunner", "FnApiRunner")
# Beam's runners that write the same bytes as the local runner.
_BEAM_RUNNERS = ("PortableRunner", "FlinkRunner", "SparkRunner", "PrismRunner", "DataflowRunner")


def choose_runner(beam_options: Sequence[str] = (), urls: Sequence[str] = ()) -> Runner:
    """Return the runner that `beam_options` specify (`--runner=...`), by default the local runner; do not start it.

    By default, the local runner uses one worker process per core if the files at `urls` are large and workers can read
    these files (memory:// exists only in this process). Raises InputError for an unknown runner or option.
    """
    name, mode, workers = _parse_options(tuple(beam_options))
    if name in RUNNERS:
        return _import_runner(name)(beam_options)
    if name not in _LOCAL_RUNNERS:
        from pipelines.runners.beam_runner import BeamRunner

        return BeamRunner(beam_options)
    if not any(flag.startswith(("--direct_num_workers", "--direct_running_mode")) for flag in beam_options):
        reached = cores() > 1 and not any(url.startswith("memory://") for url in urls)
        sizes = (storage.size(url) for url in urls if storage.exists(url))
        worth_processes = reached and sum(sizes) >= _WORTH_PROCESSES  # a process takes a second to start
        mode, workers = "multi_processing" if worth_processes else "in_memory", min(cores(), _MOST_WORKERS)
    return LocalRunner(mode, workers or cores())


def is_local(beam_options: Sequence[str]) -> bool:
    """Return whether workers run on this machine, in this process's working directory."""
    return _parse_options(tuple(beam_options))[0] in _LOCAL_RUNNERS


def for_workers(beam_options: Sequence[str], url: str) -> str:
    """Return the URL at which workers find `url`: an absolute path, unless workers share this working directory."""
    return url if is_local(beam_options) else absolute_path(url)


def absolute_path(url: str) -> str:
    """Return a local path as an absolute path, and any other URL unchanged."""
    return url if "://" in url else os.path.abspath(os.path.expanduser(url))


@functools.cache
def _parse_options(flags: tuple[str, ...]) -> tuple[str, Mode, int]:
    """Return the runner's name, and a local runner's mode and number of workers. Raises InputError for a bad option."""
    if not flags:  # do not import Beam: the import takes as long as much of the work
        return "", "in_memory", 1
    from apache_beam.options import pipeline_options as options

    from pipelines.runners.beam_runner import refuse_unknown_options

    name = _full_name(options.PipelineOptions(list(flags)).view_as(options.StandardOptions).runner or "")
    if name in RUNNERS:
        _import_runner(name)  # the import declares the runner's options
    elif name not in _LOCAL_RUNNERS:
        return name, "in_memory", 1
    refuse_unknown_options(flags)
    direct = options.PipelineOptions(list(flags)).view_as(options.DirectOptions)
    return name, direct.direct_running_mode, int(direct.direct_num_workers)


def _full_name(name: str) -> str:
    """Return the full name of a runner; `name` may be short, such as flink. Raises InputError for an unknown runner."""
    known = (*_LOCAL_RUNNERS, *RUNNERS, *_BEAM_RUNNERS)
    short = name.rpartition(".")[2].lower().removesuffix("runner")
    for each in known:
        if each.lower().removesuffix("runner") == short:
            return each
    raise InputError(
        f"cannot use the Beam runner {name!r}: it writes different tables, or was never tested. Use one of "
        f"{', '.join(known[1:])}, or leave --runner out to run in this process."
    )


def _import_runner(name: str) -> Callable[[Sequence[str]], Runner]:
    """Import the class of the runner `name` in RUNNERS. Raises MissingExtra."""
    module, extra = RUNNERS[name]
    try:
        runner: Callable[[Sequence[str]], Runner] = getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise MissingExtra(f"{name} is not installed ({error})", extra) from None
    return runner
