"""A precision that is asked of an export, and what is met on held-out rows and on the rows of a split.

python -m benchmarks.precision_met --export EXPORT --data DATA --precisions 0.5,0.7,0.9
"""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from schemas.layout import DataLayout
from schemas.shard_files.parquet import filters_of, list_column
from schemas.table import Table
from scoring.decision import Decision
from scoring.exported import Exported
from scoring.prediction_files import rows_of_split
from scoring.words import hash_texts
from trainer.inputs import Inputs


def met(exported: Exported, data: str, split: str, precisions: Sequence[float]) -> list[dict[str, float]]:
    """Return for each of `precisions` that of the labels of `split`, its error between texts, recall, labels a text."""
    assert exported.calibration is not None, "an export with probabilities"
    lowest = [exported.calibration.precision.score_of(precision) for precision in precisions]
    decision, positives = Decision(precision=min(precisions)), 0
    rows_met, texts = list[np.ndarray](), list[np.ndarray]()
    labelled = Table.open(DataLayout(data).queries(split)).batches(["label_ids"])
    for rows, truth in zip(rows_of_split(exported, data, split)[0], labelled, strict=True):
        inputs, wanted = Inputs.of(rows, exported.serving.columns), list_column(truth, "label_ids")
        answer = exported.decide(inputs, decision, filters_of(rows))
        given = [(answer.ids >= 0) & (answer.scores >= np.float32(score)) for score in lowest]
        hits = wanted.contains(answer.ids)
        rows_met.append(np.array([[some.sum(1), (some & hits).sum(1)] for some in given]))
        texts.append(hash_texts(inputs))
        positives += len(wanted.entries)
    text = np.unique(np.concatenate(texts), return_inverse=True)[1]
    found = []
    for given_right in np.concatenate(rows_met, axis=2):
        n, h = (np.bincount(text, each) for each in given_right)
        share = h.sum() / max(1, n.sum())
        error = np.sqrt(((h - share * n) ** 2).sum()) / max(1, n.sum())
        of = {"precision": share, "error": error, "recall": h.sum() / positives}
        found.append({**of, "labels_per_text": n.sum() / len(text)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--precisions", default="0.5,0.7,0.9")
    arguments = parser.parse_args()
    exported = Exported.open(arguments.export)
    assert exported.calibration is not None, "an export with probabilities"
    curve, measured = exported.calibration.precision, dict[str, Any]()
    asked = [float(precision) for precision in arguments.precisions.split(",")]
    asked = [precision for precision in asked if precision <= curve.bounds[-1]]
    for precision, of in zip(asked, met(exported, arguments.data, arguments.split, asked), strict=True):
        place = int(np.searchsorted(curve.bounds, precision))
        held_out = {"score": curve.scores[place], "bound": curve.bounds[place], "precision": curve.shares[place]}
        apart = (of["precision"] - precision) / of["error"]
        measured[f"{precision:g}"] = {"held_out": held_out, arguments.split: of, "errors_above": apart}
    print(json.dumps({"texts": curve.texts, "highest": curve.bounds[-1], **measured}, indent=1))


if __name__ == "__main__":
    main()
