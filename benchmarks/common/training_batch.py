"""A batch as a loss needs it, equal for every reader of the rows, and a check of batches against the tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from benchmarks.common.joined_tables import LABELS, JoinedTables
from schemas.ragged import Ragged
from trainer.device import as_tensor
from trainer.inputs import Inputs
from trainer.methods.astra import Negatives
from trainer.negatives.planner import Planner
from trainer.stream import Batch

SIZE = 512
POOL = 2_000
SEED = 0

TensorBatch = dict[str, torch.Tensor]


def planner(width: int, labels: int = LABELS) -> Planner:
    """Return a planner of candidates with a shared pool of POOL random labels and all `width` hard negatives."""
    return Planner(Negatives(random=POOL, hard=width), labels, SEED)


def warm_up(width: int) -> None:
    """Compile the kernels."""
    pair = np.array([0, 1])
    assemble(pair[:1], (np.ones(1, np.uint16), pair), (np.ones(1, np.int32), pair), np.zeros((1, width), np.int32))


def to_tensors(batch: Batch) -> TensorBatch:
    """Return tensors for a device: tokens with offsets and padded, positives, hard negatives, candidates, the mask."""
    tokens, candidates = batch.inputs.tokens, batch.candidates
    assert tokens is not None
    assert candidates is not None
    padded = batch.padded()
    arrays = {
        "rows": batch.rows,
        "tokens": tokens.values,
        "token_offsets": tokens.offsets,
        "input_ids": padded.input_ids,
        "lengths": padded.lengths,
        "positives": batch.positives,
        "positive_offsets": batch.positive_offsets,
        "hard": batch.hard,
        **candidates._asdict(),
    }
    return {name: as_tensor(array) for name, array in arrays.items() if array is not None}


def assemble(
    rows: np.ndarray,
    tokens: tuple[np.ndarray, np.ndarray],
    positives: tuple[np.ndarray, np.ndarray],
    hard: np.ndarray,
) -> TensorBatch:
    """Return a batch from another library's columns: `rows` [B], values and offsets of two lists, `hard` [B, K]."""
    batch = Batch(0, int(rows[0]), rows, Inputs(Ragged(*tokens)), *positives, hard)
    return to_tensors(replace(batch, candidates=planner(hard.shape[1])(batch)))


def check(batches: Sequence[TensorBatch], tables: JoinedTables) -> None:
    """Compare batches with the tables' rows. Raises SystemExit, which names the first difference."""
    rows = np.concatenate([batch["rows"].numpy() for batch in batches])
    if len(np.unique(rows)) != len(rows):
        raise SystemExit("a row comes twice")
    table = _rows_of(tables, rows)
    starts = np.cumsum([0, *map(len, (batch["rows"] for batch in batches))])
    for number, batch in enumerate(batches):
        arrays = {name: tensor.numpy() for name, tensor in batch.items()}
        for name, expected in _expected(table.slice(starts[number], len(arrays["rows"]))).items():
            if not np.array_equal(arrays[name], expected):
                raise SystemExit(f"batch {number}: {name} is not what the tables hold for its rows")
        _check_candidates(number, arrays)


def _rows_of(tables: JoinedTables, rows: np.ndarray) -> pa.Table:
    """Read `rows` of both tables in this order, with only Arrow."""
    columns_of = {"queries": ["query_id", "input_ids", "label_ids"], "negatives": ["query_id", "label_ids"]}
    parts = []
    for (name, columns), files in zip(columns_of.items(), tables.files(), strict=True):
        ids, held = pa.array(rows), []
        for file in files:
            table = pq.read_table(file, columns=columns, use_threads=False)
            held.append(table.filter(pc.is_in(table["query_id"], ids)))
        table = pa.concat_tables(held).combine_chunks()
        if table.num_rows != len(rows):
            raise SystemExit(f"{len(rows)} rows were asked for, {table.num_rows} are in {name}")
        parts.append(table.take(pc.index_in(ids, table["query_id"])))
    return parts[0].append_column("hard", parts[1]["label_ids"]).combine_chunks()


def _expected(rows: pa.Table) -> dict[str, np.ndarray]:
    """Build the columns of a batch one row at a time."""
    tokens, positives = rows["input_ids"].to_pylist(), rows["label_ids"].to_pylist()
    lengths = np.array([len(row) for row in tokens])
    return {
        "tokens": np.concatenate(tokens),
        "lengths": lengths,
        "token_offsets": np.concatenate([[0], np.cumsum(lengths)]),
        "input_ids": np.array([[*row, *[0] * (lengths.max() - len(row))] for row in tokens]),
        "positives": np.concatenate(positives),
        "positive_offsets": np.concatenate([[0], np.cumsum([len(row) for row in positives])]),
        "hard": np.array(rows["hard"].to_pylist()),
    }


def _check_candidates(number: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Check that each query has each of its positives and hard negatives once, and that ids are unique."""
    offsets = arrays["positive_offsets"]
    expected = []
    for query in range(len(arrays["rows"])):
        positives = arrays["positives"][offsets[query] : offsets[query + 1]]
        expected += [(query, label, True) for label in positives.tolist()]
        expected += [(query, label, False) for label in arrays["hard"][query].tolist()]
    labels = arrays["ids"][arrays["pair_label"]]
    pairs = zip(arrays["pair_query"].tolist(), labels.tolist(), arrays["pair_positive"].tolist(), strict=True)
    if sorted(pairs) != sorted(expected):
        raise SystemExit(f"batch {number}: its candidates are not its positives and hard negatives")
    if len(np.unique(arrays["ids"])) != len(arrays["ids"]) or len(arrays["pool_weight"]) > POOL:
        raise SystemExit(f"batch {number}: its candidate ids are not unique, or its pool is larger than {POOL}")
