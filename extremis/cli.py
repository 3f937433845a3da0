"""The command line `extremis`: its list of commands, and what becomes of errors."""

import gc
import io
import os
import shlex
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NoReturn

import click

import extremis
from extremis.console import ClosedPipe, fail, open_streams, output, set_log_format
from extremis.installation import extra_of
from schemas import code_version, commit
from schemas.errors import front_end, missing_extra, recognise
from schemas.process import limit_openmp_threads

TRACEBACK = "EXTREMIS_TRACEBACK"  # environment variable: show tracebacks


class _Commands(Mapping[str, click.Command]):
    """Command lines by name. Looking up a name loads the function's module."""

    def __getitem__(self, name: str) -> click.Command:
        if name not in extremis.COMMANDS:
            raise KeyError(name)
        from extremis.command import Command  # here: the list of commands needs no pydantic

        return Command(getattr(extremis, name).described)

    def __iter__(self) -> Iterator[str]:
        return iter(extremis.COMMANDS)

    def __len__(self) -> int:
        return len(extremis.COMMANDS)


def _summary(name: str) -> str:
    """Read the first line of a function's docstring from its source file, so that the main help loads no function."""
    spec = find_spec(extremis.COMMANDS[name][1])
    source = Path(str(spec and spec.origin)).read_text(encoding="utf-8")
    return source.partition(f"\ndef {name}(")[2].partition('"""')[2].partition("\n")[0]


class _Loop(click.Group):
    """Group of commands, which the help lists by step of the loop."""

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for step, commands in groupby(extremis.COMMANDS, key=lambda name: extremis.COMMANDS[name][0]):
            with formatter.section(step):
                formatter.write_dl([(name, _summary(name)) for name in commands])


def _show_version(context: click.Context, _: click.Parameter, is_asked: bool) -> None:
    if is_asked:
        click.echo(f"extremis, version {code_version()}, commit {commit()}")
        context.exit()


@click.group(
    cls=_Loop,
    commands=_Commands(),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
def cli() -> None:
    """Extreme classification on streamed data: shard, train, mine, join, evaluate.

    DATA and RUN are directories or object-store prefixes (s3://, gs://, ...).

    \b
    Example, the whole loop:
      extremis shard raw/ data/
      extremis run auto data/ runs/1
      extremis evaluate data/ runs/1
    """


@front_end("shell")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A user error prints one message and sets the exit status, and never prints a traceback.

    `arguments`: by default the arguments of this process. Raises SystemExit unless the command succeeds.
    """
    if arguments is None:
        open_streams()
        set_log_format(sys.argv[1:])
        limit_openmp_threads()
        usual = gc.get_threshold()
        gc.callbacks.append(lambda *_: gc.set_threshold(*usual))
        gc.set_threshold(500_000)  # modules are no garbage: the first collection waits, the others come as usual
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # pydantic would search all installed packages
        if TRACEBACK not in os.environ:
            sys.unraisablehook = lambda unraisable: None  # destructors of libraries would print tracebacks
    try:
        words = sys.argv[1:] if arguments is None else arguments
        with output(command=shlex.join(["extremis", *words])):
            work = cli.main(arguments, standalone_mode=False)
            if callable(work):  # else the help was shown
                work()
    except (click.exceptions.Abort, KeyboardInterrupt):
        fail("interrupted", 130, "KeyboardInterrupt")
    except click.ClickException as error:
        error.show(said := io.StringIO())
        fail(said.getvalue().rstrip(), 2, type(error).__name__)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except ClosedPipe:
        sys.exit(0)
    except Exception as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    """Print one message about the error, and exit; print a traceback only on request."""
    if isinstance(error, ModuleNotFoundError) and (extra := extra_of(error.name or "")) is not None:
        error = missing_extra(f"this command needs the Python module {error.name}, which is not installed", extra)
    if (known := recognise(error)) is None:
        if os.environ.get(TRACEBACK):
            raise error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:200]
        place = f"{os.path.basename(frame.filename)}, line {frame.lineno}"
        message = (
            f"error: a bug in Extremis, not in your input: {type(error).__name__}: {text} ({place}). Please report it; "
            f"with {TRACEBACK}=1 in the environment the command shows the traceback."
        )
        fail(message, 1, type(error).__name__)
    fail(f"error: {known}", known.exit_status, type(error).__name__)
