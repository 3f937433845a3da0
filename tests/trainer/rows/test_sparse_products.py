"""Sparse products against dense ones: repeated and empty rows, any order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.rows import sparse_products
from trainer.rows.sparse_products import pair_scores, sparse_product, split_rows
from trainer.rows.torch_kernels import starts_of


def entries(rows: int, columns: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(0, rows, (count,), generator=generator)
    column = torch.randint(0, columns, (count,), generator=generator)
    return row, column, torch.randn(count, generator=generator, dtype=torch.float64)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_pair_scores_are_places_of_the_dense_product(queries: int, labels: int, data: st.DataObject) -> None:
    # Each pair once, as candidates have them.
    places = st.lists(st.integers(0, queries * labels - 1), unique=True).map(sorted)
    place = torch.tensor(data.draw(places), dtype=torch.int64)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x, w = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (queries, labels))
    # Labels of a query come in any order.
    place = place[torch.argsort(torch.rand(len(place), generator=generator))]
    query, order = torch.sort(place // labels, stable=True)
    label = (place % labels)[order]
    torch.testing.assert_close(pair_scores(x, w, query, label), (x @ w.T)[query, label])


@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 30), st.integers(0, 99))
def test_sparse_product_is_the_dense_one(rows: int, columns: int, count: int, seed: int) -> None:
    row, column, value = entries(rows, columns, count, seed)
    matrix = torch.zeros(rows, columns, dtype=torch.float64).index_put((row, column), value, accumulate=True)
    dense = torch.randn(columns, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    torch.testing.assert_close(sparse_product(row, column, value, rows, dense), matrix @ dense)


@given(st.integers(1, 6), st.integers(0, 400), st.booleans(), st.integers(1, 9), st.integers(0, 99))
def test_long_rows_are_summed_in_pieces_on_a_device(
    rows: int, count: int, ascending: bool, span: int, seed: int
) -> None:
    """Whatever rows are empty, or have most of the entries; no piece is longer than a span."""
    row, column, value = entries(rows, 40, count, seed)
    row[: count // 2] = rows - 1
    row = row.sort().values if ascending else row
    dense = torch.randn(40, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = sparse_product(row, column, value, rows, dense, ascending)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_products, "CPU", None)  # as if its memory were a device's
        patch.setattr(sparse_products, "SPAN", span)
        torch.testing.assert_close(sparse_product(row, column, value, rows, dense, ascending), expected)
        starts = starts_of(row.sort().values, rows).long()
        if pieces := split_rows(starts, count):
            cuts, firsts = pieces
            assert cuts.diff().max() <= span
            assert torch.equal(cuts[firsts], starts)


def test_the_same_product_twice_has_the_same_bits() -> None:
    row, column, value = entries(5, 40, 2000, 1)
    dense = torch.randn(40, 16, dtype=torch.float64)
    assert torch.equal(*(sparse_product(row, column, value, 5, dense) for _ in range(2)))
