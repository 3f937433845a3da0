"""Facts of the report, against the plainest way to compute them."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from extremis.reporting.charts import FATES, data_charts, line
from extremis.reporting.data_facts import Facts, Split, frequencies, histogram, tail_of
from extremis.reporting.page import _inert
from extremis.reporting.queries import sample_rows
from extremis.reporting.run_records import differing, names_of, thin
from pipelines.mining.steps import funnel
from schemas.layout import DataLayout
from schemas.manifest import Manifest
from tests.builders import build_data


@given(some.lists(some.integers(0, 500), max_size=200), some.integers(1, 70))
def test_a_histogram_holds_every_row_in_the_bin_of_its_value(counts: list[int], bins: int) -> None:
    values, rows = histogram(np.asarray(counts, np.int64), bins)
    assert len(values) <= bins
    assert rows.sum() == len(counts)
    ends = [*values[1:].tolist(), np.inf][: len(values)]
    for low, high, held in zip(values.tolist(), ends, rows.tolist(), strict=True):
        assert held == sum(low <= count < high for count in counts)


def test_splits_of_one_distribution_have_one_curve_whatever_their_bins() -> None:
    low = np.arange(1, 41).repeat(10)
    splits = [
        Split(name, Manifest(kind="queries"), len(counts), None, histogram(counts))
        for name, counts in (("test", low), ("train", np.append(low.repeat(10), 120)))  # bins of 1 and of 2
    ]
    tail = tail_of((np.array([1]), np.array([5])))
    charts = data_charts(Facts("data", Manifest(kind="data"), splits, tail, 0, "extremis shard INPUT data"))
    test, train = charts[1]["figure"]["data"]
    assert len(test["x"]) == 40
    assert len(train["x"]) == 60
    assert test["y"] == pytest.approx([2.5] * 40)
    assert train["y"][:20] == pytest.approx([2.5] * 20, rel=1e-3)


@given(some.lists(some.integers(0, 40), min_size=1, max_size=300))
def test_the_tail_is_that_of_the_sorted_frequencies(frequency: list[int]) -> None:
    tail = tail_of(np.unique(np.asarray(frequency), return_counts=True))
    ordered = sorted(frequency, reverse=True)
    assert tail.labels == len(frequency)
    assert tail.unseen == frequency.count(0)
    assert [ordered[rank - 1] for rank in tail.rank.tolist()] == tail.points.tolist()
    head = max(1, len(frequency) // 100)
    assert tail.head_share == pytest.approx(sum(ordered[:head]) / max(1, sum(ordered)))
    if sum(ordered):
        assert (tail.rank[0], tail.rank[-1]) == (1, len(frequency) - tail.unseen)


def test_frequencies_are_counted_over_all_row_groups() -> None:
    small = build_data("memory://report/data", labels=40, label_group_rows=7)
    values, labels = frequencies(small.layout)
    expected = np.unique(small.frequency(), return_counts=True)
    np.testing.assert_array_equal(values, expected[0])
    np.testing.assert_array_equal(labels, expected[1])
    assert isinstance(small.layout, DataLayout)


@given(some.integers(0, 300), some.integers(1, 400), some.integers(1, 50))
def test_a_sample_has_as_many_different_rows_as_asked_for_or_all(rows: int, count: int, group: int) -> None:
    first = np.asarray([*range(0, rows, group), rows])
    sampled = sample_rows(rows, count, first)
    assert len(sampled) == len(set(sampled.tolist())) == min(rows, count)
    assert all(0 <= row < rows for row in sampled.tolist())


def test_a_long_curve_is_averaged_and_keeps_its_ends() -> None:
    steps, values = thin(np.arange(1, 10_001.0), np.ones(10_000), 100)
    assert len(steps) == len(values) == 100
    assert steps[-1] == 10_000
    assert (values == 1).all()
    steps, values = thin(np.arange(5.0), np.arange(5.0), 100)
    assert values.tolist() == [0, 1, 2, 3, 4]


def test_names_tell_runs_apart() -> None:
    assert names_of(["s3://b/runs/1", "s3://b/runs/2"]) == ["1", "2"]
    assert names_of(["a/x/run", "a/y/run/"]) == ["x/run", "y/run"]


def test_only_what_differs_is_listed() -> None:
    first = {"recipe": {"train": {"epochs": 3, "seed": 0}, "method": "a"}}
    other = {"recipe": {"train": {"epochs": 4, "seed": 0}, "method": "a"}}
    assert differing({"1": first, "2": other}) == [("train.epochs", [3, 4])]


def test_the_funnel_names_every_fate_that_mining_counts() -> None:
    assert set(FATES) == set(funnel(Counter())) - {"candidates"}


@given(some.text())
def test_json_in_the_page_is_inert_and_the_same(text: str) -> None:
    inert = _inert(json.dumps({"text": text}, ensure_ascii=False))
    assert not set(inert) & set("<>&\u2028\u2029")
    assert json.loads(inert) == {"text": text}


def test_numbers_of_a_chart_are_json() -> None:
    trace = line("a", 0, np.arange(2), np.asarray([np.nan, 1.23456789]))
    assert trace["y"] == [None, 1.2346]
    json.dumps(trace, allow_nan=False)
