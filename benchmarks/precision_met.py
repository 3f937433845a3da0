"""A precision that is asked of an export, and what is met on held-out rows and on the rows of a split.

python -m benchmarks.precision_met --export EXPORT --data DATA --precisions 0.5,0.7,0.9
"""

import argparse
import json
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


def met(exported: Exported, data: str, split: str, precision: float) -> dict[str, float]:
    """Return the precision of the labels of `split`, its standard error between texts, recall, and labels per text."""
    decision, positives = Decision(precision=precision), 0
    given, right, texts = (list[np.ndarray]() for _ in range(3))
    labelled = Table.open(DataLayout(data).queries(split)).batches(["label_ids"])
    for rows, truth in zip(rows_of_split(exported, data, split)[0], labelled, strict=True):
        inputs, wanted = Inputs.of(rows, exported.serving.columns), list_column(truth, "label_ids")
        ids = exported.decide(inputs, decision, filters_of(rows)).ids
        given.append((ids >= 0).sum(1))
        right.append(wanted.contains(ids).sum(1))
        texts.append(hash_texts(inputs))
        positives += len(wanted.entries)
    text = np.unique(np.concatenate(texts), return_inverse=True)[1]
    n, h = (np.bincount(text, np.concatenate(each)) for each in (given, right))
    share = h.sum() / max(1, n.sum())
    error = np.sqrt(((h - share * n) ** 2).sum()) / max(1, n.sum())
    of = {"precision": share, "error": error, "recall": h.sum() / positives}
    return {**of, "labels_per_text": n.sum() / len(np.concatenate(given))}


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
    for precision in map(float, arguments.precisions.split(",")):
        if precision > curve.bounds[-1]:
            measured[f"{precision:g}"] = {"highest": float(curve.bounds[-1])}
            continue
        place = int(np.searchsorted(curve.bounds, precision))
        of = met(exported, arguments.data, arguments.split, precision)
        held_out = {"score": curve.scores[place], "bound": curve.bounds[place], "precision": curve.shares[place]}
        apart = (of["precision"] - precision) / of["error"]
        measured[f"{precision:g}"] = {"held_out": held_out, arguments.split: of, "errors_above": apart}
    print(json.dumps({"texts": curve.texts, **measured}, indent=1))


if __name__ == "__main__":
    main()
