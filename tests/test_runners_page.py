"""docs/runners.md and the Dockerfile, as far as they can be checked without a cluster and an engine."""

import re
import shlex
from pathlib import Path

import pytest

from extremis.cli import cli
from pipelines.runners.local import choose_runner

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "runners.md").read_text()
COMMANDS = [line.strip() for line in PAGE.splitlines() if line.startswith("    extremis ")]


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
