"""Errors in Python name arguments in the place of flags: `max_tokens` for --max-tokens."""

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from schemas.errors import ExtremisError

# A command line as it is typed, which stays; or a flag, with a pair or a number behind it.
_TYPED = re.compile(
    r"extremis [a-z]+ [^`();]*|(--[a-z][a-z-]*)(?![\w-])(?:[ =]([\w.]+)=([\w.,=/-]*\w)|[ =](\d[\w.]*)\b)?"
)


@contextlib.contextmanager
def naming_arguments() -> Iterator[None]:
    """Name arguments of commands in errors of the block."""
    try:
        yield
    except ExtremisError as error:
        error.args = (in_python(str(error)),)
        raise


@functools.cache
def _of_all_commands() -> Mapping[str, str]:
    """Read from the sources of the commands how Python states their flags: no command is loaded."""
    found = {"--from": "from_run"}  # `from` is a word of Python
    for path in (Path(__file__).parent / "commands").glob("*.py"):
        for name, switch in re.findall(r"^    (\w+): .* = (True|False)?", path.read_text("utf-8"), re.MULTILINE):
            flag = name.replace("_", "-")
            found |= {f"--{flag}": f"{name}=True" if switch else name, f"--no-{flag}": f"{name}=False"}
    return found


def in_python(message: str) -> str:
    """Return a message with arguments in the place of flags."""
    arguments = _of_all_commands()

    def state(typed: re.Match[str]) -> str:
        flag, key, value, number = typed.groups()
        if flag not in arguments:  # or one of Beam's
            return typed[0]
        stated = arguments[flag]
        if key is not None:
            return f"set={{{_literal(key)}: {_literal(value)}}}" if stated == "set" else f'{stated}="{key}={value}"'
        return stated if number is None else f"{stated}={_literal(number)}"

    return _TYPED.sub(state, message)


def _literal(word: str) -> str:
    """Write a word of a command line as Python does."""
    number = re.fullmatch(r"\d+(\.\d+)?(e-?\d+)?", word)
    return word if number else {"true": "True", "false": "False"}.get(word, json.dumps(word))
