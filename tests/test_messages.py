"""Messages name an option once, and each front end spells it in its own way; an InputError has its facts."""

import pickle
import re
import subprocess
import sys
from typing import Any

import pytest

from extremis.cli import cli
from pipelines.options import MineOptions, ShardOptions
from schemas.errors import InputError, front_end, option
from schemas.options import check
from tests.command import ROOT, environment
from tests.messages import PACKAGES, sentences

# Whole command lines, which stay as a shell takes them, and options of other programs.
COMMAND_LINE = re.compile(r"(?:extremis|\{program\}|torchrun) [^`();]*")
FOREIGN = re.compile(r"--(?:shm-size|help|id|worker_pool|runner|parallelism|\w+_\w+)\b")


@pytest.mark.parametrize(
    ("stated", "python", "shell"),
    [
        (("max_tokens",), "max_tokens", "--max-tokens"),
        (("max_tokens", 5), "max_tokens=5", "--max-tokens 5"),
        (("relative_margin", 0.05), "relative_margin=0.05", "--relative-margin 0.05"),
        (("format", "csv"), 'format="csv"', "--format csv"),
        (("part", 'a "b"'), r'part="a \"b\""', "--part 'a \"b\"'"),
        (("out", "URL"), "out=URL", "--out URL"),
        (("overwrite", True), "overwrite=True", "--overwrite"),
        (("predictions", False), "predictions=False", "--no-predictions"),
        (("no_filter", True), "no_filter=True", "--no-filter"),
        (("from_run",), "from_run", "--from"),
        (("fields", {"key": "id", "text": "NAME"}), 'fields={"key": "id", "text": NAME}', "--fields key=id,text=NAME"),
        (
            ("set", {"train.epochs": 5, "refresh.stale": "wait", "a.b": True}),
            'set={"train.epochs": 5, "refresh.stale": "wait", "a.b": True}',
            "--set train.epochs=5 --set refresh.stale=wait --set a.b=true",
        ),
    ],
)
def test_an_option_is_spelled_as_one_types_it(stated: tuple[Any, ...], python: str, shell: str) -> None:
    assert option(*stated) == python
    with front_end("shell"):
        assert option(*stated) == shell
    assert option(*stated) == python


def test_child_processes_spell_as_the_process_that_started_them() -> None:
    code = (
        "from schemas.errors import front_end, option\n"
        "with front_end('shell'):  # as the command line, in a miner\n"
        "    print(option('for_epoch'))"
    )
    for name, expected in (("shell", "--for-epoch"), ("python", "for_epoch")):
        with front_end(name):
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, check=True
            )
        assert done.stdout.strip() == expected


def test_an_error_of_one_parameter_has_its_facts() -> None:
    with pytest.raises(
        InputError, match=r"^max_tokens: expected a number greater than or equal to 1, got 0\.$"
    ) as fault:
        check(ShardOptions, {"max_tokens": 0})
    error = pickle.loads(pickle.dumps(fault.value))
    assert (error.parameter, error.got) == ("max_tokens", "0")
    assert error.expected == "a number greater than or equal to 1"
    with (
        front_end("shell"),
        pytest.raises(InputError, match=r"^--max-tokens: .* 0\. --seed: .* -1\.$") as fault,
    ):
        check(ShardOptions, {"max_tokens": 0, "seed": -1})
    assert fault.value.parameter == "max_tokens"
    with pytest.raises(InputError, match=r"^memory: expected a number with a unit, .* got 'much'\.$") as fault:
        check(MineOptions, {"memory": "much"})
    assert fault.value.parameter == "memory"
    stated = InputError(parameter="out", got="s3://key:secret@bucket/out", expected="a folder", remedy="Give another.")
    assert str(stated) == "out: expected a folder, got s3://***@bucket/out. Give another."
    assert stated.got == "s3://***@bucket/out"


def test_no_message_spells_an_option_itself() -> None:
    """A flag in a message is part of a whole command line, or of another program."""
    own = []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            said = ((line, FOREIGN.sub("", COMMAND_LINE.sub("", text))) for line, text in sentences(path))
            own += [f"{path.relative_to(ROOT)}:{line}: {text}" for line, text in said if re.search("--[a-z]", text)]
    assert own == []


def test_every_option_in_a_message_is_one_of_a_command() -> None:
    known = {param.name for line in cli.commands.values() for param in line.params}
    named = {
        name
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"\boption\([\"'](\w+)[\"']", path.read_text())
    }
    assert named - known == set()
