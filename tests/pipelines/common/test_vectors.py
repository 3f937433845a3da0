import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.mining.inputs import block_bounds, read_block
from schemas.errors import TableError
from schemas.table import Table
from tests.pipelines.mining.world import random_world


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_blocks_cover_every_label_once_and_are_even(labels, block_rows):
    (bounds,) = block_bounds(labels, 1, block_rows)
    sizes = [stop - start for start, stop in bounds]
    assert [label for start, stop in bounds for label in (start, stop)][1:-1:2] == [start for start, _ in bounds[1:]]
    assert (bounds[0][0], bounds[-1][1]) == (0, labels)
    assert max(sizes) <= block_rows
    assert max(sizes) - min(sizes) <= 1
    assert len(bounds) == -(-labels // block_rows)


@given(st.data())
def test_a_block_is_read_across_shards_and_row_groups(data):
    world = random_world("memory://blocks", 4, data.draw(st.integers(1, 60)), 3, shards=data.draw(st.integers(1, 4)))
    world.row_group_rows = data.draw(st.integers(1, 20))
    labels = len(world.vectors)
    world.write_vectors(["queries"])
    vectors = Table.open(world.layout.vectors(world.epoch))
    start = data.draw(st.integers(0, labels - 1))
    stop = data.draw(st.integers(start + 1, labels))
    block = read_block(vectors, start, stop, 4)
    assert block.dtype == np.float32
    assert (block[:, :3] == world.vectors[start:stop]).all()
    assert (block[:, 3] == 0).all()
    plain = read_block(vectors, start, stop, 4, drop_bias=True)
    assert (plain[:, :2] == world.vectors[start:stop, :2]).all()
    assert (plain[:, 2:] == 0).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_are_refused_by_row(tmp_path, value):
    world = random_world(str(tmp_path), 4, 30, 3)
    world.vectors[21, 1] = value
    world.write_vectors(["queries"])
    vectors = Table.open(world.layout.vectors(world.epoch))
    assert read_block(vectors, 0, 21, 3).shape == (21, 3)
    with pytest.raises(TableError, match=r"vectors: the vector of row 21 is not finite.*diverged"):
        read_block(vectors, 5, 25, 3)
