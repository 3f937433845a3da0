"""Encoding of texts: parsed rows to the columns that a table keeps. No Beam here."""

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from pipelines.sharding import tokenizer
from pipelines.sharding.plan import TablePlan
from schemas.shard_files import parquet


def open_tokens(plan: TablePlan) -> Tokenizer | None:
    """Open the tokenizer of `plan`, None where no row has a text. Raises StorageError."""
    return None if plan.vocabulary is None else tokenizer.open_tokenizer(plan.tokenizer)


def encode(batch: pa.RecordBatch, plan: TablePlan, tokens: Tokenizer | None) -> pa.RecordBatch:
    """Return parsed rows with `input_ids` (unless they have features alone) and `truncated`."""
    rows = batch.num_rows
    if tokens is None:
        values, offsets, truncated = np.zeros(0, np.uint32), np.zeros(rows + 1, np.int64), np.zeros(rows, bool)
    else:
        values, offsets, truncated = tokenizer.encode(tokens, batch["text"].to_pylist())
    batch = batch.append_column("truncated", pa.array(truncated))
    if plan.tokens is not None:
        batch = batch.append_column("input_ids", parquet.list_array(values, offsets, plan.tokens))
    return batch
