"""A command is one typed function: what the command line, Python and the pages make of it."""

import ast
import inspect
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest

import extremis
from extremis.cli import cli
from extremis.command import Option, Progress, build_options, command, naming_arguments
from extremis.commands.shared import Fields, Settings
from pipelines.options import ClusterOptions, EmbedTextsOptions, MergeOptions, MineOptions, ShardOptions, TeachOptions
from schemas.errors import InputError
from schemas.options import Options
from scoring.options import TupleOptions
from tests.command import ROOT, call, environment, refused
from tests.pages import DOCS, blocks

MODELS: dict[str, type[Options]] = {
    "shard": ShardOptions,
    "mine": MineOptions,
    "merge": MergeOptions,
    "teach": TeachOptions,
    "cluster": ClusterOptions,
    "embed": EmbedTextsOptions,
    "tuples": TupleOptions,
}
UNSAID = {"shard": {"propensity_a", "propensity_b"}}  # fields that are no option by their names


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
    if share == 1:  # flags are those of the project's commands
        raise InputError(
            "--seed 1 needs --retry; leave out --no-predictions, or give --set train.minutes=10 to extremis."
        )
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
    with pytest.raises(InputError, match=r"^seed=1 needs retry=True; leave out predictions=False, or give") as fault:
        example("here", "there", share=1)
    assert str(fault.value).endswith('set={"train.minutes": 10} to extremis.')
    with pytest.raises(InputError, match=r"example: Invalid value for 'batch': 0 is not in the range x>=1"):
        example("here", "there", batch=0)
    with pytest.raises(InputError, match=r"unknown option 'bacth'; did you mean 'batch'"):
        example("here", "there", bacth=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"^part '\.\./x'") as python:
        extremis.shard("raw/", "data/", onto="data0/", part="../x", progress=False)
    refused(call("shard", "raw/", "data/", "--onto", "data0/", "--part", "../x"), f"--{python.value}")
    refused(call("shard", "raw/", "data/", "--max-tokens", "0"), "'--max-tokens': 0 is not in the range x>=1")
    with pytest.raises(InputError, match=r"^--seed: input should be less than"):
        build_options(ShardOptions, {"seed": 1 << 64, "onto": None})


def worded(message: str) -> str:
    """Return the message of an error as Python has it."""
    with pytest.raises(InputError) as fault, naming_arguments():
        raise InputError(message)
    return str(fault.value)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("resume it with --resume, or name --split.", "resume it with resume=True, or name split."),
        ("Give --memory 8GiB, --minutes 10 or --no-filter.", 'Give memory="8GiB", minutes=10 or no_filter=True.'),
        ("as in --fields key=id,text=query.", 'as in fields="key=id,text=query".'),
        ("with --set data.holdout=0.02.", 'with set={"data.holdout": 0.02}.'),
        ("--set refresh.stale=wait, --set a.b=true", 'set={"refresh.stale": "wait"}, set={"a.b": True}'),
        ("by `extremis embed DATA OUT --split train`", "by `extremis embed DATA OUT --split train`"),
        ("give --direct_num_workers, or --runner=X", "give --direct_num_workers, or --runner=X"),
    ],
)
def test_python_words_flags_of_any_command_as_arguments(message: str, expected: str) -> None:
    assert worded(message) == expected


def test_no_message_names_a_flag_in_python() -> None:
    """But for those of Beam and of other programs, and within command lines."""
    foreign = re.compile(r"extremis [a-z]+ [^`();]*|--(?:shm-size|nproc-per-node|runner|direct_|[a-z]+_|json|x\b)")
    left = []
    for package in ("schemas", "search", "pipelines", "trainer", "extremis"):
        for path in (ROOT / package).rglob("*.py"):
            raised = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
            said = [worded(text) for node in raised for text in _texts(node)]
            left += [text for text in said if re.search("--[a-z]", foreign.sub("", text))]
    assert left == []


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the texts in a part of the source, with x for what is put into them."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
    elif isinstance(node, ast.Constant):
        yield str(node.value)
    else:
        for inner in ast.iter_child_nodes(node):
            yield from _texts(inner)


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


def test_a_command_has_every_option_of_its_pipeline() -> None:
    """Their names and types stand in both; default, bounds and help in the model alone."""
    for name, model in MODELS.items():
        fields = {field.alias or key: field for key, field in model.model_fields.items()}
        parameters = inspect.signature(getattr(extremis, name)).parameters
        assert fields.keys() - parameters.keys() == UNSAID.get(name, set())
        options: dict[str, Any] = {str(param.name): param for param in cli.commands[name].params}
        for key in fields.keys() & parameters.keys():
            literal = _literal(fields[key].annotation)
            assert literal == _literal(parameters[key].annotation) == list(getattr(options[key].type, "choices", [])), (
                key
            )
            assert parameters[key].default in (None, False) or key == "device", key


def _literal(kind: Any) -> list[str]:
    """Return the values of a type that names them."""
    members = [kind, *typing.get_args(kind)]
    return next((list(typing.get_args(each)) for each in members if typing.get_origin(each) is Literal), [])


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
    with pytest.raises(InputError, match=r"^sink = 'tar': expected one of 'parquet'"):
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
