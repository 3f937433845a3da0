"""Every command and option of the command line is in the Python API by the same name, with a type that fits."""

import inspect
import subprocess
import sys
import typing
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click
import pytest

import extremis
from extremis.api.call import option_names
from extremis.cli import cli
from schemas.errors import InputError
from tests.command import ROOT, environment
from tests.pages import DOCS, blocks

NUMBERS = {"IntRange": int, "IntParamType": int, "FloatRange": float, "FloatParamType": float, "BoolParamType": bool}
ARGUMENTS = {"source": "input", "exported": "export"}  # names of the command line that Python says otherwise
VARIADIC = {"places", "urls"}


def function_of(name: str) -> Any:
    return getattr(extremis, name)


def declared(name: str) -> dict[str, Any]:
    """Return the types of the options that the function declares."""
    (keywords,) = get_args(get_type_hints(function_of(name))["settings"])
    return get_type_hints(keywords)


def test_every_command_is_a_function() -> None:
    assert set(cli.commands) <= set(extremis.__all__)


@pytest.mark.parametrize("name", cli.commands)
def test_a_function_has_the_options_of_its_command(name: str) -> None:
    expected = {"progress", *option_names(cli.commands[name])}
    if any(param.name == "beam_options" for param in cli.commands[name].params):
        expected.add("beam_options")
    assert set(declared(name)) == expected


@pytest.mark.parametrize("name", cli.commands)
def test_a_function_has_the_arguments_of_its_command(name: str) -> None:
    arguments = [
        ARGUMENTS.get(str(param.name), param.name)
        for param in cli.commands[name].params
        if isinstance(param, click.Argument) and param.name != "beam_options"
    ]
    parameters = list(inspect.signature(function_of(name)).parameters)
    assert parameters == [*arguments, "settings"]


@pytest.mark.parametrize("name", cli.commands)
def test_types_are_those_of_the_command_line(name: str) -> None:
    for option, kind in declared(name).items():
        if option in ("progress", "beam_options"):
            continue
        param = option_names(cli.commands[name])[option]
        if isinstance(param.type, click.Choice):
            assert get_origin(kind) is Literal
            assert list(get_args(kind)) == list(param.type.choices), option
        elif type(param.type).__name__ in NUMBERS:
            assert kind is NUMBERS[type(param.type).__name__], option
        elif option == "set":
            assert {get_origin(part) for part in get_args(kind)} == {Mapping, Sequence}
        elif type(param.type).__name__ in ("StringParamType", "_Device"):
            members = {get_origin(part) or part for part in get_args(kind) or (kind,)}
            assert str in members, option
            assert members <= {str, PathLike, Mapping}, option
        else:  # read by a function: a number, or a list with commas between
            assert kind is float or get_origin(kind) in (tuple, Sequence), option


def test_help_lists_the_options_with_their_meaning() -> None:
    text = inspect.getdoc(extremis.shard) or ""
    assert "max_reject_share: Share of a table" in text
    assert "(default: 0.001)" in text
    assert "progress: " in text


def test_importing_loads_nothing_of_weight() -> None:
    code = "import sys, extremis; print(*{'numpy', 'pyarrow', 'pydantic', 'torch', 'click', 'rich'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_wrong_options_are_one_error() -> None:
    with pytest.raises(InputError, match=r"no option 'max_token'; did you mean 'max_tokens'"):
        extremis.shard("raw/", "data/", max_token=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"shard: .*sink.*'tar'"):
        extremis.shard("raw/", "data/", sink="tar")  # type: ignore[typeddict-item]
    with pytest.raises(InputError, match=r"no recipe 'asta'"):
        extremis.train("asta", "data/", "runs/1", progress=False)
    with pytest.raises(AttributeError, match="no attribute 'shrad'"):
        extremis.shrad  # type: ignore[attr-defined]  # noqa: B018


def test_the_page_lists_what_is_public() -> None:
    page = (DOCS / "python.md").read_text()
    assert [name for name in extremis.__all__ if f"`{name}" not in page] == []
    assert typing.get_type_hints(extremis.load)
    for block in (*blocks(DOCS / "python.md", "python"), *blocks(ROOT / "README.md", "python")):
        compile(block, "page", "exec")
