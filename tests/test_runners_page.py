"""docs/runners.md and the Dockerfile, as far as they can be checked without a cluster and an engine."""

import configparser
import re
import shlex
from pathlib import Path

import pytest

from extremis.cli import cli
from pipelines.runners.local import choose_runner

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "runners.md").read_text()
COMMANDS = [line.strip() for line in PAGE.splitlines() if line.startswith("    extremis ")]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_line_parses_ours_and_beams(line: str) -> None:
    """Our half by the command line's own parser, Beam's by its option classes, which refuse what they do not know."""
    _, name, *arguments = shlex.split(line)
    context = cli.commands[name].make_context(name, list(arguments))
    tail = list(context.params.get("beam_options") or ())
    assert tail == (arguments[arguments.index("--") + 1 :] if "--" in arguments else [])
    if "DataflowRunner" in line:
        pytest.importorskip("apache_beam.runners.dataflow.dataflow_runner")
    choose_runner(tail)


def test_every_runner_and_pipeline_command_is_shown() -> None:
    assert {shlex.split(line)[1] for line in COMMANDS} == {"shard", "mine", "embed", "run", "plan"}
    shown = {word for line in COMMANDS for word in shlex.split(line) if word.startswith("--runner=")}
    named = {f"--runner={name}" for name in re.findall(r"^\| \w+ \| `--runner=(\w+)`", PAGE, re.MULTILINE)}
    assert shown == named | {"--runner=PortableRunner"}


def test_images_and_installs_name_extras_and_folders_that_there_are() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = set(setup["options.extras_require"])
    named = re.findall(r"EXTRAS=([\w,]+)", PAGE + DOCKERFILE) + re.findall(r"install '\.\[([\w,]+)\]", PAGE)
    assert {extra for some in named for extra in some.split(",")} <= extras
    packages = {name.split(".")[0] for name in setup["options"]["packages"].split()}
    elsewhere = setup["options"]["package_dir"].split()[2::3]
    assert packages | set(elsewhere) == set(re.findall(r"^COPY ([\w/]+) \1$", DOCKERFILE, re.MULTILINE))
    ignored = set((ROOT / ".dockerignore").read_text().split())
    assert not ignored & {folder.split("/")[0] for folder in (*packages, *elsewhere)}
