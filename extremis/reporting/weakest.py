"""Queries and labels that a run does worst, as text."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from extremis.inspecting.decode_text import TextDecoder
from extremis.inspecting.examples import LONGEST_LABEL, read_examples, splits_of
from extremis.reporting.headline import evaluated_splits
from extremis.reporting.run_records import Run
from schemas.layout import DataLayout

LONGEST = 160  # characters of a query


def weakest_rows(runs: Sequence[Run], split: str) -> np.ndarray:
    """Return the rows of the weakest queries of all runs on a split, int64 ascending."""
    bodies = (run.evaluations.get(split, {}).get("weakest", {}) for run in runs)
    return np.unique(np.asarray([row for body in bodies for row, _, _ in body.get("queries", [])], np.int64))


def weakest(data: DataLayout, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return {"run", "split", "k", "queries": rows, "labels": rows} for each evaluation that has them, test first.

    A query is {"row", "key", "text", "found", "positives"}, a label {"text", "found", "queries"}. Raises TableError.
    """
    decoder, tables = TextDecoder(data), []
    for split in (split for split in evaluated_splits(runs) if split in splits_of(data)):
        for run in (run for run in runs if run.evaluations.get(split, {}).get("weakest")):
            body = run.evaluations[split]["weakest"]
            rows = np.asarray(sorted(row for row, _, _ in body["queries"]), np.int64)
            examples = {example.row: example for example in read_examples(data, split, rows, decoder, None)}
            names = decoder.labels((label for label, _, _ in body["labels"]), LONGEST_LABEL)
            queries = [
                {
                    "row": row,
                    "key": examples[row].key,
                    "text": examples[row].text[:LONGEST],
                    "found": hits,
                    "positives": n,
                }
                for row, hits, n in body["queries"]
            ]
            labels = [{"text": names[label], "found": hits, "queries": n} for label, hits, n in body["labels"]]
            tables.append({"run": run.name, "split": split, "k": body["k"], "queries": queries, "labels": labels})
    return tables
