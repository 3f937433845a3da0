"""Calibration: scikit-learn's curves in numbers, the inverse, errors by their definition, and files that are none."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression
from tokenizers.processors import TemplateProcessing

from schemas.errors import InputError, TableError
from schemas.ragged import Ragged
from scoring.calibration import (
    BINS,
    Calibration,
    PrecisionBounds,
    ScoredPredictions,
    calibrate,
    fragments_of,
    measure,
    share_of_fragments,
)
from tests.plain_figures import precision_bound
from tests.scoring.test_names import byte_level, wordpiece
from trainer.inputs import Inputs


def sigmoid(scores: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-scores))


def curve_of(scores: tuple[float, ...], probabilities: tuple[float, ...]) -> Calibration:
    return Calibration(np.array(scores), np.array(probabilities))


def stored(curve: Calibration, **change: object) -> dict:
    described = curve.described({"none_of_these": {}})
    return {**described, "curve": {**described["curve"], **change}}


def made(queries: int, seed: int = 0, head_start: float = 0.0) -> ScoredPredictions:
    """Predictions that are right with the probability sigmoid(2 (score - 3)): three a query, best first.

    `head_start`: the best label is right with the probability of a score that is higher by this number.
    """
    draw = np.random.default_rng(seed)
    scores = -np.sort(-draw.normal(2, 1.5, (queries, 3)), axis=1).astype(np.float32)
    hits = draw.random(scores.shape) < sigmoid(2 * (scores + np.array([head_start, 0, 0]) - 3))
    predictions, ids = ScoredPredictions(), np.tile(np.arange(3), (queries, 1))
    predictions.collect(ids, scores, Ragged.from_counts(ids[hits], hits.sum(1)), texts_of(np.arange(queries)))
    return predictions


def texts_of(numbers: np.ndarray) -> Inputs:
    """One token each."""
    return Inputs(Ragged(numbers.astype(np.uint32), np.arange(len(numbers) + 1)))


def test_the_numbers_are_those_of_scikit_learn() -> None:
    scores, hits, query = made(400).pairs()
    asked = np.linspace(-4, 9, 301).astype(np.float32)
    isotonic = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(scores.astype(float), hits)
    np.testing.assert_allclose(
        Calibration.fit(scores, hits, query >= 0)(asked), isotonic.predict(asked.astype(float)), atol=1e-6
    )


def test_what_was_learned_holds_on_other_rows_and_keeps_the_order() -> None:
    curve, facts = calibrate(made(3000))
    others = made(3000, seed=1)
    scores, hits, query = others.pairs()
    found = curve(scores)
    measured = measure(curve, others)
    assert measured["ece"] < 0.03 < 0.1 < measured["uncalibrated"]["ece"]
    assert measured["brier"] < measured["uncalibrated"]["brier"]
    assert facts["ece"] < 0.04
    order = np.argsort(scores)
    assert (np.diff(found[order]) >= 0).all()
    best = np.flatnonzero(np.diff(query, prepend=-1))
    unlikely = scores[best] < curve.none_below
    assert measured["none_of_these"]["queries"] == pytest.approx(unlikely.mean())
    assert measured["none_of_these"]["wrong"] == pytest.approx((~hits[best][unlikely]).mean())
    again = Calibration.read(json.loads(json.dumps(stored(curve))), "a file")
    np.testing.assert_array_equal([again.scores, again.probabilities], [curve.scores, curve.probabilities])
    assert again.none_below == curve.none_below
    np.testing.assert_array_equal(again.precision.scores, curve.precision.scores)
    np.testing.assert_array_equal(again.precision.bounds, curve.precision.bounds)
    for share in (0.05, 0.3, 0.5, 0.9):
        lowest = again.score_of(share)
        assert lowest is not None
        assert again(np.array([lowest]))[0] == pytest.approx(share, abs=1e-5)
        assert again(np.array([lowest - 1e-3]))[0] < share


@pytest.mark.parametrize("head_start", [-1.0, 0.0, 1.0, 9.0, -9.0])
def test_most_best_labels_of_queries_with_none_of_these_are_wrong(head_start: float) -> None:
    predictions = made(300, head_start=head_start)
    scores, hits, query = predictions.pairs()
    curve, _ = calibrate(predictions)
    best = np.diff(query, prepend=-1) > 0
    none = scores[best] < curve.none_below
    assert hits[best][none].sum() <= none.sum() / 2
    assert hits[best][~none].sum() >= (~none).sum() / 2
    assert measure(curve, predictions)["none_of_these"]["queries"] == pytest.approx(none.mean())


def test_errors_are_those_of_the_definition() -> None:
    predictions = made(200)
    scores, hits, _ = predictions.pairs()
    curve = curve_of((-1.0, 2.0, 4.0), (0.0, 0.3, 1.0))
    found = curve(scores)
    expected = 0.0
    for bin in range(BINS):
        inside = (found >= bin / BINS) & ((found < (bin + 1) / BINS) | (bin == BINS - 1))
        expected += abs(found[inside].mean() - hits[inside].mean()) * inside.mean() if inside.any() else 0
    measured = measure(curve, predictions)
    assert measured["ece"] == pytest.approx(expected)
    assert measured["brier"] == pytest.approx(np.mean((found - hits) ** 2))


def test_a_probability_that_no_score_has() -> None:
    curve = curve_of((0.0, 1.0, 2.0), (0.2, 0.2, 0.6))
    assert curve.score_of(0.7) is None
    assert curve.score_of(0.1) == curve.score_of(0.2) == 0.0
    assert curve.score_of(0.4) == pytest.approx(1.5)


@pytest.mark.parametrize("right", [True, False])
def test_rows_that_are_all_right_or_all_wrong(right: bool) -> None:
    with pytest.raises(InputError, match="needs both correct and incorrect predictions"):
        Calibration.fit(np.arange(3.0), np.full(3, right), np.ones(3, bool))


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5), st.booleans()), min_size=1, max_size=40),
    cut=st.sampled_from([-np.inf, 2.0]),
)
def test_bounds_are_those_of_their_definition_at_every_score(rows: list[tuple[int, int, bool]], cut: float) -> None:
    text, scores, hits = (np.array(column) for column in zip(*rows, strict=True))
    bounds = PrecisionBounds.fit(scores.astype(np.float32), hits, text, cut)
    expected: dict[float, float] = {}
    for lowest in sorted({*scores.tolist()}):
        keys = [str(n) for n in range(len(text))]
        predictions = {key: [("x", float(scores[int(key)]))] for key in keys}
        labels = {key: ["x"] * bool(hits[int(key)]) for key in keys}
        expected[lowest] = precision_bound(predictions, labels, {key: str(text[int(key)]) for key in keys}, lowest)
    for score, bound in zip(bounds.scores, bounds.bounds, strict=True):
        assert score > cut
        assert bound == pytest.approx(expected[score], abs=1e-6)
    for asked in (0.05, 0.1, 0.2, 0.3, 0.5):
        good = [score for score, bound in expected.items() if score > cut and bound >= asked + 0.001]
        if good:  # bounds that are closer than a thousandth are not told apart
            assert bounds.score_of(asked) <= good[0]
            assert expected[bounds.score_of(asked)] >= asked - 1e-9
        elif not any(bound >= asked for bound in bounds.bounds):
            with pytest.raises(InputError, match=f"the highest precision that this model meets on its {bounds.texts}"):
                bounds.score_of(asked)


def test_a_bound_holds_for_19_of_20_samples_of_texts_that_repeat() -> None:
    """The share of correct labels falls with the score, and copies of a text are right or wrong together."""
    draw, copies, missed = np.random.default_rng(0), 3, 0
    for _ in range(300):
        scores = draw.random(400).repeat(copies)
        hits = draw.random(400).repeat(copies) < scores
        bounds = PrecisionBounds.fit(scores.astype(np.float32), hits, np.arange(400).repeat(copies))
        lowest = bounds.score_of(0.75)
        missed += (1 + lowest) / 2 < 0.75  # the mean of the probabilities above it
    assert missed / 300 < 0.07


@pytest.mark.parametrize(
    "change",
    [
        {"scores": [0.0]},
        {"scores": [], "probabilities": []},
        {"scores": ["a", "b"]},
        {"scores": [1.0, 0.0]},
        {"probabilities": [0.5, 0.1]},
        {"probabilities": [0.5, 7.0]},
        {"probabilities": [float("nan"), 0.1]},
    ],
)
def test_numbers_that_are_none(change: dict) -> None:
    with pytest.raises(TableError, match="a file: not a calibration"):
        Calibration.read(stored(curve_of((0.0, 1.0), (0.1, 0.9)), **change), "a file")


@pytest.mark.parametrize("make", [wordpiece, byte_level])
@pytest.mark.parametrize("special", [False, True])
def test_a_word_of_one_letter_is_no_fragment_but_the_first_letter_of_a_split_word_is(make: Any, special: bool) -> None:
    """By the tokenizer's own words: unknown words, and words of several tokens but for a first part of two letters."""
    tokenizer, _ = make()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    if special:
        ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
        tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    lines = ["a a", "a", "unbelievably a x", "qzx a of Donaudampfschifffahrt a", "", "of 2024 q\U00010348 a"]
    fragments, expected = fragments_of(tokenizer.to_str().encode()), []
    for encoding in tokenizer.encode_batch(lines):
        sizes, count = Counter(encoding.word_ids), 0
        for place, (token, word) in enumerate(zip(encoding.tokens, encoding.word_ids, strict=True)):
            is_first = encoding.word_ids.index(word) == place
            is_letter = len(token.removeprefix("\u0120")) == 1
            # Without a mark, nothing tells the first letter of a text from a word.
            is_split = sizes[word] > 1 and (is_letter if make is wordpiece or word else False)
            count += word is not None and (token == "[UNK]" or not is_first or is_split)
        expected.append(count / max(1, len(encoding)))
    tokens = [np.array(encoding.ids, np.int64) for encoding in tokenizer.encode_batch(lines)]
    rows = Ragged.from_counts(np.concatenate(tokens), np.array([*map(len, tokens)]))
    np.testing.assert_allclose(share_of_fragments(rows, fragments), expected)
    assert expected[:2] == [0, 0]
    assert 0 < expected[2] < 1
