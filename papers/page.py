"""A paper's page, results.md, made from the JSON of its runs: one line per claim and data set, with a verdict."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from papers.claims import ROOT, Check, Line, Paper, RunKey, paper_names
from papers.results import Interval, Result, difference, minutes_of, spread
from schemas.errors import InputError

HOLDS, DIFFERS, UNCLEAR, NOT_RUN, UNTESTABLE = "holds", "differs", "inconclusive", "not run", "not testable here"
_CLAIM = ["where", "claim", "the paper"]
_MEASURED = [*_CLAIM, "data", "ours", "what decides, 95 %", "verdict", "min"]
_COUNTS = re.compile(r"\d+ hold, \d+ differ, \d+ are inconclusive, \d+ are not run and \d+ cannot be tested")
_MAIN = re.compile(r"(?m)^\| paper \| main claim .*\n(\|.*\n)+")


class Verdict(NamedTuple):
    """Outcome of a line; `ours` and `decides` are cells of the page. Without a measurement `ours` is the reason."""

    verdict: str
    ours: str = ""
    decides: str = ""
    minutes: float = 0.0
    limits: str = ""  # missing seeds, and older code


def write_quotes() -> None:
    """Write what README.md and papers/README.md of this checkout quote."""
    for name, pattern, text in zip(("README.md", "papers/README.md"), (_COUNTS, _MAIN), quotes(), strict=True):
        (ROOT / name).write_text(pattern.sub(text, (ROOT / name).read_text()))


def quotes() -> tuple[str, str]:
    """Return the number of lines of all papers by verdict, and the table of the main claims."""
    count, here = Counter[str](), dict[tuple[str, str, str], list[str]]()
    for paper in map(Paper.load, paper_names()):
        for line in paper.lines:
            verdict = judge(paper, line)
            count[verdict.verdict] += 1
            if line.claim.main:
                place = f"[{paper.title}]({paper.folder.name}/results.md)", line.claim.main, line.claim.where
                told = f"**{verdict.verdict}**{verdict.limits}"
                cell = ": ".join(filter(None, (line.data, told, verdict.decides)))
                here.setdefault(place, []).append(cell)
    counts = (
        f"{count[HOLDS]} hold, {count[DIFFERS]} differ, {count[UNCLEAR]} are inconclusive, "
        f"{count[NOT_RUN]} are not run and {count[UNTESTABLE]} cannot be tested"
    )
    rows = [[*place, "<br>".join(cells)] for place, cells in here.items()]
    return counts, "\n".join(_table("", ["paper", "main claim", "where", "here"], rows))


def page(paper: Paper) -> str:
    """Return the page."""
    verdicts = [(line, judge(paper, line)) for line in paper.lines]
    count = Counter(verdict.verdict for _, verdict in verdicts)
    told = ", ".join(f"{count[each]} {each}" for each in (HOLDS, DIFFERS, UNCLEAR, NOT_RUN, UNTESTABLE) if count[each])
    lines = [
        f"# {paper.title}: claims, measured",
        "",
        f"Written by `python -m papers {paper.folder.name}` from `runs/*.json`: change `runs/claims.toml`, not this "
        f"page. {len(verdicts)} lines: {told}.",
        "",
        "Ours: mean over seeds ± standard deviation. What decides: a difference or a value with its 95 % bootstrap "
        "interval over texts and seeds, paired, or a ratio per seed, beside its bound. A line holds if every check "
        "is within its bound, and differs if one check is beyond. Older code: what a run imported has changed since "
        "this commit. Minutes: processor time of all runs of the line.",
        "",
    ]
    measured, later, never = list[list[str]](), list[list[str]](), list[list[str]]()
    for line, verdict in verdicts:
        claim = [line.claim.where, line.claim.claim, line.claim.paper]
        if verdict.verdict == UNTESTABLE:
            never.append([*claim, verdict.ours])
        elif verdict.verdict == NOT_RUN:
            later.append([*claim, line.data, verdict.ours])
        else:
            cells = [verdict.ours, verdict.decides, f"**{verdict.verdict}**{verdict.limits}", f"{verdict.minutes:.1f}"]
            measured.append([*claim, line.data, *cells])
    lines += _table("", _MEASURED, measured)
    notes = [f"- {claim.where}, {claim.claim}: {claim.note}" for claim in paper.claims if claim.note]
    lines += ["## What was found", "", *notes, ""] if notes else []
    lines += _table("## Not run", [*_CLAIM, "data", "command and expected hours"], later)
    lines += _table("## Not testable here", [*_CLAIM, "why"], never)
    return "\n".join([*lines, *_runs(paper)])


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table below its title; none without rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    lines.insert(1, "|---" * len(head) + "|")
    return [*([title, ""] if title else []), *lines, ""] if rows else []


def _runs(paper: Paper) -> list[str]:
    """Return the table of measured runs."""
    rows, shown = [], ["P@1", "P@5", "PSP@5"]
    for name, data in dict.fromkeys((name, line.data) for line in paper.lines for name in line.runs):
        results = [*_results(paper, name, data, 10).values()]
        if not results:
            continue
        run = paper.runs[name]
        values = ([r.metrics[metric] for r in results if metric in r.metrics] for metric in shown)
        metrics = [_with_spread(each) if each else "" for each in values]
        minutes = spread(result.figures["processor_seconds"] / 60 for result in results)[0]
        what = run.recipe or run.module or f"{run.scores} of {run.after}"
        commits = ", ".join(sorted({result.commit + " (older)" * result.is_older for result in results}))
        rows.append([name, f"`{what}`", data, str(len(results)), *metrics, f"{minutes:.1f}", commits])
    return _table("## Runs", ["run", "recipe", "data", "seeds", *shown, "min per seed", "commit"], rows)


def _with_spread(values: Sequence[float], places: int = 2) -> str:
    mean, deviation = spread(values)
    return f"{mean:.{places}f}" + (f" ±{deviation:.{places}f}" if len(values) > 1 else "")


def judge(paper: Paper, line: Line) -> Verdict:
    """Return the verdict of a line from the available results of its runs."""
    if line.claim.untestable:
        return Verdict(UNTESTABLE, line.claim.untestable)
    found = {name: _results(paper, name, line.data, line.seeds) for name in line.runs}
    if not all(found.values()):
        return Verdict(NOT_RUN, expected(paper, line))
    told = [judge_check(paper, check, found) for check in line.claim.checks]
    if None in told:
        return Verdict(NOT_RUN, expected(paper, line))  # the sides have no seed in common
    parts = [part for part in told if part is not None]
    which = [part.verdict for part in parts]
    verdict = DIFFERS if DIFFERS in which else UNCLEAR if UNCLEAR in which else HOLDS
    seeds = min(len(results) for results in found.values())
    limits = f" ({seeds} of {line.seeds} seeds)" if seeds < line.seeds else ""
    every = {id(result): result for results in found.values() for result in results.values()}.values()
    minutes = sum(result.figures["processor_seconds"] for result in every) / 60
    ours = "; ".join(dict.fromkeys(text for part in parts if part.ours for text in part.ours.split("; ")))
    older = sorted({result.commit for result in every if result.is_older})
    limits += f", older code ({', '.join(older)})" if older else ""
    return Verdict(verdict, ours, "; ".join(part.decides for part in parts), minutes, limits)


def expected(paper: Paper, line: Line) -> str:
    """Return the command for a line without results, and its expected hours."""
    keys = {*paper.keys_of(line, line.seeds)}
    hours = sum(minutes_of(paper, key) for key in keys) / 60
    return f"`python -m papers {paper.folder.name} --table {line.claim.table}`, {hours:.1f} h"


def _results(paper: Paper, name: str, data: str, seeds: int) -> dict[int, Result]:
    found = {seed: Result.find(paper, RunKey(name, data, seed)) for seed in range(seeds)}
    return {seed: result for seed, result in found.items() if result is not None}


def judge_check(paper: Paper, check: Check, found: Mapping[str, Mapping[int, Result]]) -> Verdict | None:
    """Return the verdict of a check; None if its sides have no seed in common.

    A side that did not train shows nothing, unless the claim says so of it: the verdict is UNCLEAR.
    """
    sides = [max(side, key=lambda name: _validation(found[name])) for side in check.sides]
    seeds = sorted(set.intersection(*({*found[side]} for side in sides)))
    if not seeds:
        return None
    results = [[found[side][seed] for seed in seeds] for side in sides]
    verdict = _compare(paper, check, sides, results)
    untrained = [
        side
        for side, each in zip(sides, results, strict=True)
        if side not in check.untrained and not all(result.is_trained for result in each)
    ]
    decides = f"{verdict.decides}, but {' and '.join(untrained)} did not train"
    return verdict._replace(verdict=UNCLEAR, decides=decides) if untrained else verdict


def _compare(paper: Paper, check: Check, sides: Sequence[str], results: Sequence[Sequence[Result]]) -> Verdict:
    """Return the verdict of a check on `results`, of each side's seeds."""
    what = check.metric or check.figure.replace("_", " ")
    values = [
        [(r.metrics[check.metric] if check.metric else r.figures[check.figure]) for r in each] for each in results
    ]
    each_side = [
        f"{side} {what} {_with_spread(v, 2 if check.metric else 3)}" for side, v in zip(sides, values, strict=True)
    ]
    ours = "; ".join(each_side) if len(sides) > 1 else ""  # the check itself shows the value of one side
    kept = all(check.metric in result.contributions for each in results for result in each)
    if check.above is not None and not kept:
        raise InputError(
            f"{paper.folder}: a run of {' or '.join(sides)} was measured before a claim compared its {check.metric}. "
            "Remove the JSON of these runs, and repeat them."
        )
    if check.metric and kept:
        texts = [result.texts(paper.folder) for each in results for result in each]  # each result must fit its texts
        told = difference(check.metric, texts[0], *results)
        bound = check.above if check.above is not None else check.least if check.least is not None else check.most
        assert bound is not None
        sign = "≤" if check.most is not None else ">" if check.above is not None else "≥"
        text = f"{what} {told.value:+.2f} ({told.low:+.2f} to {told.high:+.2f}) {sign} {bound:g}"
        return Verdict(compare_with_bound(told, bound, check.most is not None), ours, text)
    ratios = [a / b for a, b in zip(*values, strict=True)] if len(values) > 1 else values[0]
    bound = check.most if check.most is not None else check.least
    assert bound is not None
    right = [ratio <= bound if check.most is not None else ratio >= bound for ratio in ratios]
    verdict = HOLDS if all(right) else UNCLEAR if any(right) else DIFFERS
    if "seconds" in check.figure and any(r.cut for each in results for r in each):
        verdict = UNCLEAR  # an interrupted run counted only its last part
    sign, name = "≤" if check.most is not None else "≥", f"{what}, ratio" if len(values) > 1 else what
    return Verdict(verdict, ours, f"{name} {_with_spread(ratios, 3)} {sign} {bound:g}")


def compare_with_bound(told: Interval, bound: float, below: bool) -> str:
    """Return HOLDS if the interval lies above the bound (or `below`), DIFFERS if beyond it, UNCLEAR if across it."""
    low, high, limit = (-told.high, -told.low, -bound) if below else (told.low, told.high, bound)
    return HOLDS if low >= limit else DIFFERS if high < limit else UNCLEAR


def _validation(results: Mapping[int, Result]) -> float:
    """Return the mean over seeds of the best value on validation, by which the best of several runs is chosen."""
    return spread(result.figures.get("validation", 0.0) for result in results.values())[0]
