"""The table of labels of `extremis evaluate` against scikit-learn, and the time that the table takes.

    python -m benchmarks.label_table DATA RUN [--split test] [--max-labels 5]

From the rankings of the evaluation and the labels of DATA, scikit-learn computes each label's precision, recall, F1 and
support (`classification_report`), and the average precision (`average_precision_score`) of the labels whose positives
are all ranked; where a label is not ranked, it has the lowest score. `differ`: labels with another figure than in the
table, by more than 1e-9. `seconds`: of the evaluation, and of what it does for the table. DATA without retired labels.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from scipy import sparse
from sklearn.metrics import average_precision_score, classification_report

import extremis
from benchmarks.common.report import report
from extremis import evaluation
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from scoring.label_sets import LabelSets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "run"):
        parser.add_argument(name)
    parser.add_argument("--split", default="test")
    parser.add_argument("--max-labels", type=int, default=5)
    arguments = parser.parse_args()
    parts = "LabelSets.of_labels", "name_figures", "write_labels", "summarize_labels", "LabelSets.averages"
    spent, sets = watch(*parts)
    with tempfile.TemporaryDirectory() as folder:
        file, began = Path(folder, "labels.parquet"), time.perf_counter()
        options = {"split": arguments.split, "max_labels": arguments.max_labels, "labels": str(file)}
        extremis.evaluate(arguments.data, arguments.run, **options)
        seconds = time.perf_counter() - began
        table = pq.read_table(file).to_pydict()
    labels, queries = len(table["label"]), Table.open(DataLayout(arguments.data).queries(arguments.split), "queries")
    positives = list_column(queries.read(("label_ids",)), "label_ids")
    top, scores = sets[0].rankings[:2]
    ranked = Ragged.from_counts(top[top >= 0], (top >= 0).sum(axis=1))
    best = top[:, : arguments.max_labels]
    given = matrix(Ragged.from_counts(best[best >= 0], (best >= 0).sum(axis=1)), labels)
    truth = matrix(positives, labels)
    ids = [*map(str, range(labels))]
    expected = classification_report(truth, given, target_names=ids, output_dict=True, zero_division=0)
    names = {"precision": "precision", "recall": "recall", "F1": "f1-score", "support": "support"}
    differ = {}
    for name, of in names.items():
        factor = 1 if name == "support" else 100
        theirs = np.array([factor * expected[label][of] for label in ids])
        differ[name] = int((np.abs(theirs - np.array(table[name], float)) > 1e-9).sum())
    values = np.unique(scores[top >= 0], return_inverse=True)[1] + 1  # in the same order, and above 0
    scored = sparse.csr_array((values, ranked.entries, ranked.offsets), shape=truth.shape).tocsc()
    by_label, compared, apart = truth.tocsc(), 0, 0
    for label in np.flatnonzero(np.array(table["support"])):
        own, of = by_label[:, [label]].toarray()[:, 0], scored[:, [label]].toarray()[:, 0]
        if of[own > 0].all():
            compared += 1
            apart += abs(100 * average_precision_score(own, of) - table["average_precision"][label]) > 1e-9
    table_seconds = sum(spent.values())
    differ["average_precision"] = int(apart)
    report(
        "the table of labels equals scikit-learn's figures, and takes at most a tenth of the evaluation without it",
        {
            "queries": queries.rows,
            "labels": labels,
            "with_positives": int(np.count_nonzero(table["support"])),
            "average_precisions": compared,
            "differ": differ,
            "seconds": {name: round(value, 2) for name, value in {"evaluate": seconds, **spent}.items()},
        },
        {"differ": sum(differ.values()), "time": table_seconds / (seconds - table_seconds)},
        {"differ": "<1", "time": "<0.1"},
    )


def matrix(rows: Ragged, labels: int) -> sparse.csr_matrix:
    return sparse.csr_matrix((np.ones(len(rows.entries), int), rows.entries, rows.offsets), shape=(rows.rows, labels))


def _watched(inner: Callable[..., Any], name: str, spent: dict[str, float], sets: list[LabelSets]) -> Any:
    def outer(*arguments: Any) -> Any:
        sets.extend(arguments[:1] if isinstance(arguments[0], LabelSets) else ())
        began = time.perf_counter()
        try:
            return inner(*arguments)
        finally:
            spent[name] += time.perf_counter() - began

    return outer


def watch(*names: str) -> tuple[dict[str, float], list[LabelSets]]:
    """Measure the wall time of functions that the evaluation calls, and keep its sets."""
    spent, sets = dict.fromkeys(names, 0.0), list[LabelSets]()
    for name in names:
        *owner, last = name.split(".")
        place = getattr(evaluation, owner[0]) if owner else evaluation
        setattr(place, last, _watched(getattr(place, last), name, spent, sets))
    return spent, sets


if __name__ == "__main__":
    main()
