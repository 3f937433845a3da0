"""Measures what docs/results.md shows, record by record, and writes the page. After a cut, the same command goes on.

    python -m benchmarks.release --raw RAW               # for at most 100 minutes: repeat it until nothing is put off
    python -m benchmarks.release --list                  # the order, the minutes, and which code has changed
    python -m benchmarks.release --raw RAW --only waits  # some records, also what does not fit into four hours
    python -m benchmarks.release --page                  # only writes the page, after a change of release.toml

`release.toml` has the records, first what README shows: what to run, and which figures of the reports the table has.
The report of a command is kept in `results/`, with its commit, its seconds, and digests of the modules that its
processes imported. While no digest has changed, the report is current, and the command is not run again. RAW has the
folders of data.
"""

import argparse
import json
import os
import re
import shlex
import signal
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.imported_code import changed, code_of, noting, to_json
from schemas.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
RECORDS, REPORTS, PAGE = (ROOT / name for name in ("benchmarks/release.toml", "benchmarks/results", "docs/results.md"))
MINUTES_OF_A_RELEASE = 240  # records after that, in their order, keep the commit at which they were measured
END_SECONDS = 30  # for a benchmark to remove its files when it is interrupted
SECTIONS = ("Accuracy", "Data that grows", "Sharding", "Mining and embedding", "The stream", "Training", "Faults")
HEAD = """# Results

For readers who choose or tune recipes: what was measured, with which command, and at which commit.

`python -m benchmarks.release` generates this page. Compare ratios: seconds depend on the machine. P@k, PSP@k and R@k
are percentages on test splits, with propensity constants A = 0.55 and B = 1.5. Brackets contain a 95 % interval, or a
bar (a limit set before measuring).
"""
OLDER = """## Measured before the code changed

The code has changed since these measurements, so a new run can give different figures.
"""


class Figures(string.Formatter):
    """Format strings in which `:interval` shows a list of a difference and the ends of its interval."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "interval":
            return "{:+} ({:+}, {:+})".format(*value)
        return str(super().format_field(value, format_spec))


FIGURES = Figures()


@dataclass(frozen=True)
class Record:
    """A table of the page: columns, rows and `read` are format strings of the reports of `commands`.

    `minutes`: a guess, until the commands have been measured.
    """

    name: str
    title: str
    section: str
    claim: str
    commands: list[str]
    minutes: float
    columns: list[str]
    rows: list[list[str]]
    read: str
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)  # by command

    @property
    def measured(self) -> bool:
        """Whether all commands have a report, perhaps of older code."""
        return self.reports.keys() >= {*self.commands}

    @property
    def changed(self) -> list[str]:
        """The code that has changed since the reports were made."""
        return sorted({path for report in self.reports.values() for path in changed(report["code"])})

    @property
    def current(self) -> bool:
        return self.measured and not self.changed

    @property
    def expected(self) -> dict[str, float]:
        """The minutes that each command last took, or its part of the guess."""
        guess = {command: self.minutes / len(self.commands) for command in self.commands}
        return guess | {command: report["seconds"] / 60 for command, report in self.reports.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, or only list or write the page. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--raw", type=Path, help="folder with tate, eurlex57k, wordnet, yso-sv and gnd-core")
    parser.add_argument("--minutes", type=float, default=100.0, help="start nothing that would end later (100)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these records")
    parser.add_argument("--list", action="store_true", help="print the records and why they are not current")
    parser.add_argument("--page", action="store_true", help="only write the page")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        records = read_records()
        if unknown := {*(options.only or ())} - {record.name for record in records}:
            raise InputError(f"no record {', '.join(sorted(unknown))}: `--list` prints their names")
        chosen = [record for record in records if record.name in options.only] if options.only else fitting(records)
        if options.list:
            sys.stdout.writelines(f"{line}\n" for line in describe(records, chosen))
            return 0
        try:
            return int(not options.page and measure(chosen, options.raw, options.minutes))
        finally:  # after a cut, too
            PAGE.write_text(page(read_records()))
    except InputError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command goes on\n")
        return 130


def read_records() -> list[Record]:
    """Return the records in the order in which they are measured, with the reports that there are."""
    found = []
    for name, of in tomllib.loads(RECORDS.read_text()).items():
        places = {command: REPORTS / file_of(command) for command in of["commands"]}
        stored = {command: json.loads(place.read_text()) for command, place in places.items() if place.exists()}
        found.append(Record(name=name, reports=stored, **of))
    return found


def file_of(command: str) -> str:
    return re.sub(r"\W+", "_", command.removeprefix("python -m benchmarks.")).strip("_") + ".json"


def fitting(records: Iterable[Record]) -> list[Record]:
    """Return the records that a release has the time for, in their order; what two records share counts once."""
    chosen, taken = [], dict[str, float]()
    for record in records:
        if sum((with_it := taken | record.expected).values()) <= MINUTES_OF_A_RELEASE:
            chosen.append(record)
            taken = with_it
    return chosen


def describe(records: Iterable[Record], chosen: Sequence[Record]) -> Iterable[str]:
    """Yield a line for each record: minutes, and what keeps it from being current."""
    for record in records:
        minutes, open_ = sum(record.expected.values()), len(record.commands) - len(record.reports)
        more = f" and {len(record.changed) - 5} more" if record.changed[5:] else ""
        state = f"changed: {' '.join(record.changed[:5])}{more}" if record.changed else "current"
        state = f"{open_} of {len(record.commands)} commands not measured" if open_ else state
        yield f"{record.name:24} {minutes:5.1f} min  {'' if record in chosen else 'not in a release; '}{state}"


def measure(records: Iterable[Record], raw: Path | None, minutes: float) -> bool:
    """Run the commands whose reports are not current, and keep their reports. Return whether one has failed."""
    began, failed, seen = time.monotonic(), False, set[str]()
    for record in records:
        for command, expected in record.expected.items():
            if command in seen or (command in record.reports and not changed(record.reports[command]["code"])):
                continue
            seen.add(command)
            left = minutes - (time.monotonic() - began) / 60
            if expected > left:
                say(f"{record.name}: put off, {expected:.0f} minutes are more than the {left:.0f} left: {command}")
            elif "RAW" in command and raw is None:
                say(f"{record.name}: left out, give --raw: {command}")
            else:
                say(f"{record.name}: {command}")
                failed |= not keep(command, raw)
    return failed


def keep(command: str, raw: Path | None) -> bool:
    """Run a command and store its report. Return whether there was one, of a commit without changes."""
    commit, began = clean_commit(), time.monotonic()
    words = [sys.executable, *shlex.split(command)[1:]]
    words = [f"{raw}{word.removeprefix('RAW')}" if word.startswith("RAW/") else word for word in words]
    with tempfile.TemporaryDirectory(prefix="extremis-release-") as folder:
        notes = Path(folder, "imported")
        status, lines = run(words, noting(notes))
        code = code_of(notes)
    if not lines or not lines[-1].startswith('{"claim"'):
        say(f"ended with status {status} and without a report: nothing is kept")
        return False
    if clean_commit() != commit:
        say("the commit has changed in the meantime: nothing is kept")
        return False
    body = {**json.loads(lines[-1]), "command": command, "commit": commit[:8]}
    body |= {"seconds": round(time.monotonic() - began, 1), "code": code}
    save(REPORTS / file_of(command), body)
    say(f"kept {file_of(command)}, {body['seconds'] / 60:.1f} minutes" + ("" if body["holds"] else "; a bar is missed"))
    return True


def run(words: Sequence[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run a command in ROOT; return its status and its lines. If this process is interrupted, it ends them all."""
    process = subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate()
    except BaseException:
        for number in (signal.SIGINT, signal.SIGKILL):
            os.killpg(process.pid, number)
            try:
                process.communicate(timeout=END_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
        raise
    return process.returncode, output.splitlines()


def save(place: Path, body: Mapping[str, Any]) -> None:
    place.parent.mkdir(exist_ok=True)
    place.write_text(to_json(body))


def clean_commit() -> str:
    """Return the commit of ROOT. Raises InputError if a file differs from it, but for reports and the page."""
    own = [f":!{path.relative_to(ROOT)}" for path in (REPORTS, PAGE)]
    if changes := _git("status", "--porcelain", "--untracked-files=no", "--", ".", *own):
        raise InputError(f"commit before you measure, so that figures have a commit:\n{changes}")
    return _git("rev-parse", "HEAD").strip()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def page(records: Sequence[Record]) -> str:
    """Return the page: the current records by section, then the older ones."""
    before = re.split(r"^(?=### )", (REPORTS / "older.md").read_text(), flags=re.MULTILINE)
    tables = {text.partition("\n")[0].removeprefix("### "): text.rstrip() + "\n" for text in before if text}
    tables |= {record.title: shown(record) for record in records if record.measured}
    parts, old = [HEAD], [OLDER]
    for section in SECTIONS:
        own = [record for record in records if record.section == section and record.title in tables]
        new = [tables[record.title] for record in own if record.current]
        parts += [f"## {section}\n", *new] if new else []
        old += [tables[record.title] for record in own if not record.current]
    return "\n".join([*parts, *(old if old[1:] else [])])


def shown(record: Record) -> str:
    """Return the record as Markdown, with the figures of its reports."""
    reports = [record.reports[command] for command in record.commands]

    def fill(text: str) -> str:
        try:
            return FIGURES.format(text, *reports)
        except (LookupError, ValueError, TypeError) as error:
            say(f"{record.name}: no report has the figure of {text}: {error}")
            return "not measured"

    columns, *rows = [[*map(fill, row)] for row in (record.columns, *record.rows)]
    read = fill(record.read)
    lines = [columns, ["---"] * len(columns), *rows]
    table = "\n".join(f"|{'|'.join(cells)}|" for cells in lines)
    commands = "\n".join(f"    {command}" for command in record.commands)
    commits = ", ".join(dict.fromkeys(report["commit"] for report in reports))
    machine = reports[0]["machine"]
    origin = f"*Commit {commits}, {max(report['date'] for report in reports)}, {machine['cores']} cores.*"
    missed = "" if all(report["holds"] for report in reports) else " A bar is missed."
    return f"### {record.title}\n\n{record.claim}\n\n{commands}\n\n{table}\n\n{read}{missed} {origin}\n"


def say(line: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {line}\n")


if __name__ == "__main__":
    sys.exit(main())
