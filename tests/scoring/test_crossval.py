"""Laws of cross-validation: folds, what a row's own labels can change, and probabilities by plain programs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import PAD
from schemas.ragged import Ragged
from scoring.crossval import FEWEST, Evidence, Rows, Scored, folds_of, judge
from scoring.words import count_features
from trainer.inputs import Inputs

WORDS, LABELS = 120, 8


def some_rows(count: int = 240, seed: int = 0, folds: int = 3) -> Rows:
    """Rows about two topics each, with a label per topic; three rows have one label more."""
    draw = np.random.default_rng(seed)
    topics = np.sort(np.stack([draw.choice(LABELS - 1, 2, replace=False) for _ in range(count)]), axis=1)
    tokens = topics[:, [0, 0, 0, 1, 1, 1]] + (LABELS - 1) * draw.integers(0, 6, (count, 6))
    labels = [[*some, *([LABELS - 1] if row in (3, 50, 90) else [])] for row, some in enumerate(topics.tolist())]
    ragged = Ragged.from_counts(np.concatenate(labels), np.array([len(some) for some in labels]))
    inputs = Inputs(Ragged.from_matrix(tokens.astype(np.uint32)))
    fold = folds_of(draw.integers(0, 1 << 64, count, dtype=np.uint64, endpoint=False), folds)
    counted = count_features(inputs, WORDS), count_features(inputs, WORDS, pairs=False)
    return Rows(*counted, ragged, fold, LABELS, WORDS, ())


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1), st.integers(2, 100))
def test_folds_partition_the_rows_by_group(groups: list[int], folds: int) -> None:
    found = folds_of(np.array(groups, np.uint64), folds).tolist()
    assert all(0 <= fold < folds for fold in found)
    assert found == [(group >> 32) * folds >> 32 for group in groups]  # of the group alone


def test_what_a_fold_says_does_not_depend_on_its_own_labels() -> None:
    rows, draw = some_rows(), np.random.default_rng(1)
    inside = (rows.fold == 1)[rows.labels.row_of()]
    other = np.where(inside, draw.integers(0, LABELS, len(inside)), rows.labels.entries)
    changed = Rows(rows.pairs, rows.words, Ragged(other, rows.labels.offsets), rows.fold, LABELS, WORDS, ())
    for before, after in zip(rows.score(1), changed.score(1), strict=True):
        np.testing.assert_array_equal(before, after)
    nearest = rows.score(1).nearest
    assert (rows.fold[nearest[nearest != PAD]] != 1).all()
    assert (rows.score(0).scores != changed.score(0).scores).any()


def scored_at_random(rows: Rows, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    scores = -np.sort(-draw.random((rows.labels.rows, 4)).astype(np.float32), axis=1)
    ids = np.argsort(draw.random((rows.labels.rows, LABELS)), axis=1)[:, :4]
    ids[::7, 2:], scores[::7, 2:] = PAD, 0
    return scores, ids


def plain_lifts(rows: Rows, row: int, label: int, replaced: int) -> tuple[float, float, float]:
    sets = [set(some) for some in np.split(rows.labels.entries, rows.labels.offsets[1:-1])]
    others = [sets[n] for n in range(len(sets)) if rows.fold[n] != rows.fold[row]]
    lifts = []
    for beside in sets[row] - {label, replaced}:
        usual = max(sum(label in some for some in others), 0.5) / len(others)
        both, alone = sum({label, beside} <= some for some in others), sum(beside in some for some in others)
        lifts.append(np.log((both + 5 * usual) / ((alone + 5) * usual)))
    return (max(lifts), float(np.mean(lifts)), sum(lifts)) if lifts else (0, 0, 0)


def test_evidence_is_what_a_plain_program_counts() -> None:
    rows, draw = some_rows(), np.random.default_rng(2)
    scores, ids = scored_at_random(rows)
    none = np.zeros((rows.labels.rows, 1), np.float32)
    evidence = Evidence(rows, Scored(scores, ids, none, np.full(none.shape, PAD)))
    row, label = draw.integers(0, rows.labels.rows, 300), draw.integers(0, LABELS, 300)
    replaced = rows.labels.entries[rows.labels.offsets[row]]
    found = evidence.features(row, label, replaced)
    for n in range(len(row)):
        place = np.flatnonzero(ids[row[n]] == label[n])
        score = scores[row[n], place[0]] if len(place) else 0
        points = sum(
            label[n] in rows.labels.entries[rows.labels.offsets[other] : rows.labels.offsets[other + 1]]
            for other in range(rows.labels.rows)
            if rows.fold[other] != rows.fold[row[n]]
        )
        assert found[n, 0] == score
        assert found[n, 2] == (place[0] + 1 if len(place) else 5)
        np.testing.assert_allclose(found[n, 4:7], plain_lifts(rows, row[n], label[n], replaced[n]), atol=1e-9)
        assert found[n, 8] == pytest.approx(np.log(max(points, 0.5)))
        assert rows.points_elsewhere[rows.fold[row[n]], label[n]] == points


def test_probabilities_come_from_the_other_folds_and_flipped_labels_stand_out() -> None:
    from sklearn.isotonic import IsotonicRegression

    rows, draw = some_rows(600), np.random.default_rng(3)
    given, owner = rows.labels.entries.copy(), rows.labels.row_of()
    flipped = np.sort(draw.choice(len(given), 30, replace=False))
    for n in flipped.tolist():
        given[n] = draw.choice(np.setdiff1d(np.arange(LABELS - 1), given[owner == owner[n]]))
    rows = Rows(rows.pairs, rows.words, Ragged(given, rows.labels.offsets), rows.fold, LABELS, WORDS, ())
    parts = [rows.score(number) for number in range(3)]
    order = np.argsort(np.argsort(rows.fold, kind="stable"))
    scored = type(parts[0])(*(np.concatenate(column)[order] for column in zip(*parts, strict=True)))
    judged = judge(rows, scored)
    hits, present = rows.labels.contains(scored.ids), scored.ids != PAD
    for fold in range(3):
        others = present & (rows.fold != fold)[:, None]
        curve = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(scored.scores[others], hits[others])
        own = present & (rows.fold == fold)[:, None]
        np.testing.assert_allclose(judged.probabilities[own], curve.predict(scored.scores[own]), atol=1e-6)
    np.testing.assert_array_equal(judged.known, given != LABELS - 1)  # three rows have the last label
    assert FEWEST > 3
    first = np.argsort(judged.support)[:15]
    assert np.isin(first, flipped).mean() >= 0.7
    for n in range(len(given)):
        place = np.flatnonzero(scored.ids[owner[n]] == given[n])
        assert judged.rank[n] == (place[0] + 1 if len(place) else 0)
