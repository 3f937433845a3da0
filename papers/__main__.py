"""The papers' claims, measured: `python -m papers PAPER`. What is measured already is not run again.

The runs for the claims are processes with one thread and low priority, `--jobs` at a time, in the order of --list. An
interrupted command continues when it is repeated. At the end, or with only --page, it writes results.md.
"""

import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.imported_code import noting
from extremis.console import ClosedPipe, open_streams
from papers.claims import ROOT, Line, Paper, RunKey, paper_names
from papers.page import DIFFERS, NOT_RUN, UNCLEAR, judge, page, write_quotes
from papers.results import Result, minutes_of
from schemas.errors import ExtremisError, InputError
from schemas.layout import MANIFEST, RunLayout

Job = tuple[Paper, RunKey, str]  # the last: its group
GROUPS = "seeds", "cause", "main", "other"
MINUTES_OF_A_LINE = 30  # at most, for a line whose seeds come first
_ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, list the runs, or write pages; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m papers", description=__doc__.splitlines()[0])
    parser.add_argument(
        "paper", metavar="PAPER", help=f"{', '.join(paper_names())}; all; or a folder with runs/claims.toml"
    )
    parser.add_argument("--table", help='claims of this table or figure alone: "Table 2", figure-7')
    parser.add_argument("--seeds", type=int, default=3, help="seeds of a run at most; default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"), help="data and runs; default: %(default)s")
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT / "examples",
        help="folders of raw data by name: tate, wordnet ...; default: examples/ of the checkout, which has tate",
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side; default: %(default)s")
    parser.add_argument("--hours", type=float, default=0.0, help="start no run after so many; 0: until all are done")
    parser.add_argument("--list", action="store_true", help="list what would run, and start nothing")
    parser.add_argument(
        "--page",
        action="store_true",
        help="start nothing: write the page from what is there, and the verdicts in README.md and papers/README.md",
    )
    options = parser.parse_args(arguments)
    try:
        for name, least in (("seeds", 1), ("jobs", 1), ("hours", 0)):
            if not getattr(options, name) >= least:  # also refuses nan
                raise InputError(f"--{name} {getattr(options, name):g}: give {least} or more.")
        names = paper_names() if options.paper == "all" else [options.paper]
        papers = [Paper.load(name, options.data) for name in names]
        jobs = list_jobs(papers, options.table, options.seeds, options.out)
        if options.list:
            print_jobs(jobs)
            sys.stdout.flush()  # while a closed pipe can still be handled
            return 0
        failed = [] if options.page else run_all(jobs, options.data, options.out, options.jobs, options.hours)
        for paper in papers:
            (paper.folder / "results.md").write_text(page(paper))
            say(f"{paper.folder / 'results.md'}")
        if options.page:
            write_quotes()
        return 1 if failed else 0
    except ExtremisError as error:
        say(f"Error: {error}")
        return 2


def say(line: str) -> None:
    """Print a line for people."""
    sys.stderr.write(f"{line}\n")


def list_jobs(papers: Sequence[Paper], table: str | None, seeds: int, out: Path) -> list[Job]:
    """List each run without a result once, in the order in which they start. Raises InputError.

    First the missing seeds of short lines that differ or are inconclusive, then runs that separate causes, main claims
    that are not run, and all others. A run that another run continues from is also listed if its folder is gone.
    """
    lines = [(paper, line) for paper in papers for line in paper.lines]
    jobs = dict[tuple[str, RunKey], Job]()
    places = [_place(paper, line, seeds, out) for paper, line in (_lines_of(table, lines) if table else lines)]
    for _, _, missing in sorted(places, key=lambda place: place[:2]):
        for job in missing:
            jobs.setdefault((str(job[0].folder), job[1]), job)
    return [*jobs.values()]


def _place(paper: Paper, line: Line, seeds: int, out: Path) -> tuple[int, float, list[Job]]:
    """Return the group of a line, and the minutes of its missing runs, by which it has its place; and these runs."""
    keys, missing = [*paper.keys_of(line, seeds)], list[RunKey]()
    for key in keys:
        if Result.find(paper, key) is None:
            needed = paper.needed(key)
            missing += [needed] if needed and not _is_finished(paper, needed, out) else []
            missing.append(key)
    verdict, group = judge(paper, line).verdict if missing else "", len(GROUPS) - 1
    if verdict in (DIFFERS, UNCLEAR) and sum(minutes_of(paper, key) for key in {*keys}) < MINUTES_OF_A_LINE:
        group = 0
    elif line.claim.cause or (line.claim.main and verdict == NOT_RUN):
        group = 1 if line.claim.cause else 2
    return group, sum(minutes_of(paper, key) for key in {*missing}), [(paper, key, GROUPS[group]) for key in missing]


def _lines_of(table: str, lines: Sequence[tuple[Paper, Line]]) -> Sequence[tuple[Paper, Line]]:
    """Choose lines by a name on the page ("Figure 7") or in claims.toml ("figure-7"), or by a number alone if one fits.

    Raises InputError.
    """
    name = _plain(table)
    named = [each for each in lines if name in (_plain(each[1].claim.table), _plain(each[1].claim.where))]
    found = named or [each for each in lines if each[1].claim.table.endswith(f"-{name}")]
    tables = dict.fromkeys(line.claim.table for _, line in found)
    if named or len(tables) == 1:
        return found
    known = ", ".join(tables or dict.fromkeys(line.claim.table for _, line in lines))
    raise InputError(f"--table {table!r}: {len(tables) or 'no'} tables have this name. Choose from {known}.")


def _plain(table: str) -> str:
    return table.lower().removeprefix("table").strip(" -").replace(" ", "-")


def _is_finished(paper: Paper, key: RunKey, out: Path) -> bool:
    return Path(RunLayout(str(paper.place_of_run(key, out))).finished).exists()


def print_jobs(jobs: Sequence[Job]) -> None:
    """Print runs with their expected hours, alone and in all up to there, and their group."""
    total = 0.0
    for paper, key, group in jobs:
        minutes = minutes_of(paper, key)
        total += minutes
        sys.stdout.write(f"{minutes / 60:6.2f} h {total / 60:6.2f} h  {group:5}  {paper.folder.name}  {key}\n")
    sys.stdout.write(f"{total / 60:6.2f} h  {len(jobs)} runs, of one thread each\n")


def run_all(jobs: Sequence[Job], data: Path, out: Path, most: int, hours: float = 0.0) -> list[Job]:
    """Run all jobs, `most` at a time; return the failed jobs. A signal ends running jobs, which can continue later.

    Raises InputError, before the first run, if raw data of any run are missing.
    """
    for paper, key, _ in jobs:
        if key.data:
            paper.raw_folder(key.data)
    waiting, running, failed = [*jobs], dict[subprocess.Popen, Job](), list[Job]()
    began = time.monotonic()
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        while waiting or running:
            late = hours and time.monotonic() - began > hours * 3600
            ready = [] if late else [job for job in waiting if _is_ready(job, out, [*running.values()])]
            if ready and len(running) < most:
                waiting.remove(ready[0])
                running[_start(ready[0], data, out)] = ready[0]
                continue
            if not running:
                break  # out of time, or the remaining jobs need a failed job
            time.sleep(0.2)
            for process in [each for each in running if each.poll() is not None]:
                paper, key, _ = job = running.pop(process)
                if process.returncode:
                    failed.append(job)
                say(f"{key}: {_failure(_log(paper, key, out)) if process.returncode else 'done'}")
    finally:
        signal.signal(signal.SIGTERM, previous)
        for process in running:
            process.send_signal(signal.SIGTERM)  # time for a training to save its state
        for process in running:
            process.wait()
    return [*failed, *waiting]


def _is_ready(job: Job, out: Path, running: Sequence[Job]) -> bool:
    """Return whether a job can start: its previous run is finished, and no other process is making its data."""
    paper, key, _ = job
    needed = paper.needed(key)
    if needed and (not _is_finished(paper, needed, out) or any(other[1] == needed for other in running)):
        return False
    is_made = not key.data or (paper.place_of_data(key.data, out) / MANIFEST).exists()
    return is_made or all(other[1].data != key.data for other in running)


def _start(job: Job, data: Path, out: Path) -> subprocess.Popen:
    paper, key, _ = job
    log = _log(paper, key, out)
    log.parent.mkdir(parents=True, exist_ok=True)
    command = ["nice", "-n", "15", sys.executable, "-m", "papers.measure", _name(paper), key.run, key.data]
    paths = [str(key.seed), str(data.resolve()), str(out.resolve())]
    environment = {**noting(log.with_suffix(".imported").resolve()), **_ONE_THREAD}
    say(f"{key}: started")
    with log.open("a") as file:
        return subprocess.Popen([*command, *paths], env=environment, stdout=file, stderr=file, start_new_session=True)


def _log(paper: Paper, key: RunKey, out: Path) -> Path:
    return out / paper.folder.name / f"{key}.log"


def _failure(log: Path) -> str:
    """Return the last line of a failed run's log, and the place of the log."""
    return f"failed: {['no word', *log.read_text().splitlines()][-1]} (see {log})"


def _name(paper: Paper) -> str:
    here = paper.folder.parent == ROOT / "papers"
    return paper.folder.name if here else str(paper.folder.resolve())


if __name__ == "__main__":
    open_streams()
    try:
        sys.exit(main())
    except ClosedPipe:
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
