"""A command is one typed function: what the command line, Python, an editor and the pages make of it."""

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from pydantic import Field

import extremis
from extremis.cli import cli
from extremis.command import Command
from extremis.function import Place, Progress, Settings, function
from extremis.result import Grid, Result
from pipelines.options import MergeOptions, ShardOptions
from schemas.errors import InputError, option
from schemas.options import Shown
from tests import fields
from tests.command import ROOT, call, environment, refused
from tests.pages import DOCS, blocks

CALLS: list[dict[str, Any]] = []


@dataclass(frozen=True, repr=False, kw_only=True)
class ExampleResult(Result):
    place: str
    score: float | None = None


@function
def example(
    place: Place,
    *others: Place,
    options: MergeOptions | None = None,
    batch: Annotated[int, Field(ge=1, description="How many.")] = 3,
    share: float | None = None,
    kind: Literal["a", "b"] = "a",
    dry: bool = False,
    shown: bool = True,
    set: Settings = (),
    from_run: Annotated[Place, Shown("RUN1")] | None = None,
    purpose: str = "serving",
    progress: Progress = True,
    **fields: Any,
) -> ExampleResult:
    """Do nothing at PLACE.

    Options:
        share: A share
            of all.

    Example:
      extremis example here
    """
    if share == 1:
        raise InputError(f"{option('share', share)} needs {option('dry', True)}.")
    CALLS.append({name: value for name, value in locals().items() if name not in ("progress", "fields")})
    grid = Grid("sizes", ["", "count"], [["rows", "5"]])
    return ExampleResult(place=str(place), more={"found": {"a": 1}}, shown=[grid, "a line"])


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({}, ()),
        ({"batch": 7, "share": 0.1, "kind": "b"}, ("--batch", "7", "--share", "0.1", "--kind", "b")),
        ({"dry": True, "shown": False}, ("--dry", "--no-shown")),
        ({"dry": False, "shown": True, "share": None}, ()),
        ({"set": {"train.epochs": 5, "a.b": "c"}}, ("--set", "train.epochs=5", "--set", 'a.b="c"')),
        ({"set": ["train.epochs=5"]}, ("--set", "train.epochs=5")),
        ({"from_run": Path("runs/1"), "purpose": "batch"}, ("--from", "runs/1", "--for", "batch")),
        ({"width": 5, "by": "score"}, ("--width", "5", "--by", "score")),
        ({"options": MergeOptions(width=5), "by": "score"}, ("--width", "5", "--by", "score")),
    ],
)
def test_python_and_the_shell_call_the_same_function(options: dict[str, Any], arguments: tuple[str, ...]) -> None:
    example(Path("here"), "there", progress=False, **options)
    line = Command(example.described)
    work = line.invoke(line.make_context("example", [*arguments, "here", "there"]))
    work()
    python, shell = CALLS[-2:]
    assert python == shell
    assert (python["place"], python["others"]) == ("here", ("there",))


def test_faults_name_the_parameter() -> None:
    with pytest.raises(TypeError):
        example()  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"^share=1 needs dry=True\.$"):
        example("here", "there", share=1)
    with pytest.raises(InputError, match=r"^batch: expected a number greater than or equal to 1, got 0"):
        example("here", "there", batch=0)
    with pytest.raises(InputError, match=r"unknown option 'bacth'; did you mean 'batch'"):
        example("here", "there", bacth=1)
    with pytest.raises(InputError, match=r"unknown option 'max_token'; did you mean 'max_tokens'"):
        extremis.shard("raw/", "data/", max_token=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"^sink: expected one of 'parquet', .* got 'tar'"):
        extremis.shard("raw/", "data/", sink="tar", progress=False)
    with pytest.raises(InputError, match=r"unknown recipe 'asta'"):
        extremis.train("asta", "data/", "runs/1", progress=False)
    with pytest.raises(AttributeError, match="no attribute 'shrad'"):
        extremis.shrad  # noqa: B018
    with pytest.raises(InputError, match=r"^part '\.\./x'") as python:
        extremis.shard("raw/", "data/", onto="data0/", part="../x", progress=False)
    refused(call("shard", "raw/", "data/", "--onto", "data0/", "--part", "../x"), f"--{python.value}")
    refused(
        call("shard", "raw/", "data/", "--max-tokens", "0"), "--max-tokens: expected a number greater than or equal"
    )
    refused(call("evaluate", "data/", "run/", "--k", "5,x"), "--k: expected a valid integer")


def test_a_result_is_typed_readable_and_one_object() -> None:
    result = example("here", "there", progress=False)
    assert result.to_json() == {"place": "here", "found": {"a": 1}}
    assert repr(result).split() == [
        "ExampleResult",
        "place:",
        "here",
        "found:",
        "a",
        "1",
        "sizes",
        "count",
        "rows",
        "5",
        "a",
        "line",
    ]
    assert "<td>rows</td><td>5</td>" in result._repr_html_()
    assert "a line" in result._repr_html_()


def test_nothing_is_printed_by_a_function(capfd: pytest.CaptureFixture[str]) -> None:
    """But for progress, which goes to standard error or to a listener."""
    events: list[extremis.Event] = []
    assert extremis.recipes(progress=events.append).to_json()["astra"]
    extremis.recipes("validate", "astra", progress=events.append)
    assert [event.text for event in events] == ["astra: valid"]
    extremis.recipes("validate", "astra", progress=False)
    assert capfd.readouterr() == ("", "")
    extremis.recipes("validate", "astra")
    assert capfd.readouterr() == ("", "astra: valid\n")


def test_no_function_prints() -> None:
    prints = {"table", "results", "print_json", "print"}
    for module in ("training", "using", "evaluation", "inspecting", "planning", "ablation", "versioning", "auto"):
        tree = ast.parse((ROOT / "extremis" / f"{module}.py").read_text())
        assert not prints & {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} - {"table"}, module
        assert not [node for node in _imports(tree) if node in prints], module


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "extremis.console":
            yield from (alias.name for alias in node.names)


def test_help_lists_the_options_with_their_meaning() -> None:
    assert "    share: A share of all.\n" in (inspect.getdoc(example) or "")
    assert "    batch: How many. Default: 3.\n" in (inspect.getdoc(example) or "")
    text = inspect.getdoc(extremis.shard) or ""
    assert "max_reject_share: Largest allowed fraction of rejected rows" in text
    assert "Default: 0.001." in text
    assert "progress: " in text
    assert inspect.signature(extremis.shard).parameters["tokenizer_texts"].annotation is int
    shown = call("shard", "--help").out
    assert "0<=x<=1" in shown
    assert "[default: train:30000]" in shown
    assert "parquet, webdataset" in " ".join(shown.split())
    assert "xc-sparse" in shown
    headings = [line for line in call("mine", "--help").out.splitlines() if line.endswith(":") and line[0] != " "]
    assert headings == [
        "Options:", "Vectors in files:", "What to mine:", "What to read and write:", "Filters:", "Search:", "Resources:"
    ]  # fmt: skip


def test_every_command_is_public_and_every_option_has_its_meaning() -> None:
    assert set(cli.commands) <= set(extremis.__all__)
    for name, line in cli.commands.items():
        shown = call(name, "--help").out
        options = [param for param in line.params if isinstance(param, click.Option)]
        context = line.make_context(name, [], resilient_parsing=True)
        meanings = {option.name: (option.get_help_record(context) or ("", ""))[1] for option in options}
        assert [key for key, meaning in meanings.items() if not meaning.partition("[")[0].strip()] == [], name
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


def test_an_editor_sees_the_options_of_the_models() -> None:
    """The stub has each option once, with its type; and type checkers find no Any in what is public."""
    assert (ROOT / "extremis" / "fields.pyi").read_text() == fields.page()
    for name in extremis.COMMANDS:
        described = getattr(extremis, name).described
        stated = inspect.signature(described.implementation).parameters
        kinds = [stated[key].annotation for key in stated]
        assert not [kind for kind in [*kinds, described.signature.return_annotation] if kind is Any], name
    assert ShardOptions in [getattr(extremis, name).described.options for name in extremis.COMMANDS]


def test_the_page_lists_what_is_public() -> None:
    page = (DOCS / "python.md").read_text()
    assert [name for name in extremis.__all__ if f"`{name}" not in page] == []
    for block in (*blocks(DOCS / "python.md", "python"), *blocks(ROOT / "README.md", "python")):
        compile(block, "page", "exec")
