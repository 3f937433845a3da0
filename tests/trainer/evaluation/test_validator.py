"""Validation while a run trains: what it says about a metric that popular labels would have, too."""

from pathlib import Path

import pytest

from schemas.layout import DataLayout
from tests.builders import build_data
from trainer.evaluation import evaluate as validation
from trainer.evaluation.evaluate import Validator, measure_popularity
from trainer.group import Group
from trainer.methods.sections import METRICS, Data, Validation


class Counting(Group):
    """Counts the messages of its ranks."""

    messages = 0

    def broadcast(self, thing: object) -> object:  # type: ignore[override]
        self.messages += 1
        return thing


@pytest.mark.parametrize(("split", "holdout"), [("val", 0.0), ("", 0.5)])
def test_a_metric_below_that_of_popular_labels_is_said(tmp_path: Path, split: str, holdout: float) -> None:
    data: DataLayout = build_data(str(tmp_path / "data"), rows={"train": 80, "val": 20}, labels=30).layout
    group, trained = Counting(), Data(holdout=holdout)
    validator = Validator(Validation(split=split, queries=15, metric="P@2"), trained, data, group)
    popular = measure_popularity(data, split or "holdout", trained, 15, [2])["P@2"]
    assert popular > 0
    assert validator.odd({"P@2": popular}) == ""
    line = validator.odd({"P@2": popular - 1})
    assert f"P@2 on {split or 'holdout'} is {popular - 1:.2f}" in line
    assert f"{popular:.2f}" in line
    assert validator.odd({}) == ""
    assert group.messages == 1


@pytest.mark.parametrize("family", METRICS)
def test_a_run_may_be_validated_by_each_metric(tmp_path: Path, family: str) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 20, "val": 20}, labels=10).layout
    rule = Validation(split="val", metric=f"{family}@4")
    if not family.startswith("PS"):
        assert rule.metric in measure_popularity(data, "val", Data(), 20, [4])


def test_popular_labels_are_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def measure(data: DataLayout, split: str, *rest: object) -> dict[str, float]:
        calls.append(split)
        return {"P@1": 50.0}

    monkeypatch.setattr(validation, "measure_popularity", measure)
    validator = Validator(Validation(split="val"), Data(), DataLayout(str(tmp_path)), Group())
    assert [bool(validator.odd({"P@1": value})) for value in (10.0, 50.0, 49.9)] == [True, False, True]
    assert calls == ["val"]
