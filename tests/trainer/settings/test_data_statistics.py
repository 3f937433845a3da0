"""Figures of the data against plain counting over Python lists."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.manifest import open_manifest
from schemas.shares import ALL_ROWS, RowShare
from tests.builders import Rows, SmallData, build_data
from trainer.methods.settling import log_odds
from trainer.settings.data_statistics import HEAPS, measure
from trainer.stream import open_queries


@pytest.fixture(scope="module", params=["tokens", "features"])
def data(request: pytest.FixtureRequest) -> SmallData:
    kind = {"features": 25, "with_tokens": False} if request.param == "features" else {}
    return build_data(f"memory://facts/{request.param}", rows={"train": 90, "test": 5}, vocabulary=9, **kind)


def rows_of(data: SmallData, part: RowShare) -> list[int]:
    table = open_queries(data.layout, "train")
    groups = part.batches(table, ["query_id"])
    return [row for group in groups for row in group["query_id"].to_pylist()]


def repeated_pairs(texts: Rows) -> int:
    """Pairs of neighbouring tokens that come in two texts or more."""
    counts = Counter(pair for text in texts for pair in {*itertools.pairwise(text)})
    return sum(count > 1 for count in counts.values())


@pytest.mark.parametrize("label_texts", [False, True])
@pytest.mark.parametrize("part", [ALL_ROWS, RowShare(0.0, 0.5), RowShare(0.2, 0.7)])
def test_figures_are_counted(data: SmallData, part: RowShare, label_texts: bool) -> None:
    facts, points = measure(data.layout, "train", part, label_texts), data.points["train"]
    rows = rows_of(data, part)
    texts = data.labels if label_texts else 0
    pairs = sum(len(points.positives[row]) for row in rows)
    tokens = [points.tokens[row] for row in rows]
    has_tokens = "tokenizer" in open_manifest(data.layout.root, "data").parents
    assert (facts.queries, facts.labels, facts.pairs, facts.label_texts) == (len(rows), data.labels, pairs, texts)
    assert facts.points == len(rows) + texts
    assert facts.tokens == (pytest.approx(np.mean([*map(len, tokens)])) if has_tokens else 0)
    assert facts.ngrams == (repeated_pairs(tokens) if has_tokens else 0)
    assert not has_tokens or facts.ngrams > 10
    frequency = data.frequency()
    assert facts.median_frequency == np.median(frequency[frequency > 0])
    # The prior: how often (point, label) is right, over all of them.
    right = [label in points.positives[row] for row in rows for label in range(data.labels)]
    right += [text == label for text in range(texts) for label in range(data.labels)]
    assert facts.prior == pytest.approx(np.mean(right))
    assert log_odds(facts.prior) == pytest.approx(math.log(sum(right) / (len(right) - sum(right))))


def test_of_many_rows_the_first_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.settings.data_statistics.SAMPLED_ROWS", 30)
    data = build_data("memory://facts/sampled", rows={"train": 90}, vocabulary=9)
    points, first = data.points["train"], rows_of(data, ALL_ROWS)[:30]
    facts = measure(data.layout, "train", ALL_ROWS, False)
    tokens = [points.tokens[row] for row in first]
    assert (facts.queries, facts.pairs) == (90, 3 * sum(len(points.positives[row]) for row in first))
    assert facts.tokens == pytest.approx(np.mean([*map(len, tokens)]))
    assert facts.ngrams == round(repeated_pairs(tokens) * 3**HEAPS)


def test_no_rows_are_refused(data: SmallData) -> None:
    with pytest.raises(InputError, match="no rows to train on"):
        measure(data.layout, "train", RowShare(0.5, 0.5), False)


@given(st.floats(0, 1))
def test_log_odds_are_finite_and_odd(share: float) -> None:
    assert math.isfinite(log_odds(share))
    assert log_odds(1 - share) == pytest.approx(-log_odds(share), abs=1e-3)


def test_data_that_are_made_again_in_the_same_place_are_measured_again() -> None:
    for rows in (20, 31):
        data = build_data("memory://facts/again", rows={"train": rows})
        assert measure(data.layout, "train", ALL_ROWS, False).queries == rows
