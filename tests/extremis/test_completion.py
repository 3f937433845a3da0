"""Shell completion: what the console script answers to a shell."""

import os
import subprocess
import sys

import pytest

from tests.command import ROOT, environment


def complete(line: str) -> set[str]:
    """Return what bash would offer at the end of `line`."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_EXTREMIS_COMPLETE": "bash_complete"}
    script = "import sys; sys.argv = ['extremis']; from extremis.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=environment(words), capture_output=True, text=True, check=False
    )
    return {answer.partition(",")[2] for answer in done.stdout.splitlines()}


@pytest.mark.skipif(os.name == "nt", reason="shells of Unix")
def test_commands_options_and_recipes_are_completed() -> None:
    assert complete("extremis eval") == {"evaluate"}
    assert "--baseline" in complete("extremis evaluate --b")
    assert {"astra", "auto"} <= complete("extremis run a")
