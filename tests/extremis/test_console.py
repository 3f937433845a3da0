"""Output for people: numbers are whole at any width of the terminal."""

import subprocess
import sys

import pytest

from tests.command import ROOT, environment

_SHOW = """
from extremis.console import table
columns = ["recipe", *(f"PSP@{k}" for k in range(6))]
table("figures", columns, [["nn-top-uniform", *(f"{k}1.75 ±0.5{k}" for k in range(6))]])
"""


@pytest.mark.parametrize("columns", [None, 80, 72])
def test_no_figure_of_a_table_is_cut_off(columns: int | None) -> None:
    env = environment({} if columns is None else {"COLUMNS": str(columns)})
    if columns is None:
        env.pop("COLUMNS", None)
    done = subprocess.run(
        [sys.executable, "-c", _SHOW],
        cwd=ROOT,
        env={**env, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=True,
    )
    shown = done.stdout.decode()
    assert all(f"{k}1.75" in shown and f"±0.5{k}" in shown for k in range(6))
    assert "nn-top-uniform" in shown
    longest = max(map(len, shown.splitlines()))
    assert longest <= (columns or 200)
    if columns is None:
        assert "01.75 ±0.50 │" in shown
