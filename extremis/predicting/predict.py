"""`extremis predict`: the best labels of texts, or of a split of DATA, by an exported run."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from extremis.console import Bar
from extremis.predicting.inputs import Texts
from extremis.predicting.outputs import open_writer, prediction_table
from pipelines.sharding.tokenizer import FILE, open_tokenizer
from pipelines.sharding.words import encode_whole
from schemas import PAD
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.shard_files import parquet
from schemas.shard_files.shards import iterate
from trainer.device import open_device
from trainer.export.exported import ENCODER, Exported, iterate_ranked, use_threads
from trainer.inputs import require_inputs
from trainer.stream import open_queries


@dataclass(frozen=True)
class PredictOptions:
    """Options of predictions: the best `k` labels of score `threshold` or more, without the filter's pairs.

    `to`: the form of the file; None: by its name. `safe_cells`: no cell of a CSV begins as a formula does.
    """

    k: int = 10
    to: str | None = None
    threshold: float | None = None
    filter: bool = True
    safe_cells: bool = False


def open_exported(url: str, exact: bool = False, threads: int | None = None, device: str = "auto") -> Exported:
    """Open the export at `url` on `device`, to be searched by `threads` threads.

    Raises InputError: no such device; TableError, StorageError.
    """
    exported = Exported.open(url, exact, open_device(device))
    use_threads(threads, bool(exported.serving.index))
    return exported


def predict_texts(exported: Exported, texts: Texts, batch: int, out: str, options: PredictOptions) -> dict[str, Any]:
    """Predict labels for every text, `batch` at a time, and write them to `out`. Raises ExtremisError."""
    return _predict(exported, _encoded(exported, texts, batch), None, out, options)


def predict_split(exported: Exported, data: str, split: str, out: str, options: PredictOptions) -> dict[str, Any]:
    """Predict for a split of the DATA that the run was made from, in its order, row group by row group.

    These are the predictions that `extremis evaluate` counts: the same batches, the same filter. Raises ExtremisError.
    """
    digest, trained = open_manifest(data, "data").digest, exported.manifest.parents["data"]
    if digest != trained:
        raise InputError(
            f"{exported.url}: exported from a run on other data (digest {trained[:12]}…) than {data} "
            f"(digest {digest[:12]}…). Pass the data it was made from, or its texts as INPUT."
        )
    queries = open_queries(DataLayout(data), split)
    require_inputs(queries.url, queries.manifest, exported.recipe.encoder.inputs)
    present = {column.name for column in queries.manifest.columns}
    columns = ["key", *exported.serving.model.columns, *({"filter_label_ids"} & present)]
    rows = iterate(queries.url, queries.manifest, columns)
    return _predict(exported, rows, queries.manifest.rows, out, options)


def _predict(
    exported: Exported, rows: Iterator[pa.Table], total: int | None, out: str, options: PredictOptions
) -> dict[str, Any]:
    labels = exported.label_table(("key", "text"))
    done = predictions = 0
    began = time.perf_counter()
    to = out, options.to, len(labels), options.safe_cells
    with Bar("predict", total) as bar, open_writer(*to) as write:
        for table, scores, ids in iterate_ranked(exported.serving, rows, options.k, filter=options.filter):
            if options.threshold is not None:
                ids = np.where(scores >= options.threshold, ids, PAD)
            write(prediction_table(table["key"].combine_chunks(), ids, scores, labels))
            done += table.num_rows
            predictions += int((ids != PAD).sum())
            bar.update(done)
    seconds = time.perf_counter() - began
    counts = {"queries": done, "predictions": predictions, "seconds": round(seconds, 3)}
    return {"out": out, "export": exported.url, **counts}


def tokenizer_of(exported: Exported) -> Tokenizer:
    """Open the tokenizer of an export whose encoder reads tokens."""
    place = exported.files.folder / ENCODER / FILE
    return open_tokenizer(place.read_bytes(), str(place))


def token_column(tokenizer: Tokenizer, texts: Sequence[str], url: str) -> pa.ListArray:
    """Return the column `input_ids` of `texts`, for the export at `url`. Raises InputError."""
    values, offsets, _ = encode_whole(tokenizer, texts, f"of {url}")
    return parquet.list_array(values, offsets, pa.uint32())


def _encoded(exported: Exported, texts: Texts, batch: int) -> Iterator[pa.Table]:
    """Yield rows with the columns that the encoder reads."""
    columns = exported.serving.model.columns
    tokenizer = tokenizer_of(exported) if "input_ids" in columns else None
    for rows in texts.batches(batch, "feature_ids" in columns):
        table = pa.Table.from_batches([rows])
        if tokenizer is not None:
            table = table.append_column("input_ids", token_column(tokenizer, rows["text"].to_pylist(), exported.url))
        yield table
