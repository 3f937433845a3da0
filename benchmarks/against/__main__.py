"""Two commits measured in turns on one machine: finds figures that are slower than at COMMIT without intention.

    python -m benchmarks.against COMMIT [--only NAME,...] [--rounds N] [--out FILE]

COMMIT is checked out into a separate folder. Each side runs its own code on the same input: in a long-lived process per
side (`side`), and as commands of `extremis`. Every figure is a cost, so a ratio above 1 is slower. The interval of a
ratio covers the median with 95 %. The exit status is 1 if an interval begins above 1.05, begins above 1.05 again when
the measurement is repeated alone, and no row of `prices.md` accepts the higher cost.
"""

import argparse
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.against.judge import Compared, Price, compare, find_price, read_prices
from benchmarks.common.report import report, require

ROOT = Path(__file__).resolve().parents[2]
PRICES = ROOT / "benchmarks" / "prices.md"
SIDE = "benchmarks/against/side.py"
TATE = ROOT / "examples" / "tate"
# Rounds of each measurement within a process; a command takes seconds per round.
INSIDE = {"stream": 11, "breakdown": 21, "resume": 21, "planning": 11, "step": 11, "serve": 11}
COMMANDS = (
    *("shard", "shard 1000", "mine", "embed", "evaluate", "evaluate fused", "inspect data", "inspect export", "export"),
    *("predict 1", "predict 1000"),
)
HELP = (
    "shard",
    "run",
    "train",
    "mine",
    "embed",
    "cluster",
    "evaluate",
    "fuse",
    "export",
    "predict",
    "inspect",
    "report",
)
# What ends without work, with the exit status.
BRIEF = {
    **dict.fromkeys(("--help", "--version", *(f"{command} --help" for command in HELP)), 0),
    **dict.fromkeys(("shrad", "shard in out --max-tokenz 3"), 2),
}
OUTSIDE = ("commands", "start-up", "bytes")
COMMAND_ROUNDS = 6
NAMES = (*INSIDE, *OUTSIDE)
NEEDED_GIB = 4
TRAINED = (
    *(
        "train.epochs=3",
        "train.threads=1",
        "checkpoint.every_epochs=1",
        "validation.split=val",
        "logging.tensorboard=false",
    ),
    *("order.batch=512", "encoder.dimension=32", "encoder.hidden=64", "encoder.buckets=65536", "negatives.random=128"),
    *("negatives.hard=20", "refresh.stale=wait", "refresh.start=2", "refresh.every=1"),
)

Costs = dict[str, float]


@dataclass
class Side:
    """One commit: its checkout, its outputs, and its measuring process."""

    name: str
    checkout: Path
    folder: Path
    process: "subprocess.Popen[str] | None" = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        compiled = {"PYTHONDONTWRITEBYTECODE": ""}  # else each command would compile every module again
        path = os.pathsep.join(filter(None, [str(self.checkout), os.environ.get("PYTHONPATH")]))
        self.environment = {**os.environ, **compiled, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}

    def ask(self, measure: str, folder: Path, write: bool) -> dict[str, Any]:
        """Return the answer of the side's process. Raises SystemExit if the process has ended."""
        if self.process is None:
            command = [sys.executable, "-m", "benchmarks.against.side"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            threads = {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, cwd=self.checkout, env={**self.environment, **threads}, **pipes)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"measure": measure, "folder": str(folder), "write": write}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: {measure} ended with status {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self, *arguments: str, status: int = 0) -> Costs:
        """Run `extremis ARGUMENTS`; return seconds and MiB. Raises SystemExit unless the command ends with `status`."""
        from benchmarks.common.process_memory import measure

        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        log = self.folder / "log"
        with log.open("w") as errors:
            command = [sys.executable, "-m", "extremis", *arguments]
            seen = measure(command, interval=0.1, cwd=self.checkout, env=self.environment, stderr=errors)
        if seen.status != status:
            raise SystemExit(
                f"{self.name}: extremis {' '.join(arguments)}: status {seen.status}\n{log.read_text()[-2000:]}"
            )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return {"processor s": processor, "s": seen.seconds, "MiB": seen.peak_bytes / 2**20}

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait()
            self.process = None


def main() -> None:
    """Compare and print. Raises SystemExit with status 1 if a figure is slower, 2 if the comparison cannot start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what to compare this checkout with, as git names it")
    parser.add_argument("--only", default="", metavar="NAME,...", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, help="of every measurement, 6 at least; default: as many as each needs")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name] or list(NAMES)
    check(parser, names, options.rounds)
    try:
        commit = git("rev-parse", "--verify", f"{options.commit}^{{commit}}")
    except subprocess.CalledProcessError:
        parser.error(f"no commit {options.commit!r} in {ROOT}: name one of `git log`, or fetch it")
    with (
        tempfile.TemporaryDirectory(prefix="extremis-against-") as scratch,
        checked_out(commit, Path(scratch)) as other,
    ):
        sides = [Side("then", other, Path(scratch, "of-then")), Side("now", ROOT, Path(scratch, "of-now"))]
        for side in sides:
            side.folder.mkdir()
        compared = compare_sides(sides, Path(scratch), names, options.rounds)
        slower = [figure for figure, result in compared.items() if result.is_slower]
        prices = read_prices(PRICES)
        paid = {figure: price_of(figure, compared[figure], prices, commit) for figure in slower}
        unpaid = [figure for figure, price in paid.items() if price is None]
        if unpaid:
            sys.stderr.write(f"again, alone: {', '.join(unpaid)}\n")
            again = compare_sides(sides, Path(scratch), sorted({name_of(figure) for figure in unpaid}), options.rounds)
            unpaid = [figure for figure in unpaid if again[figure].is_slower]
            compared.update({figure: again[figure] for figure in slower if figure in again})
    print_table(compared, paid, unpaid, commit)
    body = report(
        f"nothing is slower than at {commit[:10]} but for what prices.md says",
        {
            figure: {"then": result.then, "now": result.now, "interval": [result.low, result.high]}
            for figure, result in compared.items()
        },
        {figure: result.ratio for figure, result in compared.items()},
        {},
        slower=unpaid,
        prices={figure: f"{price.commit}: {price.gain}" for figure, price in paid.items() if price is not None},
    )
    if options.out:
        options.out.write_text(json.dumps(body, indent=1) + "\n")
    sys.exit(1 if unpaid else 0)


def check(parser: argparse.ArgumentParser, names: Sequence[str], rounds: int | None) -> None:
    """Check arguments, packages and disk space before the work. Raises SystemExit with status 2."""
    require("psutil", "apache_beam", "faiss", "torch")
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        parser.error(f"--only {unknown[0]}: no such measurement; there are {', '.join(NAMES)}")
    if rounds is not None and rounds < COMMAND_ROUNDS:
        parser.error(f"--rounds {rounds}: an interval of 95 % takes {COMMAND_ROUNDS} at least")
    free = shutil.disk_usage(tempfile.gettempdir()).free / 2**30
    if free < NEEDED_GIB:
        parser.error(f"{tempfile.gettempdir()}: {free:.1f} GiB free, {NEEDED_GIB} needed; free some, or set TMPDIR")


def git(*arguments: str) -> str:
    """Return the output of git. Raises CalledProcessError."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


@contextlib.contextmanager
def checked_out(commit: str, scratch: Path) -> Iterator[Path]:
    """Yield a checkout of `commit`, with measurements of this side if the commit is older than the measurements."""
    other = scratch / "then"
    git("worktree", "add", "--detach", str(other), commit)
    try:
        if not (other / SIDE).exists():
            shutil.copytree((ROOT / SIDE).parent, (other / SIDE).parent, ignore=shutil.ignore_patterns("__pycache__"))
        yield other
    finally:
        git("worktree", "remove", "--force", str(other))


def compare_sides(
    sides: Sequence[Side], scratch: Path, names: Sequence[str], rounds: int | None
) -> dict[str, Compared]:
    """Measure both sides in turns, and compare the figures that both have."""
    costs: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    missing: dict[str, str] = {}
    if {"serve", *OUTSIDE} & {*names}:
        for side in sides:
            prepare(side)
    try:
        for name in names:
            count = 1 if name == "bytes" else rounds or INSIDE.get(name, COMMAND_ROUNDS)
            began = time.monotonic()
            for number in range(count + (name in INSIDE)):  # the first round within a process is a warm-up
                for place in (0, 1) if number % 2 == 0 else (1, 0):
                    figures = measure_side(sides[place], scratch, name, missing)
                    if number or name not in INSIDE:
                        for figure, cost in figures.items():
                            costs[f"{name}: {figure}"][place].append(cost)
            sys.stderr.write(f"{name}: {count} rounds, {time.monotonic() - began:.0f} s\n")
    finally:
        for side in sides:
            side.close()
    for measurement, reason in missing.items():
        sys.stderr.write(f"not there: {measurement}: {reason}\n")
    return {figure: compare(*pair) for figure, pair in costs.items() if len(pair[0]) == len(pair[1])}


def measure_side(side: Side, scratch: Path, name: str, missing: dict[str, str]) -> Costs:
    """Return the costs of one round of a measurement."""
    if name in INSIDE:
        folder = side.folder if name == "serve" else scratch
        answer = side.ask(name, folder, write=side.name == "then")
        if "missing" in answer:
            missing[f"{name}, {side.name}"] = answer["missing"]
        return dict(answer.get("figures", {}))
    if name == "bytes":
        return {part: float(bytes_below(side.folder / part)) for part in ("data", "run", "export")}
    if name == "start-up":
        return {
            f"{command}: {unit}": cost
            for command, status in BRIEF.items()
            for unit, cost in side.run(*command.split(), status=status).items()
            if unit != "MiB"
        }
    figures: Costs = {}
    for command in COMMANDS:
        for unit, cost in side.run(*command_of(command, side.folder)).items():
            if unit != "MiB" or command in ("shard", "mine"):
                figures[f"{command}: {unit}"] = cost
    return figures


def prepare(side: Side) -> None:
    """Make the side's data, run and export once, and texts for predictions."""
    folder = side.folder
    if (folder / "texts.txt").exists():
        return
    data, run = str(folder / "data"), str(folder / "run")
    side.run("shard", str(TATE), data, "--propensity", "0.55,1.5", "--validation", "0.1", "--keep-text")
    side.run("run", "astra", data, run, *(word for setting in TRAINED for word in ("--set", setting)))
    side.run("fuse", data, run, "--shortlist", "20", "--queries", "2000")
    side.run("export", data, run, str(folder / "export"), "--scores", "fused")
    words = (TATE / "README.md").read_text().split()
    texts = [" ".join(words[start % len(words) :][:8]) for start in range(1_000)]
    rows = (json.dumps({"text": text, "labels": text.split()[:2]}) + "\n" for text in texts)
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "one.txt").write_text(texts[0] + "\n")
    (folder / "texts.txt").write_text("\n".join(texts) + "\n")


def command_of(name: str, folder: Path) -> list[str]:
    """Remove the output of the previous round of a command, and return the command's arguments."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    data, run, export = (str(folder / part) for part in ("data", "run", "export"))
    return {
        "shard": ["shard", str(TATE), str(out / "data"), "--propensity", "0.55,1.5"],
        "shard 1000": ["shard", str(folder / "rows.jsonl"), str(out / "data")],
        "mine": ["mine", data, run, "--out", str(out / "negatives")],
        "embed": ["embed", data, run, str(out / "embeddings")],
        "evaluate": ["evaluate", data, run, "--scores", "classifier"],
        "evaluate fused": ["evaluate", data, run, "--scores", "fused"],
        "inspect data": ["inspect", data],
        "inspect export": ["inspect", export],
        "export": ["export", data, run, str(out / "export"), "--scores", "fused"],
        "predict 1": ["predict", export, str(folder / "one.txt"), str(out / "one.jsonl")],
        "predict 1000": ["predict", export, str(folder / "texts.txt"), str(out / "all.jsonl")],
    }[name]


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files below `folder`."""
    from benchmarks.common.folder_bytes import folder_bytes

    return folder_bytes(folder)


def name_of(figure: str) -> str:
    """Return the name of a figure's measurement."""
    return figure.partition(":")[0]


def price_of(figure: str, result: Compared, prices: Sequence[Price], then: str) -> Price | None:
    """Return the price that covers a figure."""

    def is_between(commit: str) -> bool:
        ancestor = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor"]
        reached = subprocess.run([*ancestor, commit, "HEAD"], check=False, capture_output=True).returncode == 0
        return reached and subprocess.run([*ancestor, commit, then], check=False, capture_output=True).returncode == 1

    return find_price(figure, result.ratio, prices, is_between)


def print_table(
    compared: dict[str, Compared], paid: dict[str, Price | None], unpaid: Sequence[str], commit: str
) -> None:
    """Print one row per figure."""
    width = max(map(len, compared), default=0)
    print(f"{'figure':{width}}  {commit[:10]:>11} {'now':>11}  ratio  interval")
    for figure, result in compared.items():
        price = paid.get(figure)
        note = "SLOWER" if figure in unpaid else f"price: {price.gain}" if price else ""
        row = f"{result.then:11,.4g} {result.now:11,.4g}  {result.ratio:5.2f}  {result.low:.2f} to {result.high:.2f}"
        print(f"{figure:{width}}  {row}  {note}".rstrip())


if __name__ == "__main__":
    main()
