"""The weakest queries and labels, against counts in plain Python."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from schemas.ragged import Ragged
from trainer.evaluation.metrics import DEPTH, QUERIES, SHOWN, Weakest

LABELS = 8
points = st.lists(
    st.tuples(
        st.sets(st.integers(0, LABELS - 1), max_size=4),
        st.lists(st.integers(0, LABELS - 1), min_size=DEPTH + 1, max_size=DEPTH + 1, unique=True),
    ),
    min_size=1,
    max_size=40,
)


@given(points, st.integers(1, 7))
def test_it_is_what_counting_finds(points: list[tuple[set[int], list[int]]], batch: int) -> None:
    weakest = Weakest()
    for first in range(0, len(points), batch):
        part = points[first : first + batch]
        counts = np.asarray([len(positives) for positives, _ in part])
        labels = np.asarray([label for positives, _ in part for label in sorted(positives)], np.int64)
        weakest.update(np.asarray([top for _, top in part]), Ragged.from_counts(labels, counts))
    report = weakest.report()

    found = [len(positives & {*top[:DEPTH]}) for positives, top in points]
    rows = [(row, found[row], len(positives)) for row, (positives, _) in enumerate(points) if positives]
    missed = [row for row in rows if row[1] < min(row[2], DEPTH)]
    missed.sort(key=lambda row: (row[1] / min(row[2], DEPTH), -row[2], row[0]))
    assert report["queries"] == [[*row] for row in missed[:QUERIES]]

    total = Counter(label for positives, _ in points for label in positives)
    hits = Counter(label for positives, top in points for label in positives & {*top[:DEPTH]})
    counted = [(label, hits[label], total[label]) for label in total if hits[label] < total[label]]
    counted.sort(key=lambda label: (label[1] / label[2], -label[2], label[0]))
    assert report["labels"] == [[*label] for label in counted[:SHOWN]]
