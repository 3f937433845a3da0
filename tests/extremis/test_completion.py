"""Shell completion: what the console script answers to a shell."""

import inspect
import os
import sys
from pathlib import Path

import pytest

import extremis
from extremis.cli import cli, main
from tests.command import ROOT, captured

FILE = "a file"


def complete(line: str, folder: Path = ROOT) -> set[str]:
    """Return what bash would offer at the end of `line`, typed in `folder`; FILE: files and folders."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_EXTREMIS_COMPLETE": "bash_complete"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["extremis"])
        for name, value in words.items():
            patch.setenv(name, value)
        done = captured(main)
    answers = [answer.partition(",") for answer in done.out.split()]
    return {FILE if kind == "file" else value for kind, _, value in answers}


@pytest.mark.skipif(os.name == "nt", reason="shells of Unix")
def test_commands_options_and_recipes_are_completed() -> None:
    assert complete("extremis eval") == {"evaluate"}
    assert "--baseline" in complete("extremis evaluate --b")
    assert {"astra", "auto"} <= complete("extremis run a")
    assert complete("extremis shard raw/ data/ --sink w") == {"webdataset"}
    assert complete("extremis shard raw/ data/ --sink x") == set()


@pytest.mark.skipif(os.name == "nt", reason="shells of Unix")
def test_places_are_completed_and_recipes_are_names_and_toml_files(tmp_path: Path) -> None:
    for line in ("shard ", "shard raw/ d", "evaluate data/ ru", "predict exported/ in", "shard a b --onto d"):
        assert complete(f"extremis {line}") == {FILE}, line
    for name in ("mine.toml", "mine.csv"):
        (tmp_path / name).touch()
    for line in ("extremis run m", "extremis recipes show m", "extremis plan --recipe m"):
        assert complete(line, tmp_path) == {"mips-s", "mine.toml"}
    assert complete("extremis run papers/", tmp_path) == {FILE}


def test_every_place_of_every_command_is_completed() -> None:
    for name, line in cli.commands.items():
        parameters = inspect.signature(getattr(extremis, name)).parameters
        kinds_of = {key: str(parameter.annotation) for key, parameter in parameters.items()}
        places = {key for key, kind in kinds_of.items() if "PathLike" in kind or kind == "typing.Any"}
        context = line.make_context(name, [], resilient_parsing=True)
        for param in line.params:
            kinds = [answer.type for answer in param.shell_complete(context, "no-such/")]
            assert ("file" in kinds) == (param.name in places), param
