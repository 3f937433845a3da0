"""The page of Python, run as it stands; and what an editor shows of public names, which has no Any."""

import subprocess
import sys
from pathlib import Path

import pytest

import extremis
from extremis.result import Result
from tests.command import ROOT, environment
from tests.pages import DOCS, blocks

WHOLE_LOOP = next(block for block in blocks(DOCS / "python.md", "python") if "read_csv" in block)


def test_the_page_goes_from_a_data_frame_to_predictions(tmp_path: Path) -> None:
    words = ("sea", "ship", "storm", "sky", "moon")
    rows = [f"a {words[n % 5]} and a {words[n % 3]},{words[n % 5]}" for n in range(300)]
    (tmp_path / "pairs.csv").write_text("\n".join(["text,label", *rows]))
    small = WHOLE_LOOP.replace(
        '{"train.epochs": 10}', '{"train.epochs": 10, "encoder.dimension": 16, "order.batch": 32}'
    )
    done = subprocess.run(
        [sys.executable, "-c", small],
        cwd=tmp_path,
        env=environment({"PYTHONPATH": str(ROOT)}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, *table = done.stdout.splitlines()
    assert float(first.split()[0]) > 90
    assert table[0].split() == ["text", "label", "score"]
    assert {row.split()[-2] for row in table[1:6]} <= set(words)


@pytest.mark.slow
def test_an_editor_shows_no_any(tmp_path: Path) -> None:
    """mypy checks the page strictly, and reveals the types of all public names and of their results' fields."""
    results = {extremis.Result, *Result.__subclasses__()}
    fields = [f"{each.__module__}.{each.__name__}" for each in results]
    called = {*extremis.__all__} - {"Labels"}  # a model makes these, out of a table of Arrow, which has no types
    revealed = [f"reveal_type(extremis.{name})" for name in sorted(called)]
    made = [f"def of_{n}(each: {name}) -> None: reveal_type(each)" for n, name in enumerate(fields)]
    modules = {name.rpartition(".")[0] for name in fields}
    (tmp_path / "page.py").write_text("\n".join([WHOLE_LOOP, *(f"import {m}" for m in modules), *revealed, *made]))
    options = ["--strict", "--ignore-missing-imports", "--no-error-summary", f"--cache-dir={tmp_path / 'cache'}"]
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file=",
        *options,
        "--follow-imports=silent",
        str(tmp_path / "page.py"),
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    notes = [line for line in done.stdout.splitlines() if "Revealed type" in line]
    assert len(notes) == len(revealed) + len(made), done.stdout[-3000:]
    assert not [line for line in notes if "Any" in line.partition("Revealed")[2]]
    assert not [line for line in done.stdout.splitlines() if ": error:" in line]
