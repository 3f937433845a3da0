"""Exact search by PyTorch gives the keys of exact search on a CPU, to the bit, ties too; `cpu:0` takes its way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InputError
from schemas.ragged import Ragged
from search.block import Block, search_exactly
from search.exclusions import Exclusions, start_search
from search.nearest import find_device

DEVICE = "cpu:0"


@given(st.integers(1, 300), st.integers(1, 30), st.integers(1, 12), st.booleans(), st.integers(0, 99))
def test_keys_are_those_of_a_cpu(rows: int, queries: int, width: int, ties: bool, seed: int) -> None:
    draw = np.random.default_rng(seed)
    vectors, x = (draw.standard_normal((count, 8)).astype(np.float32) for count in (rows, queries))
    if ties:
        vectors, x = np.round(vectors), np.round(x)
    here, there = Block(5, vectors), Block(5, vectors, None, DEVICE)
    np.testing.assert_array_equal(search_exactly(there, x, width), search_exactly(here, x, width))
    positives = Ragged.from_matrix(draw.integers(5, 5 + rows, (queries, 2)))
    exclusions = Exclusions(positives, Ragged.empty(queries), Ragged.empty(queries))
    expected = start_search(here, x, exclusions, width)()
    np.testing.assert_array_equal(start_search(there, x, exclusions, width)(), expected)


def test_a_device_that_is_not_there_is_refused() -> None:
    assert find_device("cpu") == "cpu"
    with pytest.raises(InputError, match="cuda:99"):
        find_device("cuda:99")
