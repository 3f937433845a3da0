"""Shell completion: what the console script answers to a shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

import extremis
from extremis.cli import cli
from tests import fields
from tests.command import ROOT, environment

FILE = "a file"


def variables(line: str) -> dict[str, str]:
    """What a shell sets at the end of `line`."""
    return {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}


def offered(answers: str) -> set[str]:
    parts = [answer.partition(",") for answer in answers.split()]
    return {FILE if kind == "file" else value for kind, _, value in parts}


def complete(line: str, folder: Path = ROOT) -> set[str]:
    """Return what bash would offer at the end of `line`, typed in `folder`; FILE: files and folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, value in variables(line).items():
            patch.setenv(name, value)
        return offered(BashComplete(cli, {}, "extremis", "_EXTREMIS_COMPLETE").complete())


@pytest.mark.skipif(os.name == "nt", reason="shells of Unix")
def test_the_program_answers_a_shell() -> None:
    script = "import sys; sys.argv = ['extremis']; from extremis.cli import main; main()"
    env = environment({**variables("extremis eval"), "_EXTREMIS_COMPLETE": "bash_complete"})
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert offered(done.stdout) == {"evaluate"}


@pytest.mark.skipif(os.name == "nt", reason="shells of Unix")
def test_commands_options_and_recipes_are_completed() -> None:
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
        described = getattr(extremis, name).described
        places = {key for key, own in described.own.items() if "PathLike" in str(own.annotation)}
        if described.options is not None:
            stubs = "\n".join(fields.stub(model) for model in described.options.__mro__ if model in fields.MODELS)
            places |= {*re.findall(r"(\w+): .*PathLike", stubs)} - described.own.keys()
        context = line.make_context(name, [], resilient_parsing=True)
        for param in line.params:
            kinds = [answer.type for answer in param.shell_complete(context, "no-such/")]
            assert ("file" in kinds) == (param.name in places), param
