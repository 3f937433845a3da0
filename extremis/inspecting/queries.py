"""Description of queries: their texts, positives, and the hard negatives of a run."""

from typing import Any

import numpy as np

from extremis.console import results
from extremis.inspecting.decode_text import TextDecoder
from extremis.inspecting.examples import (
    LONGEST_LABEL,
    Example,
    find_query,
    read_examples,
    splits_of,
)
from schemas.layout import DataLayout, RunLayout
from schemas.table import Table


def inspect_queries(
    data: DataLayout, rows: int, split: str | None, key: str | None = None, run: RunLayout | None = None
) -> dict[str, Any]:
    """Print the query of `key`, or the first `rows` of a split, with the negatives of `run`.

    Returns {"queries": [...]}, or {} where DATA has no split or `rows` is 0. Raises InputError, TableError.
    """
    decoder = TextDecoder(data)
    if key is not None:
        name, numbers = find_query(data, key, split)
    else:
        splits = splits_of(data, split)
        if not splits or rows == 0:
            return {}
        name = splits[0]
        numbers = np.arange(min(rows, Table.open(data.queries(name), "queries").rows))
    examples = read_examples(data, name, numbers, decoder, run)
    texts = decoder.labels((label for example in examples for label in example.label_ids), LONGEST_LABEL)
    for example in examples:
        _print(example, texts, run)
    return {"queries": [_describe(example, texts) for example in examples]}


def _print(example: Example, texts: dict[int, str], run: RunLayout | None) -> None:
    lines = [f"  {example.text}"]
    lines += [f"  + {texts.get(label, label)}  [{label}]" for label in example.positives]
    lines += [f"  - {texts.get(label, label)}  [{label}] {score:.3f}" for label, score in example.negatives]
    if run is not None and not example.negatives:
        lines.append(f"  no table of {run.root} is joined to the split {example.split}")
    results.print(f"{example.split} row {example.row}, key {example.key}", style="bold")
    for line in lines:
        results.print(line)


def _describe(example: Example, texts: dict[int, str]) -> dict[str, Any]:
    facts = {"split": example.split, "query_id": example.row, "key": example.key, "text": example.text}
    positives = [{"label_id": label, "text": texts.get(label, "")} for label in example.positives]
    negatives = [
        {"label_id": label, "text": texts.get(label, ""), "score": score} for label, score in example.negatives
    ]
    return {**facts, "positives": positives, "negatives": negatives}
