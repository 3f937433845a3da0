"""List what Extremis says: `python -m tests.messages [FOLDER...]` prints the help of all commands and every sentence in
the code that is not a docstring, with its place, to be read from top to bottom."""

import ast
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from extremis.cli import cli
from tests.command import ROOT, call

PACKAGES = ("schemas", "search", "pipelines", "trainer", "scoring", "extremis")


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of every string of three words or more, with the code of its placeholders."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            shown = (
                each.value if isinstance(each, ast.Constant) else f"{{{ast.unparse(each.value)}}}"
                for each in node.values
            )
            text = "".join(map(str, shown))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | docs:
            text = node.value
        else:
            continue
        if len(text.split()) >= 3:
            yield node.lineno, text


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the list
    for name in () if sys.argv[1:] else ("", *cli.commands):
        print(f"## extremis {name}\n{call(*name.split(), '--help').out}")
    for folder in sys.argv[1:] or PACKAGES:
        for place in sorted((ROOT / folder).rglob("*.py")):
            for line, text in sorted(sentences(place)):
                print(f"{place.relative_to(ROOT)}:{line}: {text}")
