"""The real command line, as a process of its own."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extremis.cli import main

ROOT = Path(__file__).parents[1]

# A recipe that trains in a moment: a small bag, a few random and hard negatives.
TINY = (
    "encoder.dimension=8",
    "encoder.buckets=512",
    "negatives.random=32",
    "negatives.hard=4",
    "order.batch=64",
    "order.streams=4",
    "refresh.start=2",
    "train.threads=1",
    "logging.every_steps=1",
)

# Choices of the run `mined` of tests/conftest.py, five epochs of which three are trained on mined tables.
MINED_EPOCHS = 5
MINED = (
    "order.batch=128",
    f"train.epochs={MINED_EPOCHS}",
    "refresh.every=1",
    "refresh.stale=wait",  # so that no table is late, and every run trains on the same ones
    "checkpoint.every_steps=5",
    "encoder.feature_dropout=0.3",
    "encoder.dropout=0.1",
    "logging.tensorboard=false",
)

# Beam options: two worker processes beside the launching one.
PROCESSES = ("--direct_num_workers=2", "--direct_running_mode=multi_processing")


@dataclass(frozen=True)
class Done:
    """Result of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on the last line of standard output."""
        return json.loads(self.out.splitlines()[-1])


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, with one thread a process: the machine is shared."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **(extra or {})}


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "extremis", *map(str, arguments)]


def extremis(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    check: bool = True,
    cwd: Path = ROOT,
    timeout: float = 300,
    **popen: Any,
) -> Done:
    """Run `extremis ARGUMENTS` to its end; with `check`, it has to succeed."""
    done = subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        env=environment(env),
        cwd=cwd,
        timeout=timeout,
        check=False,
        **popen,
    )
    result = Done(done.returncode, done.stdout, done.stderr)
    assert not check or result.status == 0, f"{' '.join(map(str, arguments))}: status {result.status}\n{result.err}"
    return result


def call(*arguments: str | Path) -> Done:
    """`extremis ARGUMENTS` in this process, which has imported already what it needs."""
    return captured(lambda: main([str(argument) for argument in arguments]))


def captured(program: Callable[[], object]) -> Done:
    """Run a program in this process to its end, or its SystemExit."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            program()
            status = 0
        except SystemExit as end:
            status = int(end.code or 0)
    return Done(status, out.getvalue(), err.getvalue())


def sets(*overrides: str) -> list[str]:
    """`--set` options of TINY, then `overrides`, which win."""
    return [word for override in (*TINY, *overrides) for word in ("--set", override)]


def refused(done: Done, *words: str, status: int = 2) -> None:
    """The command ended with `status` and one message, `words` in it, and no traceback."""
    assert done.status == status, done.err
    assert "Traceback" not in done.err + done.out, done.err
    assert "a bug in Extremis" not in done.err, done.err
    errors: Sequence[str] = [line for line in done.err.splitlines() if line.lower().startswith("error: ")]
    assert len(errors) == 1, done.err
    for word in words:
        assert word in done.err, f"{word!r} is not in: {done.err}"
