"""Blocks of code on the pages of docs/, and the command lines in them."""

import re
from pathlib import Path

from tests.command import ROOT

DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:\$ |    )?(?:torchrun .*-m |[.]venv/bin/)?extremis (\S.*?)(?:  .*)?")


def blocks(page: Path, language: str) -> list[str]:
    """Return the bodies of the page's code blocks in `language`."""
    return [body for name, body in FENCE.findall(page.read_text()) if name == language]


def typed(page: Path) -> list[str]:
    """Return the lines that a reader of the page types, in order."""
    return [line for body in blocks(page, "console") for line in typed_lines(body)]


def typed_lines(console: str) -> list[str]:
    """Return what a reader types of a block of the console: the lines after `$ `, without their comments."""
    return [line[2:].partition("  ")[0] for line in console.splitlines() if line.startswith("$ ")]


def commands(page: Path) -> list[str]:
    """Return the arguments of the `extremis` command lines in the page's blocks, fenced or indented."""
    lines = page.read_text().replace("\\\n", " ").splitlines()
    return [match[1] for line in lines if (match := COMMAND.fullmatch(line))]
