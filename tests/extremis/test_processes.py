"""Calls side by side: what they return, raise and print is as in a row."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from extremis.auto import Contender, Survey, Trial, TrialData
from extremis.console import say
from extremis.processes import Calls
from extremis.supervisor import RunLog
from schemas.errors import InputError, PeerError
from tests.builders import build_data
from trainer.recipe_files import load_recipe


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> RunLog:
    return RunLog(str(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def side(log: RunLog) -> Iterator[Calls]:
    with Calls(2, 2, log, 0) as calls:
        yield calls


def test_trials_are_equal_side_by_side_and_in_a_row(side: Calls, log: RunLog, tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 400}, labels=30, most_positives=2)
    survey = Survey.of(data.layout)
    kinds = [Contender("renee"), Contender("renee", ("encoder.ngram_weight=1",)), Contender("astra")]
    tried = list[list[Trial]]()
    for calls in (side, Calls(1, 1, log, 0)):
        trial_data = TrialData.prepare(data.layout.root, survey, str(tmp_path / f"{calls.count}"), "cpu")
        begun = [
            calls.start(partial(trial_data.run_trial, kind, f"trial {number}", kinds[:number]), f"trial {number}")
            for number, kind in enumerate(kinds)
        ]
        tried.append([result() for result in begun])
    for beside, alone in zip(*tried, strict=True):
        for name in ("contender", "metrics", "course", "ended", "texts"):
            assert getattr(beside, name) == getattr(alone, name)


def test_an_error_is_that_of_the_call_and_a_line_names_its_call(
    side: Calls, log: RunLog, capsys: pytest.CaptureFixture[str]
) -> None:
    refused, said = side.start(partial(load_recipe, "astr"), "a"), side.start(partial(say, "hello"), "b")
    with pytest.raises(InputError, match="astra"):
        refused()
    said()
    assert "b: hello" in capsys.readouterr().err
    with pytest.raises(PeerError, match="c ended with status 7; most likely it ran out of memory"):
        side.start(partial(os._exit, 7), "c")()
