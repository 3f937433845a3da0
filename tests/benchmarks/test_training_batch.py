"""The benchmark of the stream compares what it should: the same rows, whoever read them."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.common.joined_tables import LABELS, POSITIVES, World
from benchmarks.common.stock_loaders import _of_arrays, _of_bytes, _of_lists, _open, _pieces, _records
from benchmarks.common.training_batch import Ready, assemble, check, planner, ready
from schemas.shard_files.parquet import list_column, matrix_column
from trainer.stream import JoinedStream


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(str(tmp_path_factory.mktemp("world")), 9_000, width=8, group=1024)
    world.write()
    return world


def batches(world: World) -> list[Ready]:
    stream = JoinedStream([world.open()], LABELS, batch=64, streams=4, plan=planner(world.width))
    return [ready(batch) for batch, _ in zip(stream, range(3), strict=False)]


def test_tables_hold_distinct_labels_a_row_in_the_order_of_the_pieces(world: World) -> None:
    points, mined = next(world.pieces(4_000, 4_100))
    queries, negatives = (np.concatenate([_ids(file) for file in files]) for files in world.files())
    np.testing.assert_array_equal(queries, np.arange(9_000))
    np.testing.assert_array_equal(negatives, queries)
    positives = list_column(points, "label_ids").values.reshape(-1, POSITIVES)
    labels = np.sort(np.hstack([positives, matrix_column(mined, "label_ids")]), axis=1)
    assert (np.diff(labels, axis=1) > 0).all()
    assert labels.min() >= 0
    assert labels.max() < LABELS


def test_batches_of_the_stream_pass(world: World) -> None:
    check(batches(world), world)


@pytest.mark.parametrize(
    "name", ["tokens", "input_ids", "lengths", "positives", "hard", "pair_label", "pair_positive", "pair_query", "ids"]
)
def test_a_batch_that_differs_is_refused(world: World, name: str) -> None:
    given = batches(world)
    changed = given[1][name].clone()
    last = changed.view(-1)[-1].item()
    changed.view(-1)[-1] = not last if changed.dtype == torch.bool else last - 1
    given[1][name] = changed
    with pytest.raises(SystemExit, match="batch 1"):
        check(given, world)


def test_a_row_that_comes_twice_is_refused(world: World) -> None:
    given = batches(world)
    with pytest.raises(SystemExit, match="twice"):
        check([given[0], given[0]], world)


def test_every_form_of_records_gives_the_same_batch(world: World) -> None:
    piece = next(_pieces(world, 800))
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
        check([one], world)
        assert all(torch.equal(one[name], given[0][name]) for name in given[0])


def _ids(file: str) -> np.ndarray:
    assert Path(file).suffix == ".parquet"
    ids: np.ndarray = pq.read_table(file, columns=["query_id"])["query_id"].to_numpy()
    return ids
