"""The benchmark of the stream compares what it should: the same rows, whoever read them."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.common.joined_tables import LABELS, POSITIVES, JoinedTables
from benchmarks.common.peer_loaders import _of_arrays, _of_bytes, _of_lists, _open, _pieces, _records
from benchmarks.common.training_batch import TensorBatch, assemble, check, planner, to_tensors
from schemas.shard_files.parquet import list_column, matrix_column
from trainer.stream import JoinedStream


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> JoinedTables:
    tables = JoinedTables(str(tmp_path_factory.mktemp("tables")), 9_000, width=8, group=1024)
    tables.write()
    return tables


def batches(tables: JoinedTables) -> list[TensorBatch]:
    stream = JoinedStream([tables.open()], LABELS, batch=64, streams=4, plan=planner(tables.width))
    return [to_tensors(batch) for batch, _ in zip(stream, range(3), strict=False)]


def test_tables_hold_distinct_labels_a_row_in_the_order_of_the_pieces(tables: JoinedTables) -> None:
    points, mined = next(tables.pieces(4_000, 4_100))
    queries, negatives = (np.concatenate([_ids(file) for file in files]) for files in tables.files())
    np.testing.assert_array_equal(queries, np.arange(9_000))
    np.testing.assert_array_equal(negatives, queries)
    positives = list_column(points, "label_ids").values.reshape(-1, POSITIVES)
    labels = np.sort(np.hstack([positives, matrix_column(mined, "label_ids")]), axis=1)
    assert (np.diff(labels, axis=1) > 0).all()
    assert labels.min() >= 0
    assert labels.max() < LABELS


def test_batches_of_the_stream_pass(tables: JoinedTables) -> None:
    check(batches(tables), tables)


@pytest.mark.parametrize(
    "name", ["tokens", "input_ids", "lengths", "positives", "hard", "pair_label", "pair_positive", "pair_query", "ids"]
)
def test_a_batch_that_differs_is_refused(tables: JoinedTables, name: str) -> None:
    given = batches(tables)
    changed = given[1][name].clone()
    last = changed.view(-1)[-1].item()
    changed.view(-1)[-1] = not last if changed.dtype == torch.bool else last - 1
    given[1][name] = changed
    with pytest.raises(SystemExit, match="batch 1"):
        check(given, tables)


def test_a_row_that_comes_twice_is_refused(tables: JoinedTables) -> None:
    given = batches(tables)
    with pytest.raises(SystemExit, match="twice"):
        check([given[0], given[0]], tables)


def test_every_form_of_records_gives_the_same_batch(tables: JoinedTables) -> None:
    piece = next(_pieces(tables, 800))
    rows, records = zip(*_records(piece), strict=True)
    arrays = [[*column] for column in zip(*map(_open, records), strict=True)]
    given = [
        _of_bytes(list(rows), list(records)),
        _of_arrays(list(rows), *arrays),
        _of_lists(list(rows), *(piece[name].to_pylist() for name in ("input_ids", "label_ids", "hard"))),
        assemble(
            piece["query_id"].to_numpy(),
            list_column(piece, "input_ids"),
            list_column(piece, "label_ids"),
            np.array(piece["hard"].to_pylist(), np.int32),
        ),
    ]
    for one in given:
        check([one], tables)
        assert all(torch.equal(one[name], given[0][name]) for name in given[0])


def _ids(file: str) -> np.ndarray:
    assert Path(file).suffix == ".parquet"
    ids: np.ndarray = pq.read_table(file, columns=["query_id"])["query_id"].to_numpy()
    return ids
