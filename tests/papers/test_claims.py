"""The papers' claims: their runs are valid, their pages are made of JSON, the statistics, and a command that is cut."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.common import imported_code
from papers.__main__ import list_jobs, main
from papers.claims import Check, Claim, Paper, RunKey, digest_files, digest_recipe, paper_names
from papers.measure import subsample_labels
from papers.page import DIFFERS, HOLDS, NOT_RUN, UNCLEAR, judge, page, quotes
from papers.results import LEVELS, RESAMPLES, Result, difference, pack, place_of
from schemas.errors import InputError
from tests.command import ROOT
from tests.pipelines.raw import read_lines, write_tiny
from trainer.evaluation.metrics import Contributions
from trainer.evaluation.metrics import value as metric_of
from trainer.recipe_files import load_recipe

PAPERS = {name: Paper.load(name) for name in paper_names()}
PLACES = {"after": "runs/other", "data": "data", "seed": 0, "minilm": "model"}


@pytest.mark.parametrize("name", PAPERS)
def test_the_settings_of_every_run_are_a_valid_recipe(name: str) -> None:
    paper, used = PAPERS[name], set()
    for line in paper.lines:
        for key in paper.keys_of(line, 1):
            run = paper.runs[key.run]
            used.add(key.run)
            if not run.recipe:
                assert not run.module or (ROOT / run.module.replace(".", "/")).with_suffix(".py").exists()
                continue
            settings = [each.format(**PLACES) for each in paper.settings_of(key)]
            load_recipe(paper.recipe_of(run), settings)
    assert used == {*paper.runs}, "a run that no claim needs"


def test_a_data_set_is_the_same_for_all_papers() -> None:
    """They share what they shard."""
    sets = {(name, each.model_dump_json()) for paper in PAPERS.values() for name, each in paper.sets.items()}
    assert len(sets) == len({name for name, _ in sets})


@pytest.mark.parametrize("name", PAPERS)
def test_the_page_is_made_of_the_json(name: str) -> None:
    """`python -m papers PAPER --page` renews it."""
    paper = PAPERS[name]
    assert (paper.folder / "results.md").read_text() == page(paper)
    needed = {place_of(paper, key) for line in paper.lines for key in paper.keys_of(line, 9)}
    there = {*(paper.folder / "runs").glob("*.json")}
    assert there <= needed
    read = [Result.find(paper, key) for line in paper.lines for key in paper.keys_of(line, 9)]
    assert {each.raw_digest for each in read if each and each.made_from["data"].get("raw") == "tate"} <= {
        digest_files(ROOT / "examples" / "tate")  # whatever other files are there
    }
    assert there == set() or any(read), "what decides the runs has changed: run them again, or remove their JSON"


def test_the_readmes_quote_what_the_pages_say() -> None:
    for name, quoted in zip(("README.md", "papers/README.md"), quotes(), strict=True):
        assert quoted in (ROOT / name).read_text()
    assert all(2 <= sum(bool(claim.main) for claim in paper.claims) <= 4 for paper in PAPERS.values())


def result_of(
    paper: Paper, key: RunKey, hits: np.ndarray, seconds: float = 1.0, write: bool = True, most_frequent: float = 0.0
) -> Result:
    metrics = {"P@1": 100 * float(hits.mean())}
    kept = {"P@1": pack(Contributions(hits.astype(np.float32)))}
    figures = {"processor_seconds": seconds, "most_frequent": most_frequent}
    digest = paper.raw_digest(key.data)
    result = Result(paper.made_from(key), "", seconds, False, len(hits), metrics, figures, kept, digest)
    if write:
        result.write_texts(paper.folder, np.arange(len(hits)))
        result.write(place_of(paper, key))
    return result


def small_paper(folder: Path, *checks: Check) -> Paper:
    claim = Claim(table="1", where="Table 1", claim="a is above b", paper="2 and 1", on=["tiny"], checks=[*checks])
    body = {"title": "Small", "sets": {"tiny": {"raw": "tiny"}}, "claims": [claim.model_dump(exclude_defaults=True)]}
    runs = {name: {"recipe": "random"} for name in "ab"}
    return Paper.model_validate({**body, "runs": runs, "folder": folder})


def test_a_difference_is_of_the_metrics_and_its_interval_is_paired(tmp_path: Path) -> None:
    paper = small_paper(tmp_path, Check(a="a", b="b", metric="P@1", above=0))
    draw = np.random.default_rng(0)
    hits = draw.random((3, 400)) < 0.5
    better = hits | (draw.random((3, 400)) < 0.1)
    a, b = (
        [result_of(paper, RunKey("a", "tiny", s), each[s], write=False) for s in range(3)] for each in (better, hits)
    )
    texts = np.arange(400)
    told = difference("P@1", texts, a, b)
    assert told.value == pytest.approx(100 * (better.mean() - hits.mean()))
    assert told.low < told.value < told.high
    assert told.low > 0  # no query is worse: no resample of the same queries can be
    apart = difference("P@1", texts, a).high - difference("P@1", texts, a).low
    assert told.high - told.low < 0.7 * apart  # than without pairs
    assert difference("P@1", texts, a, a) == (0, 0, 0)
    deviation = np.sqrt(np.var(better[0].astype(float) - hits[0]) / 400) * 100
    one = difference("P@1", texts, a[:1], b[:1])
    assert one.high - one.low == pytest.approx(2 * 1.96 * deviation, rel=0.15)


@given(texts=st.lists(st.integers(0, 9), min_size=1, max_size=20), seed=st.integers(0, 99), is_ratio=st.booleans())
@example(texts=[*range(20)], seed=0, is_ratio=False)  # all differ: queries are drawn
def test_an_interval_draws_texts_each_with_all_its_queries(texts: list[int], seed: int, is_ratio: bool) -> None:
    draw, rows = np.random.default_rng(seed), np.arange(len(texts))
    most = draw.integers(1, 5, len(texts)) if is_ratio else np.ones(len(texts))
    sides = [(most * (draw.random(len(texts)) < 0.5), *([most] if is_ratio else [])) for _ in "ab"]

    def at(rows: np.ndarray) -> list[Contributions]:
        return [Contributions(*(column[rows] for column in side)) for side in sides]

    def interval(rows: np.ndarray) -> np.ndarray:
        made = [Result({}, "", 1, False, 0, {"PSP@1": metric_of(part)}, {}, {"PSP@1": pack(part)}) for part in at(rows)]
        return np.array(difference("PSP@1", np.array(texts)[rows], *([each] for each in made)))

    of_text = [np.flatnonzero(np.array(texts) == text) for text in np.unique(texts)]
    draw = np.random.default_rng(0)
    drawn = (draw.integers(len(of_text), size=len(of_text)) for _ in range(RESAMPLES))
    pairs = (map(metric_of, at(np.concatenate([of_text[text] for text in each]))) for each in drawn)
    low, high = np.quantile([a - b for a, b in pairs], (0.025, 0.975))
    a, b = map(metric_of, at(rows))
    assert interval(rows) == pytest.approx(np.array([a - b, low, high]))
    assert interval(np.repeat(rows, 3)) == pytest.approx(interval(rows))


def test_texts_are_kept_once_for_a_data_set_and_fit_its_results(tmp_path: Path) -> None:
    paper = small_paper(tmp_path, Check(a="a", b="b", metric="P@1", above=0))
    result = result_of(paper, RunKey("a", "tiny", 0), np.ones(5), write=False)
    with pytest.raises(InputError, match="texts of 0 queries, but a result has 5"):
        result.texts(tmp_path)
    result.write_texts(tmp_path, np.array([7, 2**63, 7, 2**63, 1], np.uint64))
    result.write_texts(tmp_path, np.arange(5))
    assert result.texts(tmp_path).tolist() == [0, 1, 0, 1, 4]
    with pytest.raises(InputError, match="texts of 5 queries, but a result has 6"):
        replace(result, queries=6).texts(tmp_path)


def test_contributions_are_kept_in_a_byte(tmp_path: Path) -> None:
    paper = small_paper(tmp_path, Check(a="a", b="b", metric="P@1", above=0))
    fifths = np.random.default_rng(0).integers(0, 6, 50).astype(np.float32) / 5
    weights = np.random.default_rng(1).random(50).astype(np.float32) * 7 + 1
    kept = {"P@5": pack(Contributions(fifths)), "PSP@5": pack(Contributions(fifths * weights, weights))}
    exact = {"P@5": 100 * fifths.mean(), "PSP@5": 100 * (fifths * weights).sum() / weights.sum()}
    result = Result(paper.made_from(RunKey("a", "tiny", 0)), "", 1, False, 50, exact, {}, kept)
    assert np.array_equal(result.unpack("P@5")[0] / LEVELS, fifths.round(6).astype(np.float64).round(1))
    for metric, value in exact.items():
        told = difference(metric, np.arange(50), [result])
        assert told.value == pytest.approx(value)
        assert told.low < value < told.high


@pytest.mark.parametrize(
    ("share", "verdict"), [(0.5, HOLDS), (-0.5, DIFFERS), (0.0, UNCLEAR)], ids=["above", "below", "equal"]
)
def test_an_interval_decides(tmp_path: Path, share: float, verdict: str) -> None:
    paper = small_paper(tmp_path, Check(a="a", b="b", metric="P@1", above=0))
    line, draw = paper.lines[0], np.random.default_rng(0)
    assert judge(paper, line).verdict == NOT_RUN
    for seed in range(3):
        hits = draw.random((2, 200)) < np.array([[0.4 + share / 2], [0.4 - share / 2]]).clip(0.05, 0.95)
        for name, row in zip("ab", hits, strict=True):
            result_of(paper, RunKey(name, "tiny", seed), row)
    assert judge(paper, line).verdict == verdict


def test_a_bound_of_a_ratio_decides_by_every_seed_and_by_no_run_that_was_cut(tmp_path: Path) -> None:
    paper = small_paper(tmp_path, Check(a="a", b="b", figure="processor_seconds", most=0.5))
    hits = np.ones(5)
    for seconds, verdict in (((1, 2), HOLDS), ((2, 3), DIFFERS)):
        for name, each in zip("ab", seconds, strict=True):
            for seed in range(3):
                result_of(paper, RunKey(name, "tiny", seed), hits, each)
        assert judge(paper, paper.lines[0]).verdict == verdict
    result_of(paper, RunKey("a", "tiny", 0), hits, 1)
    assert judge(paper, paper.lines[0]).verdict == UNCLEAR  # one seed of three
    place = place_of(paper, RunKey("a", "tiny", 1))
    place.write_text(json.dumps({**json.loads(place.read_text()), "made_from": {"settings": ["of another version"]}}))
    verdict = judge(paper, paper.lines[0])
    assert (verdict.verdict, verdict.limits) == (UNCLEAR, " (2 of 3 seeds), older code ()")


@pytest.mark.parametrize(("untrained", "verdict"), [([], UNCLEAR), (["b"], HOLDS)], ids=["bare", "as the claim says"])
def test_a_run_that_did_not_train_decides_only_a_claim_of_that(
    tmp_path: Path, untrained: list[str], verdict: str
) -> None:
    above = Check(a="a", b="b", metric="P@1", above=0, untrained=untrained)
    paper = small_paper(tmp_path, above, Check(a="b", metric="P@1", most=20, untrained=untrained))
    for name, right in (("a", 90), ("b", 10)):
        result_of(paper, RunKey(name, "tiny", 0), np.arange(100) < right, most_frequent=10)
    told = judge(paper, paper.lines[0])
    assert (told.verdict, told.decides.count("b did not train")) == (verdict, 0 if untrained else 2)


def test_a_result_of_another_recipe_or_of_other_data_is_not_read(tmp_path: Path) -> None:
    recipe, raw = tmp_path / "own.toml", write_tiny(tmp_path / "raw" / "tiny", rows=9, labels=3)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "claims.toml").write_text(CLAIMS.replace('recipe = "random"', 'recipe = "own.toml"') % 1)
    key, names = RunKey("random", "tiny", 0), set[Path]()

    def is_read() -> bool:
        digest_recipe.cache_clear()  # a command reads a file once
        digest_files.cache_clear()
        paper = Paper.load(f"{tmp_path}/", tmp_path / "raw")
        names.add(paper.place_of_run(key, tmp_path))
        return Result.find(paper, key) is not None

    recipe.write_text('extends = "random"')
    result_of(Paper.load(f"{tmp_path}/", tmp_path / "raw"), key, np.ones(5))
    recipe.write_text('# The same.\nextends = "random"\n')
    for name in ("README.md", "recipe.toml", "notes.csv"):  # which `shard` does not read
        (raw / name).write_text("The same.")
    assert is_read()
    (raw / "tst.json.gz").write_bytes((raw / "trn.json.gz").read_bytes())
    assert not is_read()
    assert Result.find(Paper.load(f"{tmp_path}/"), key), "without data, a page is made of the JSON alone"
    recipe.write_text('extends = "random"\n[train]\nepochs = 3\n[encoder]\ndimension = 9\n[order]\nseed = 3')
    assert not is_read()
    assert len(names) == 3


def test_a_line_is_marked_while_code_of_a_run_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paper, module = small_paper(tmp_path, Check(a="a", metric="P@1", least=0)), tmp_path / "module.py"
    monkeypatch.setattr(imported_code, "ROOT", tmp_path)
    module.write_text("rows = 1")
    key, code = RunKey("a", "tiny", 0), {module.name: imported_code.digest(module)}
    for text, known, older in (("rows = 1", code, ""), ("rows = 1", {}, "x"), ("rows = 2", code, "x")):
        module.write_text(f'"""Rows."""\n{text}')
        replace(result_of(paper, key, np.ones(5)), commit="x", code=known).write(place_of(paper, key))
        assert judge(paper, paper.lines[0]).limits == " (1 of 3 seeds)" + f", older code ({older})" * bool(older)


def test_seeds_come_first_then_causes_then_main_claims_and_then_what_takes_the_least_time(tmp_path: Path) -> None:
    facts = {"rest": (1, {}), "main-9": (9, {"main": "m"}), "main-8": (8, {"main": "m"}), "cause": (9, {"cause": True})}
    claims = [
        Claim(
            table="1", where="", claim="", paper="", on=["tiny"], checks=[Check(a=run, metric="P@1", most=20)], **fields
        )
        for run, (_, fields) in (facts | {"long": (1, {}), "known": (1, {})}).items()
    ]
    runs = {run: {"recipe": "random", "minutes": facts.get(run, [1])[0]} for run in [*facts, "long", "known"]}
    sets = {"tiny": {"raw": "tiny"}}
    paper = Paper.model_validate(
        {"title": "Small", "sets": sets, "runs": runs, "claims": [*map(Claim.model_dump, claims)], "folder": tmp_path}
    )
    for name, seconds in (("known", 60), ("long", 2400)):
        result_of(paper, RunKey(name, "tiny", 0), np.ones(5), seconds)  # above the bound: the line differs
    order = dict.fromkeys((key.run, group) for _, key, group in list_jobs([paper], None, 3, tmp_path))
    mains = ("main-8", "main"), ("main-9", "main")
    assert [*order] == [("known", "seeds"), ("cause", "cause"), *mains, ("rest", "other"), ("long", "other")]


def test_thinned_labels_are_every_nth_with_the_points_that_have_one(tmp_path: Path) -> None:
    raw = write_tiny(tmp_path / "raw", rows=40, labels=9)
    (raw / "filter_labels_train.txt").write_text("3 3\n4 4\n6 6\n")
    out = subsample_labels(raw, tmp_path / "out", 3)
    assert read_lines(out / "lbl.json.gz") == read_lines(raw / "lbl.json.gz")[::3]
    points = read_lines(raw / "trn.json.gz")
    kept = [row for row, point in enumerate(points) if any(label % 3 == 0 for label in point["target_ind"])]
    thinned = read_lines(out / "trn.json.gz")
    assert [point["uid"] for point in thinned] == [points[row]["uid"] for row in kept]
    for row, point in zip(kept, thinned, strict=True):
        assert [3 * label for label in point["target_ind"]] == [n for n in points[row]["target_ind"] if n % 3 == 0]
    assert (out / "filter_labels_train.txt").read_text() == f"{kept.index(3)} 1\n{kept.index(6)} 2\n"


CLAIMS = """
title = "Tiny"
settings = [
  "encoder.dimension=8", "encoder.buckets=64", "encoder.hidden=4", "order.batch=16", "train.epochs=%d",
  "logging.tensorboard=false", "checkpoint.every_epochs=0",
]

[sets.tiny]
raw = "tiny"

[runs.random]
recipe = "random"
settings = ["negatives.random=20"]
on = { tiny = ["negatives.pool=own"] }
minutes = { tiny = 0.5 }

[runs.one-vs-all]
recipe = "renee"

[runs.again]
after = "random"
scores = "sum"

[[claims]]
table = "1"
where = "Table 1"
claim = "sampling is no worse than every label"
paper = "46.20 and 46.05"
on = ["tiny"]
seeds = 1
checks = [
  { a = "random", b = "one-vs-all", metric = "P@1", above = -100 },
  { a = "random", figure = "epochs", least = 1 },
]

[[claims]]
table = "2"
where = "Table 2"
claim = "texts are not far off"
paper = ""
on = ["tiny"]
seeds = 1
checks = [{ a = "again", b = "random", metric = "P@1", above = -100 }]
"""


@pytest.mark.slow
def test_a_command_that_is_cut_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Real runs, ended by a signal while the second one trains."""
    paper, out = tmp_path / "paper", tmp_path / "out"
    (paper / "runs").mkdir(parents=True)
    write_tiny(tmp_path / "raw" / "tiny", rows=60, labels=20)
    (paper / "runs" / "claims.toml").write_text(CLAIMS % 80)
    arguments = [str(paper), "--data", str(tmp_path / "raw"), "--out", str(out), "--jobs", "1"]
    assert main([*arguments, "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in listed[:-1]] == ["random.tiny.0", "one-vs-all.tiny.0", "again.tiny.0"]
    assert "0.01 h   0.01 h  other  paper  random.tiny.0" in listed[0]
    assert not out.exists()

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "papers", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    metrics = (
        Paper.load(str(paper), tmp_path / "raw").place_of_run(RunKey("one-vs-all", "tiny", 0), out) / "metrics.jsonl"
    )
    wait_for(lambda: metrics.exists() and '"epoch"' in metrics.read_text(), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    first = paper / "runs" / "random.tiny.0.json"
    assert [path.name for path in (paper / "runs").glob("*.json")] == [first.name]
    steps = len(metrics.read_text().splitlines())
    before = first.stat().st_mtime_ns

    assert main(arguments) == 0
    assert first.stat().st_mtime_ns == before  # not run again
    results = {path.stem: json.loads(path.read_text()) for path in (paper / "runs").glob("*.json")}
    assert {name: body["cut"] for name, body in results.items()} == {
        "random.tiny.0": False,
        "one-vs-all.tiny.0": True,
        "again.tiny.0": False,
    }
    assert steps > 0
    assert results["one-vs-all.tiny.0"]["figures"]["epochs"] == 80
    assert results["one-vs-all.tiny.0"]["queries"] == 30
    assert {*results["random.tiny.0"]["contributions"]} == {"P@1"}
    assert len([*(paper / "runs").glob("*.texts")]) == 1
    assert not metrics.exists()  # nothing needs its folder any more
    assert '"epoch"' in (out / "paper" / "one-vs-all.tiny.0.metrics.jsonl").read_text()
    text = (paper / "results.md").read_text()
    assert text.count("**holds**") == 2
    assert page(Paper.load(str(paper))) == text
    assert "older" not in text.partition("**holds**")[2]
    assert all({"trainer/loop.py", "papers/measure.py"} < {*body["code"]} for body in results.values())
    assert main([*arguments, "--list"]) == 0
    assert capsys.readouterr().out.split()[2] == "0"


def wait_for(condition: object, process: subprocess.Popen, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_wrong_use_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["astar", "--list"]) == 2
    assert "no claims of paper 'astar': choose from astra" in capsys.readouterr().err
    assert main(["astra", "--table", "99", "--list"]) == 2
    assert "--table '99': no tables have this name. Choose from" in capsys.readouterr().err
    for option, value in (("seeds", "0"), ("jobs", "0"), ("hours", "-1"), ("hours", "nan")):
        assert main(["astra", f"--{option}", value]) == 2
        assert f"--{option} {value}: give" in capsys.readouterr().err
    assert main(["astra", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("no folder") == 1
    assert not (tmp_path / "out").exists()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "claims.toml").write_text(CLAIMS.replace('b = "random"', 'b = "other"') % 1)
    assert main([f"{tmp_path}/", "--list"]) == 2
    assert "needs a run 'other' that is not there" in capsys.readouterr().err


def test_a_table_has_the_names_of_the_page(tmp_path: Path) -> None:
    def runs_of(paper: str, table: str) -> list[str]:
        return [str(key) for _, key, _ in list_jobs([PAPERS[paper]], table, 1, tmp_path)]

    assert runs_of("mips_s", "figure-7") == runs_of("mips_s", "Figure 7") == runs_of("mips_s", "7") != []
    assert runs_of("dexml", "Table 3") == runs_of("dexml", "3") != runs_of("dexml", "Table 12")


def test_the_example_of_a_comparison_is_valid(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (block,) = re.findall(r"```toml\n(.*?)```", (ROOT / "papers" / "README.md").read_text(), re.DOTALL)
    (tmp_path / "runs" / "claims.toml").write_text(block)
    paper = Paper.load(f"{tmp_path}/")
    jobs = list_jobs([paper], None, 9, tmp_path)
    assert [str(key) for _, key, _ in jobs] == [
        f"{run}.tate.{seed}" for seed in range(3) for run in ("with", "without")
    ]
    for _, key, _ in jobs:
        load_recipe(paper.recipe_of(paper.runs[key.run]), paper.settings_of(key))


def test_a_folder_here_is_a_paper_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "own" / "runs").mkdir(parents=True)
    text = CLAIMS.replace('table = "1"', 'table = "figure-3"').replace('table = "2"', 'table = "section-3"')
    (tmp_path / "own" / "runs" / "claims.toml").write_text(text % 1)
    monkeypatch.chdir(tmp_path)
    assert main(["own", "--table", "3", "--list"]) == 2
    assert "--table '3': 2 tables have this name. Choose from figure-3, section-3." in capsys.readouterr().err
