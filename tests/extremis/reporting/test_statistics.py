"""Statistics in the report, against the plainest way to compute them."""

import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from extremis.auto import METRIC
from extremis.inspecting import Example
from extremis.reporting.page import (
    CANDIDATE_OUTCOMES,
    _inert,
    _simplify_charts,
    data_charts,
    draw_chart,
    explain_choice,
    line,
)
from extremis.reporting.records import (
    DataStatistics,
    RepresentativeScores,
    SplitStatistics,
    downsample,
    group_queries,
    histograms,
    name_labels,
    names_of,
    recipe_differences,
    sample_rows,
    tail_of,
)
from pipelines.mining.search import funnel
from schemas.manifest import Manifest
from trainer.evaluation.ranking import NEIGHBOURS, nearest_labels

lengths = some.lists(some.integers(0, 500), max_size=200)


@given(some.lists(lengths, min_size=1, max_size=3), some.integers(1, 70))
def test_histograms_hold_every_row_in_the_bin_of_its_value(counts: list[list[int]], bins: int) -> None:
    values, rows = histograms([np.asarray(each, np.int64) for each in counts], bins)
    assert len(values) <= bins
    assert rows.sum(axis=1).tolist() == [len(each) for each in counts]
    assert len({*np.diff(values).tolist()}) <= 1
    ends = [*values[1:].tolist(), np.inf][: len(values)]
    for each, held in zip(counts, rows.tolist(), strict=True):
        assert held == [
            sum(low <= count < high for count in each) for low, high in zip(values.tolist(), ends, strict=True)
        ]


@given(some.lists(lengths.filter(len), min_size=1, max_size=3))
def test_splits_are_drawn_in_the_same_bins_as_shares_of_their_rows(counts: list[list[int]]) -> None:
    arrays = [np.asarray(each, np.int64) for each in counts]
    splits = [SplitStatistics(f"s{n}", Manifest(kind="queries"), each, each) for n, each in enumerate(arrays)]
    tail = tail_of(np.ones(5, np.int64))
    charts = data_charts(
        DataStatistics("data", Manifest(kind="data"), splits, tail, 0, "extremis shard INPUT data", {})
    )
    for chart in (chart for chart in charts if "figure" in chart and chart["id"] != "tail"):
        traces = chart["figure"]["data"]
        assert len({tuple(trace["x"]) for trace in traces}) == 1
        width = (traces[0]["x"] * 2)[1] - traces[0]["x"][0] or 1
        for each, trace in zip(counts, traces, strict=True):
            shares = [100 * sum(x <= n < x + width for n in each) / len(each) / width for x in trace["x"]]
            assert trace["y"] == pytest.approx(shares, rel=1e-3)


@given(some.lists(some.integers(0, 40), min_size=1, max_size=300))
def test_the_tail_is_that_of_the_sorted_frequencies(frequency: list[int]) -> None:
    tail = tail_of(np.asarray(frequency))
    ordered = sorted(frequency, reverse=True)
    assert tail.labels == len(frequency)
    assert tail.unseen == frequency.count(0)
    assert [ordered[rank - 1] for rank in tail.rank.tolist()] == tail.points.tolist()
    head = max(1, len(frequency) // 100)
    assert tail.head_share == pytest.approx(sum(ordered[:head]) / max(1, sum(ordered)))
    if sum(ordered):
        assert (tail.rank[0], tail.rank[-1]) == (1, len(frequency) - tail.unseen)


@given(some.integers(0, 300), some.integers(1, 400))
def test_a_sample_has_as_many_different_rows_as_asked_for_or_all(rows: int, count: int) -> None:
    sampled = sample_rows(rows, count)
    assert len(sampled) == len(set(sampled.tolist())) == min(rows, count)
    assert all(0 <= row < rows for row in sampled.tolist())


def test_a_long_curve_is_averaged_and_keeps_its_ends() -> None:
    steps, values = downsample(np.arange(1, 10_001.0), np.ones(10_000), 100)
    assert len(steps) == len(values) == 100
    assert steps[-1] == 10_000
    assert (values == 1).all()
    steps, values = downsample(np.arange(5.0), np.arange(5.0), 100)
    assert values.tolist() == [0, 1, 2, 3, 4]


@given(some.lists(some.lists(some.sampled_from("ab"), min_size=1, max_size=5), min_size=1, max_size=5))
def test_names_tell_runs_apart_by_the_ends_of_their_paths(paths: list[list[str]]) -> None:
    urls = list(dict.fromkeys("s3://bucket/" + "/".join(path) for path in paths))
    names = names_of(urls)
    assert len(set(names)) == len(urls)
    assert all(url.endswith(name) and "/" in name for url, name in zip(urls, names, strict=True))
    assert names_of(["run/"]) == ["run"]


queries = some.tuples(some.sampled_from(["", "one", "two", "cut…"]), some.integers(0, 5), some.integers(6, 9))


@given(some.lists(queries, max_size=12))
def test_weakest_queries_of_one_text_are_one(rows: list[tuple[str, int, int]]) -> None:
    examples = [Example("test", row, f"key{row}", text, []) for row, (text, _, _) in enumerate(rows)]
    groups = group_queries([(example, *row[1:]) for example, row in zip(examples, rows, strict=True)])
    assert sorted(row for group in groups for row in group["rows"]) == [*range(len(rows))]
    texts = [group["text"] for group in groups if not group["text"].endswith("…")]
    assert len(texts) == len(set(texts))
    for group in groups:
        own = [rows[row] for row in group["rows"]]
        assert {text for text, _, _ in own} == {group["text"]}
        assert group["keys"] == [f"key{row}" for row in group["rows"]]
        assert (group["found"], group["positives"]) == (sum(row[1] for row in own), sum(row[2] for row in own))
        assert len(own) == 1 or not group["text"].endswith("…")


@given(some.lists(some.sampled_from(["", "one", "two", "k1"]), min_size=1, max_size=8))
def test_no_two_labels_have_one_name(texts: list[str]) -> None:
    rows = [{"label_id": i, "key": f"k{i}", "text": text, "frequency": i} for i, text in enumerate(texts)]
    decoder: Any = SimpleNamespace(label_rows=lambda ids: [rows[label] for label in ids])
    labels = name_labels(decoder, range(len(texts)))
    shown = [(label.text, label.key if label.shared else "") for label in labels.values()]
    assert len(set(shown)) == len(texts)
    assert all(label.text for label in labels.values())
    assert [label.points for label in labels.values()] == [*range(len(texts))]


@given(some.integers(0, 99), some.integers(1, 30))
def test_the_nearest_labels_have_the_greatest_cosines(seed: int, labels: int) -> None:
    vectors = np.random.default_rng(seed).normal(size=(labels, 3)).astype(np.float32)
    near = nearest_labels(torch.from_numpy(vectors), range(labels + 3))
    assert [*near] == [*range(labels)]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for label, found in near.items():
        others = np.delete(unit @ unit[label], label)
        assert label not in dict(found)
        assert [cosine for _, cosine in found] == pytest.approx(sorted(others, reverse=True)[:NEIGHBOURS], abs=1e-3)


@given(some.lists(some.integers(0, 3), min_size=1, max_size=4))
def test_a_chart_with_one_dot_a_line_is_a_sentence(lengths: list[int]) -> None:
    traces = [line(f"<run {i}>", i, range(n), np.arange(n) + 0.5, points=True) for i, n in enumerate(lengths)]
    charts = _simplify_charts([draw_chart("id", "title", traces, "epoch", "%")])
    assert len(charts) == (max(lengths) > 0)
    for chart in charts:
        assert ("figure" in chart) == (max(lengths) > 1) != ("said" in chart)
        dots = [f"<run {i}>: 0.5 % (epoch 0)" for i, n in enumerate(lengths) if n]
        assert chart.get("said", "") in ("", "; ".join(dots), "0.5 % (epoch 0)")


trials = some.builds(
    lambda score, ended: {"recipe": "astra", "changes": ["a.b=1"], METRIC: score, **({"ended": True} if ended else {})},
    some.floats(0, 99).map(lambda value: round(value, 2)),
    some.booleans(),
)


@given(some.lists(trials, max_size=4), some.floats(0, 99))
def test_a_choice_is_explained_by_the_best_of_the_others(others: list[dict[str, Any]], score: float) -> None:
    chosen = {"recipe": "renee", "changes": [], METRIC: score}
    record = {"chosen": "renee", "changes": [], "finalists": [chosen], "trials": [*others, chosen]}
    why = explain_choice(record)
    assert why.startswith(f"auto chose renee: {METRIC} {score:.2f}")
    finished = [trial[METRIC] for trial in others if "ended" not in trial]
    assert ("no other trial" in why) == (not finished)
    if finished:
        assert f"astra with a.b=1, had {max(finished):.2f}" in why
        assert ("within the noise" in why) == (max(finished) > score)
    second = {"recipe": "decoupled", "changes": ["c.d=2"]}
    for won in (False, True):
        final = {"chosen": second["recipe"], "changes": second["changes"]} if won else {}
        both = explain_choice({**record, **final, "finalists": [chosen, second], "compared": "more"})
        assert both.startswith(why.removesuffix("."))
        assert ("decoupled with c.d=2 had more: the final run." in both) == won


def test_the_scores_that_are_added_up_are_named() -> None:
    weights, trees = {"texts": 0.0, "linear": 3.333, "by": "weights"}, {"texts": 0.5, "by": "trees"}
    assert RepresentativeScores(7, "fused", weights).formula == "vectors + 3.33 × linear ranker"
    assert "boosted trees over vectors + 0.50 × labels' texts" in RepresentativeScores(7, "fused", trees).formula


def test_only_what_differs_is_listed() -> None:
    first = {"recipe": {"train": {"epochs": 3, "seed": 0}, "method": "a"}}
    other = {"recipe": {"train": {"epochs": 4, "seed": 0}, "method": "a"}}
    assert recipe_differences({"1": first, "2": other}) == [("train.epochs", [3, 4])]


def test_the_funnel_names_every_fate_that_mining_counts() -> None:
    assert set(CANDIDATE_OUTCOMES) == set(funnel(Counter())) - {"candidates"}


@given(some.text())
def test_json_in_the_page_is_inert_and_the_same(text: str) -> None:
    inert = _inert(json.dumps({"text": text}, ensure_ascii=False))
    assert not set(inert) & set("<>&\u2028\u2029")
    assert json.loads(inert) == {"text": text}


def test_numbers_of_a_chart_are_json() -> None:
    trace = line("a", 0, np.arange(2), np.asarray([np.nan, 1.23456789]))
    assert trace["y"] == [None, 1.2346]
    json.dumps(trace, allow_nan=False)
