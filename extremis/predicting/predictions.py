"""Predictions of an exported run: rows that its encoder reads, ranked and written batch by batch."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from extremis.console import Bar
from extremis.model import token_column, tokenizer_of
from extremis.predicting.outputs import open_writer, prediction_table
from pipelines.formats.texts import Texts
from schemas import PAD
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.table import Table
from trainer.export.exported import Exported, iterate_ranked
from trainer.inputs import require_inputs
from trainer.stream import open_queries


def write_predictions(
    exported: Exported,
    rows: Iterator[pa.Table],
    out: str,
    *,
    k: int,
    threshold: float | None = None,
    to: str | None = None,
    safe_cells: bool = False,
    filter: bool = True,
    total: int | None = None,
) -> dict[str, Any]:
    """Write the best `k` labels of score `threshold` or more of every row, without the filter's pairs.

    `to`: the form of the file; None: by its name. `safe_cells`: no cell of a CSV begins as a formula does.
    Raises ExtremisError.
    """
    labels = exported.label_table(("key", "text"))
    done = predictions = 0
    began = time.perf_counter()
    with Bar("predict", total) as bar, open_writer(out, to, len(labels), safe_cells) as write:
        for table, scores, ids in iterate_ranked(exported.serving, rows, k, filter=filter):
            if threshold is not None:
                ids = np.where(scores >= threshold, ids, PAD)
            write(prediction_table(table["key"].combine_chunks(), ids, scores, labels))
            done += table.num_rows
            predictions += int((ids != PAD).sum())
            bar.update(done)
    seconds = time.perf_counter() - began
    counts = {"queries": done, "predictions": predictions, "seconds": round(seconds, 3)}
    return {"out": out, "export": exported.table.url, **counts}


def rows_of_texts(exported: Exported, texts: Texts, batch: int) -> Iterator[pa.Table]:
    """Yield texts with the columns that the encoder reads, `batch` rows at a time. Raises ExtremisError."""
    columns = exported.serving.model.columns
    tokenizer = tokenizer_of(exported) if "input_ids" in columns else None
    for rows in texts.batches(batch, "feature_ids" in columns):
        table = pa.Table.from_batches([rows])
        if tokenizer is not None:
            tokens = token_column(tokenizer, rows["text"].to_pylist(), exported.table.url)
            table = table.append_column("input_ids", tokens)
        yield table


def rows_of_split(exported: Exported, data: str, split: str) -> tuple[Iterator[pa.Table], int]:
    """Return the rows of a split of the DATA that the run was made from, row group by row group, and their number.

    Their predictions are those that `extremis evaluate` counts: the same batches, the same filter. Raises InputError,
    TableError, StorageError.
    """
    digest, trained = Table.open(data, "data").digest, exported.table.parents["data"]
    if digest != trained:
        raise InputError(
            f"{exported.table.url}: exported from a run on other data (digest {trained[:12]}…) than {data} "
            f"(digest {digest[:12]}…). Pass the data it was made from, or its texts as INPUT."
        )
    queries = open_queries(DataLayout(data), split)
    require_inputs(queries, exported.recipe.encoder.inputs)
    present = {column.name for column in queries.manifest.columns}
    columns = ["key", *exported.serving.model.columns, *({"filter_label_ids"} & present)]
    return queries.batches(columns), queries.rows
