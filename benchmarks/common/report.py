"""Report of a benchmark: one JSON object with claim, figures, ratios against bars, origin and machine."""

import importlib.util
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

# A bar is a lower bound, or with a leading "<" a strict upper bound: {"a": 0.8, "b": "<1.3"}.
Bar = float | str


def report(
    claim: str, figures: Mapping[str, Any], ratios: Mapping[str, float], bars: Mapping[str, Bar], **more: Any
) -> dict[str, Any]:
    """Print the report on the last line of standard output, and return it. Every bar names a ratio.

    `gaps` in `more` name missing measurements and reasons; with a gap the claim does not hold. Raises KeyError for a
    bar without a ratio.
    """
    body = {
        "claim": claim,
        "figures": dict(figures),
        "ratios": {name: round(value, 4) for name, value in ratios.items()},
        "bars": dict(bars),
        "holds": not more.get("gaps") and all(_holds(ratios[name], bar) for name, bar in bars.items()),
        **origin(),
        "machine": machine(),
        **more,
    }
    sys.stdout.write(json.dumps(body) + "\n")
    sys.stdout.flush()
    return body


def origin() -> dict[str, str]:
    """Return the command without folders of this machine, the commit ("+": with changes), and the day."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = spec.name.removesuffix(".__main__") if spec else "benchmarks"
    arguments = [Path(text).name if os.path.isabs(text) else text for text in sys.argv[1:]]
    return {
        "command": shlex.join(["python", "-m", name, *arguments]),
        "commit": _commit(),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }


def _commit() -> str:
    git = ["git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty=+"]
    try:
        done = subprocess.run(git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:  # the machine has no git
        return "unknown"
    return done.stdout.strip() or "unknown"


def machine() -> dict[str, Any]:
    """Describe the machine, without names of hosts or users."""
    packages = {name: module.__version__ for name in ("numpy", "pyarrow", "torch") if (module := sys.modules.get(name))}
    return {
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "cpu": _cpu(),
        "python": platform.python_version(),
        **packages,
    }


def require(*packages: str) -> None:
    """Check that `packages` can be imported. Raises SystemExit with status 2, which names missing packages."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        sys.stderr.write(f"missing: {', '.join(missing)}. Install them with: pip install -e '.[bench]'\n")
        raise SystemExit(2)


def interleave(sides: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Run each side once per round, so that other work on the machine affects all sides; return values by side."""
    values: dict[str, list[float]] = {name: [] for name in sides}
    order: Sequence[str] = list(sides)
    for number in range(rounds):
        for name in order if number % 2 == 0 else reversed(order):
            values[name].append(sides[name]())
            sys.stderr.write(f"round {number + 1} of {rounds}: {name} {values[name][-1]:,.4g}\n")
    return values


def medians(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(some) for name, some in values.items()}


def _holds(value: float, bar: Bar) -> bool:
    return value < float(bar[1:]) if isinstance(bar, str) else value >= bar


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
