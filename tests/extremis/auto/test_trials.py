"""Trials: what is tried on which rows."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extremis import auto
from extremis.auto import (
    QUERIES,
    Contender,
    Survey,
    Trial,
    TrialData,
    best_trial,
    contenders,
    holdout_share,
    variations,
)
from schemas.manifest import open_manifest
from schemas.storage import write_json
from tests.builders import build_data
from trainer.methods.sections import Data
from trainer.recipe_files import load_recipe
from trainer.settings.data_statistics import DataStatistics


@given(st.integers(1, 10**11))
def test_a_recipe_takes_the_share_that_is_held_out(rows: int) -> None:
    share = holdout_share(rows)
    data = load_recipe("random", [f"data.holdout={share}"]).data
    assert data.holdout == share > 0
    held_out = share * rows  # within chance
    assert held_out <= QUERIES * 1.01 + 1
    assert rows < 40_000 or held_out == pytest.approx(QUERIES, rel=0.01)
    assert rows < 1_000 or held_out >= 95


def survey(labels: int = 30_000, queries: int = 90_000, symmetric: float = 0.0, tokens: float = 12.0) -> Survey:
    facts = DataStatistics(queries=queries, labels=labels, pairs=3 * queries, tokens=tokens)
    return Survey(facts, "tokens", texts=1.0, symmetric=symmetric)


def test_of_symmetric_data_a_label_is_not_a_point_twice() -> None:
    for symmetric, stated in ((0.0, False), (0.4, False), (0.9, True)):
        dual = next(each for each in contenders(survey(symmetric=symmetric)) if each.recipe == "dexml-sampled")
        assert ("data.label_texts=false" in dual.changes) == stated
    assert contenders(survey(labels=100))[1].recipe == "renee"


def test_each_kind_is_tried_with_a_models_vectors_of_tokens_and_without() -> None:
    plain, tried = contenders(survey()), contenders(survey(), "models/words/")
    known = [each.changed("encoder.pretrained=models/words/") for each in plain]
    assert tried == [*known, *plain]
    assert {each.name for each in known} == {f"{each.name}-pretrained-words" for each in plain}  # names of folders


@pytest.mark.parametrize(
    ("weight", "tried"), [(0.1, {0.4, 1.0}), (0.3, {0.1, 1.0}), (0.9, {0.1, 0.4}), (0, {0.4, 1.0})]
)
def test_variations_are_far_from_what_was_tried(weight: float, tried: set[float]) -> None:
    changed = variations(Contender("astra"), weight)
    assert {float(each.changes[-1].partition("=")[2]) for each in changed} == tried


def test_symmetric_data_is_tried_on_rows_of_all_labels(tmp_path: Path) -> None:
    trial_data = TrialData.prepare("data", survey(queries=400_000, symmetric=0.9), str(tmp_path), "cpu")
    rows = 400_000 * Data(holdout=0.005, share=trial_data.share).training_rows.stop
    assert (trial_data.data, trial_data.rows, trial_data.epochs) == ("data", 400_000, 2)
    assert rows == pytest.approx(100_000 / (1 + 12 / 200), rel=0.01)
    small = TrialData.prepare("data", survey(queries=5_000, labels=3_000), str(tmp_path), "cpu")
    assert (small.data, small.share, small.epochs) == ("data", 1.0, 4)
    many_labels = TrialData.prepare("data", survey(queries=5_000), str(tmp_path), "cpu")
    assert many_labels.epochs == 3


def test_larger_data_is_tried_on_an_excerpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "_TRIAL_ROWS", 60)
    data = build_data(str(tmp_path / "data"), rows={"train": 400}, labels=90, most_positives=2)
    seen = Survey.of(data.layout)
    trial_data = TrialData.prepare(data.layout.root, seen, str(tmp_path / "trials"), "cpu")
    assert trial_data.data == str(tmp_path / "trials" / "data")
    assert 50 < trial_data.rows < 80
    assert open_manifest(trial_data.data, "data").parameters["rows"] == {"train": trial_data.rows}
    assert TrialData.prepare(data.layout.root, seen, str(tmp_path / "trials"), "cpu") == trial_data


def scores(mean: float, rows: int = 2000, seed: int = 0) -> list[float]:
    """Scores of rows that are 1 or 0, `mean` percent of them 1; one seed's differ by as few rows as they can."""
    order = np.random.default_rng(seed).permutation(rows)
    return (order < rows * mean / 100).astype(float).tolist()


def of_course(contender: Contender, *course: list[float], ended: bool = False, texts: int = 2000) -> Trial:
    numbers = [row * texts // 2000 for row in range(len(course[-1]))]
    return Trial(contender, {"nDCG@5": 100 * np.mean(course[-1])}, [*course], ended, 1.0, texts=numbers)


def test_a_trial_loses_where_it_is_behind_at_the_same_epoch() -> None:
    best = of_course(Contender("astra"), scores(50), scores(60))
    change, other = Contender("astra", ("encoder.ngram_weight=1",)), Contender("decoupled")
    assert best.beats(change, [scores(49.9)], 2)
    assert not best.beats(change, [scores(50.1)], 2)  # though it is below the best one's end
    assert not best.beats(change, [scores(1)], 1)  # one epoch is too early
    assert not best.beats(other, [scores(48, seed=1)], 1)  # half of the rows differ: by chance
    assert best.beats(other, [scores(48)], 1)  # the same rows but for 40, which all fell
    assert best.beats(other, [scores(42, seed=1)], 1)
    copies = [np.repeat(scores(mean, 20, seed), 100).tolist() for seed, mean in enumerate((50, 35))]
    assert best.beats(other, copies[1:], 1)
    assert not of_course(Contender("astra"), copies[0], texts=20).beats(other, copies[1:], 1)  # 20 texts know less
    assert not best.beats(change, [scores(1)] * 3, 3)  # the best one has no such validation
    assert best_trial([best, of_course(other, scores(70), scores(70), ended=True)]) is best


def test_a_dual_encoder_wins_within_two_standard_errors() -> None:
    best = of_course(Contender("astra"), scores(60))
    dual = next(each for each in contenders(survey()) if each.is_dual_encoder)
    near, far = of_course(dual, scores(59, seed=1)), of_course(dual, scores(50, seed=1))
    assert best_trial([best, near]) is near
    assert best_trial([best, far]) is best
    assert best_trial([best, of_course(dual, scores(59))]) is best  # on the rows where both differ, it lost all
    assert best_trial([best, of_course(dual, scores(40), scores(59, seed=1))]).contender is dual  # had time for more


def test_a_trial_that_is_behind_ends_at_half_time_and_is_not_run_again(tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 400}, labels=30, most_positives=2)
    trial_data = TrialData.prepare(data.layout.root, Survey.of(data.layout), str(tmp_path / "trials"), "cpu")
    assert trial_data.epochs == 4
    renee, change = Contender("renee"), Contender("renee", ("encoder.ngram_weight=1",))
    trial = trial_data.run_trial(renee, "trial 1")
    assert len(trial.course) == 2
    assert not trial.ended
    perfect = {**vars(trial), "course": [[1.0] * len(trial.course[0])] * 2}
    write_json(
        str(tmp_path / "trials" / "renee.json"), {name: perfect[name] for name in perfect if name != "contender"}
    )
    behind = trial_data.run_trial(change, "trial 2", [renee])
    assert len(behind.course) == 1
    assert behind.ended
    assert trial_data.run_trial(change, "trial 2") == behind
