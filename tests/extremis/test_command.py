"""A command is one typed function: what the command line, Python and the pages make of it."""

import inspect
import subprocess
import sys
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest

import extremis
from extremis.cli import cli
from extremis.command import Option, Progress, build_options, command
from extremis.commands.shared import Fields, Settings
from pipelines.options import ShardOptions
from schemas.errors import InputError, option
from tests.command import ROOT, call, environment, refused
from tests.pages import DOCS, blocks


@command()
def example(
    place: str,
    *others: str,
    batch: Annotated[int, Option("How many.", ge=1)] = 3,
    share: float | None = None,
    kind: Literal["a", "b"] = "a",
    dry: bool = False,
    shown: bool = True,
    fields: Fields | None = None,
    set: Settings = (),
    from_run: Annotated[str | None, Option(flags=("--from",))] = None,
    progress: Progress = True,
) -> dict[str, Any]:
    """Do nothing at PLACE.

    Options:
        share: A share
            of all.

    Example:
      extremis example here
    """
    if share == 1:
        raise InputError(f"{option('share', share)} needs {option('dry', True)}.")
    return locals()


def words(**options: Any) -> dict[str, Any]:
    return {**example("here", "there", **options)}


def parsed(*arguments: str) -> dict[str, Any]:
    """Return what the command line makes of the same options."""
    line: click.Command = example.command.click_command
    return {**line.make_context("example", [*arguments, "here", "there"]).params}


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, ()),
        ({"batch": 7, "share": 0.1, "kind": "b"}, ("--batch", "7", "--share", "0.1", "--kind", "b")),
        ({"dry": True, "shown": False}, ("--dry", "--no-shown")),
        ({"dry": False, "shown": True, "share": None}, ()),
        ({"fields": {"key": "id", "text": "query"}}, ("--fields", "key=id,text=query")),
        ({"set": {"train.epochs": 5, "a.b": "c"}}, ("--set", "train.epochs=5", "--set", 'a.b="c"')),
        ({"set": ["train.epochs=5"]}, ("--set", "train.epochs=5")),
        ({"from_run": "runs/1"}, ("--from", "runs/1")),
    ],
)
def test_python_and_the_shell_call_the_same_function(options: dict[str, Any], arguments: tuple[str, ...]) -> None:
    shell, python = parsed(*arguments), words(**options)
    assert {name: shell[name] for name in python if name not in ("others", "progress")} == {
        name: value for name, value in python.items() if name not in ("others", "progress")
    }


def test_the_places_of_a_function_are_arguments() -> None:
    assert example(Path("a"), "b", "c")["others"] == ("b", "c")
    with pytest.raises(TypeError):
        example()  # type: ignore[call-arg]


def test_faults_name_arguments_in_python_and_flags_in_a_shell() -> None:
    with pytest.raises(InputError, match=r"^share=1 needs dry=True\.$"):
        example("here", "there", share=1)
    with pytest.raises(InputError, match=r"example: Invalid value for 'batch': 0 is not in the range x>=1"):
        example("here", "there", batch=0)
    with pytest.raises(InputError, match=r"unknown option 'bacth'; did you mean 'batch'"):
        example("here", "there", bacth=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"^part '\.\./x'") as python:
        extremis.shard("raw/", "data/", onto="data0/", part="../x", progress=False)
    refused(call("shard", "raw/", "data/", "--onto", "data0/", "--part", "../x"), f"--{python.value}")
    refused(call("shard", "raw/", "data/", "--max-tokens", "0"), "'--max-tokens': 0 is not in the range x>=1")
    with pytest.raises(InputError, match=r"^seed: expected a number less than"):
        build_options(ShardOptions, {"seed": 1 << 64, "onto": None})


def test_help_lists_the_options_with_their_meaning() -> None:
    assert "    share: A share of all.\n" in (inspect.getdoc(example) or "")
    assert "    batch: How many. Default: 3.\n" in (inspect.getdoc(example) or "")
    text = inspect.getdoc(extremis.shard) or ""
    assert "max_reject_share: Largest allowed fraction of rejected rows" in text
    assert "Default: 0.001." in text
    assert "progress: " in text
    assert inspect.signature(extremis.shard).parameters["tokenizer_texts"].annotation == int | None
    shown = call("shard", "--help").out
    assert "0<=x<=1" in shown
    assert "[default: train:30000]" in shown
    assert "parquet, webdataset" in " ".join(shown.split())
    assert "xc-sparse" in shown


def test_every_command_is_public_and_every_option_has_its_meaning() -> None:
    assert set(cli.commands) <= set(extremis.__all__)
    plain = {"dtype", "table"}  # their values say it
    for name, line in cli.commands.items():
        options = [param for param in line.params if isinstance(param, click.Option)]
        assert [option.name for option in options if not option.help and option.name not in plain] == []
        shown = call(name, "--help").out
        assert "--json" in shown
        assert f"extremis {name}" in shown.partition("Example")[2]
        parameters = inspect.signature(getattr(extremis, name)).parameters
        assert parameters["progress"].default is True
        assert ("beam_options" in parameters) == ("start_timeout" in parameters)
        for parameter in parameters.values():
            assert parameter.annotation is not parameter.empty


def test_importing_loads_nothing_of_weight() -> None:
    code = "import sys, extremis; print(*{'numpy', 'pyarrow', 'pydantic', 'torch', 'click', 'rich'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


def test_wrong_options_are_one_error() -> None:
    with pytest.raises(InputError, match=r"unknown option 'max_token'; did you mean 'max_tokens'"):
        extremis.shard("raw/", "data/", max_token=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"^sink: expected one of 'parquet', .* got 'tar'"):
        extremis.shard("raw/", "data/", sink="tar", progress=False)
    with pytest.raises(InputError, match=r"unknown recipe 'asta'"):
        extremis.train("asta", "data/", "runs/1", progress=False)
    with pytest.raises(AttributeError, match="no attribute 'shrad'"):
        extremis.shrad  # type: ignore[attr-defined]  # noqa: B018


def test_the_page_lists_what_is_public() -> None:
    page = (DOCS / "python.md").read_text()
    assert [name for name in extremis.__all__ if f"`{name}" not in page] == []
    assert typing.get_type_hints(extremis.load)
    for block in (*blocks(DOCS / "python.md", "python"), *blocks(ROOT / "README.md", "python")):
        compile(block, "page", "exec")
