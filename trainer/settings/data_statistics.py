"""Statistics of the training rows that determine automatic settings."""

import functools
from collections.abc import Sequence

import numpy as np

from schemas.arrow import DENSE_MODEL
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.shard_files.parquet import list_column
from schemas.shares import RowShare
from schemas.table import Table
from trainer.encoders.bag import count_ngrams
from trainer.evaluation.evaluate import label_statistics
from trainer.input_kinds import InputKind, input_names
from trainer.methods.sections import Data
from trainer.methods.settling import DataStatistics
from trainer.stream import open_queries

SAMPLED_ROWS = 200_000  # number of rows in which n-grams are counted
MOST_TEXTLESS = 0.01  # largest fraction of the trained labels that may lack a text, for recipes that encode texts
HEAPS = 0.7  # the number of distinct n-grams of n texts grows like n ** 0.7


def measure(
    data: DataLayout, split: str, part: RowShare, label_texts: bool, window: str | Sequence[str] = ""
) -> DataStatistics:
    """Measure `part` of `split`, or the parts of a version in `window`; with `label_texts`, labels count as points.

    Raises InputError, TableError.
    """
    named = window if isinstance(window, str) else tuple(window)
    return _measure(data, Table.open(data.root, "data").digest, split, part, label_texts, named)


@functools.lru_cache(maxsize=8)
def _measure(
    data: DataLayout, digest: str, split: str, part: RowShare, label_texts: bool, window: str | tuple[str, ...]
) -> DataStatistics:
    """Measure the data once per `digest`, because the data at this location may change."""
    queries, labels = open_queries(data, split), Table.open(data.labels, "labels")
    if window:
        queries = queries.of_parts(queries.choose_parts(window))
    rows = part.rows(queries)
    if not rows:
        raise InputError(f"{queries.url}: this split has no rows to train on.")
    training_data = Data(split=split, parts=window if isinstance(window, str) else list(window))
    frequency = label_statistics(data, training_data).frequency
    # Pairs, tokens and n-grams in SAMPLED_ROWS rows, from all parts of a version.
    has_tokens = "input_ids" in queries.columns
    columns = ["label_ids", *(["input_ids"] if has_tokens else [])]
    sampled = pairs = tokens = 0
    hashes = [np.empty(0, np.int64)]
    for group in part.batches(queries, columns, SAMPLED_ROWS):
        sampled += group.num_rows
        pairs += len(list_column(group, "label_ids").values)
        if has_tokens:
            texts = list_column(group, "input_ids")
            tokens += len(texts.values)
            vocabulary = int(texts.values.max(initial=0)) + 1
            ids = count_ngrams(texts, ngrams=2, vocabulary=vocabulary, buckets=1 << 31).ids
            hashes.append(ids[ids >= vocabulary] - vocabulary)  # hashes of the distinct bigrams of a text
    _, counts = np.unique(np.concatenate(hashes), return_counts=True)
    return DataStatistics(
        queries=rows,
        labels=labels.rows,
        pairs=round(pairs * rows / sampled),
        label_texts=labels.rows if label_texts else 0,
        ngrams=round(int((counts > 1).sum()) * (rows / sampled) ** HEAPS),
        tokens=tokens / sampled,
        median_frequency=float(np.median(frequency[frequency > 0])) if frequency.any() else 0.0,
    )


def describe_textless_labels(data: DataLayout, inputs: InputKind, rows: Data) -> tuple[str, bool]:
    """Describe the labels of training `rows` that have no text, or a text without tokens; "" if there are none.

    Also returns whether they are too many for a recipe that encodes texts. A dense vector counts as a text if `inputs`
    include it and no model computed it. Labels are read only if `extremis shard` counted some. Raises TableError.
    """
    table, parameters = Table.open(data.labels, "labels"), Table.open(data.root, "data").parameters
    own_vectors = "dense" in input_names(inputs) and DENSE_MODEL not in parameters
    if own_vectors or not table.manifest.counters.get("empty_texts"):  # an excerpt has no counters
        return "", False
    trained = label_statistics(data, rows).frequency > 0
    columns = [name for name in ("input_ids", "feature_ids") if name in table.columns]
    counts = [sum(list_column(group, name).counts for name in columns) for group in table.batches(columns)]
    empty, of = np.flatnonzero(trained & (np.concatenate(counts) == 0)), int(trained.sum())
    if not len(empty):
        return "", False
    (example,) = table.rows_at(empty[:1], ["key"])["key"].to_pylist()
    described = f"{len(empty):,} of the {of:,} trained labels have no text, for example {example!r}"
    return described, len(empty) > MOST_TEXTLESS * of
