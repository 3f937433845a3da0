"""What is slower is said to be, what is as fast is not, and what was agreed to passes."""

import os
import subprocess
import sys
from math import comb
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.against.judge import COVERAGE, Price, compare, find_price, read_prices

ROOT = Path(__file__).parents[2]
ROUNDS = st.sampled_from([6, 11, 21])


def costs(seed: int, rounds: int, ratio: float, noise: float, drift: float) -> tuple[np.ndarray, np.ndarray]:
    """Return costs of both sides: the machine's speed drifts for both, and each turn has noise of its own."""
    draw = np.random.default_rng(seed)
    speed = np.exp(np.cumsum(draw.normal(0, drift, rounds)))
    then, now = speed * np.exp(draw.normal(0, noise, (2, rounds)))
    return then, ratio * now


@given(st.integers(0, 10**6), ROUNDS, st.floats(0, 0.02), st.floats(0, 0.2), st.floats(0.5, 1.0))
def test_what_is_as_fast_is_not_slower(seed: int, rounds: int, noise: float, drift: float, ratio: float) -> None:
    assert not compare(*costs(seed, rounds, ratio, noise, drift)).is_slower


@given(st.integers(0, 10**6), ROUNDS, st.floats(0, 0.005), st.floats(0, 0.2), st.floats(1.1, 3.0))
def test_a_tenth_more_is_slower(seed: int, rounds: int, noise: float, drift: float, ratio: float) -> None:
    compared = compare(*costs(seed, rounds, ratio, noise, drift))
    assert compared.is_slower
    assert compared.low <= compared.ratio <= compared.high


@pytest.mark.parametrize("rounds", range(6, 40))
def test_the_interval_is_the_narrowest_that_covers_enough(rounds: int) -> None:
    ratios = np.arange(1, rounds + 1)
    compared = compare(np.ones(rounds), ratios)
    skipped = int(compared.low) - 1
    assert compared.high == rounds - skipped

    def covered(outside: int) -> float:
        return float(1 - 2 * sum(comb(rounds, k) for k in range(outside + 1)) / 2**rounds)

    assert covered(skipped) >= COVERAGE > covered(skipped + 1)


def test_a_price_covers_what_its_row_says(tmp_path: Path) -> None:
    file = tmp_path / "prices.md"
    file.write_text(
        "# Prices\n\n| commit | figure | at most | for what |\n| --- | --- | --- | --- |\n"
        "| `abc` | step: *pool*: ms | 1.2 | more rows |\n"
    )
    prices = read_prices(file)
    assert prices == [Price("abc", "step: *pool*: ms", 1.2, "more rows")]
    between = {"abc"}.__contains__
    assert find_price("step: own pool, 131K: ms", 1.1, prices, between) == prices[0]
    assert find_price("step: own pool, 131K: ms", 1.3, prices, between) is None
    assert find_price("planning: own pool: ms", 1.1, prices, between) is None
    assert find_price("step: own pool, 131K: ms", 1.1, prices, lambda commit: False) is None
    file.write_text("| abc | step | much | more rows |\n")
    with pytest.raises(ValueError, match="at most"):
        read_prices(file)


def test_the_project_s_own_prices_can_be_read() -> None:
    read_prices(ROOT / "benchmarks" / "prices.md")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no-such-commit"], "no commit 'no-such-commit'"),
        (["HEAD", "--only", "streem"], "there are stream, breakdown"),
        (["HEAD", "--rounds", "2"], "takes 6 at least"),
    ],
)
def test_wrong_use_is_one_message(arguments: list[str], message: str) -> None:
    command = [sys.executable, "-m", "benchmarks.against", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["chaos", "stream_memory"])
def test_a_benchmark_without_a_package_names_the_extra_on_one_line(module: str, tmp_path: Path) -> None:
    (tmp_path / "psutil.py").write_text("raise ModuleNotFoundError('none here', name='psutil')")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", f"benchmarks.{module}", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "missing: psutil. Install it with: pip install -e '.[bench]'\n"
