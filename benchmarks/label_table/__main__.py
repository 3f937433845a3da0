"""The table of labels of `extremis evaluate` against scikit-learn, and the time that the table takes.

    python -m benchmarks.label_table DATA RUN EXPORT [--split test] [--max-labels 5]

EXPORT, of the newest checkpoint of RUN, predicts the best 100 labels of each query of the split. Of these, scikit-learn
computes each label's precision, recall, F1 and support (`classification_report`) of the first labels, and the average
precision (`average_precision_score`) of labels whose positives are all among the 100 labels; a label that is not, has
the lowest score. `differ`: labels with another figure than in the table, to 1e-9 (average precision: 1e-4, because an
export may round scores differently). `seconds`: of the evaluation, and of it, of the table with names and examples.
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

DEPTH = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "run", "export"):
        parser.add_argument(name)
    parser.add_argument("--split", default="test")
    parser.add_argument("--max-labels", type=int, default=5)
    arguments = parser.parse_args()
    spent = timed("LabelSets.of_labels", "name_figures", "write_labels", "summarize_labels", "LabelSets.averages")
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "labels.parquet"), Path(folder, "best.parquet")
        began = time.perf_counter()
        extremis.evaluate(
            arguments.data, arguments.run, split=arguments.split, labels=str(file), max_labels=arguments.max_labels
        )
        seconds = time.perf_counter() - began
        extremis.predict(arguments.export, str(out), data=arguments.data, split=arguments.split, max_labels=DEPTH)
        table, predicted = pq.read_table(file).to_pydict(), pq.read_table(out, columns=["label_ids", "scores"])
    labels, queries = len(table["label"]), Table.open(DataLayout(arguments.data).queries(arguments.split), "queries")
    positives = list_column(queries.read(("label_ids",)), "label_ids")
    ranked = list_column(predicted, "label_ids")
    scores = list_column(predicted, "scores").entries
    places = np.arange(len(ranked.entries)) - np.repeat(ranked.offsets[:-1], ranked.counts)
    truth, given = matrix(positives, labels), matrix(ranked.keep(places < arguments.max_labels), labels)
    ids = [*map(str, range(labels))]
    expected = classification_report(truth, given, target_names=ids, output_dict=True, zero_division=0)
    names = {"precision": "precision", "recall": "recall", "F1": "f1-score", "support": "support"}
    differ = {}
    for name, of in names.items():
        factor = 1 if name == "support" else 100
        theirs = np.array([factor * expected[label][of] for label in ids])
        differ[name] = int((np.abs(theirs - np.array(table[name], float)) > 1e-9).sum())
    scored = sparse.csr_array((scores - scores.min() + 1, ranked.entries, ranked.offsets), shape=truth.shape).tocsc()
    by_label, compared, apart = truth.tocsc(), 0, 0
    for label in np.flatnonzero(np.array(table["support"])):
        own, of = by_label[:, [label]].toarray()[:, 0], scored[:, [label]].toarray()[:, 0]
        if of[own > 0].all():
            compared += 1
            apart += abs(100 * average_precision_score(own, of) - table["average_precision"][label]) > 1e-4
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


def timed(*names: str) -> dict[str, float]:
    """Measure the wall time of functions that the evaluation calls."""
    spent = dict.fromkeys(names, 0.0)
    for name in names:
        *owner, last = name.split(".")
        place = getattr(evaluation, owner[0]) if owner else evaluation
        inner = getattr(place, last)

        def outer(*arguments: Any, inner: Callable[..., Any] = inner, name: str = name) -> Any:
            began = time.perf_counter()
            try:
                return inner(*arguments)
            finally:
                spent[name] += time.perf_counter() - began

        setattr(place, last, outer)
    return spent


if __name__ == "__main__":
    main()
