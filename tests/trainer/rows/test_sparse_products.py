"""Sparse products against dense ones: repeated and empty rows, any order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.rows.sparse_products import pair_scores, sparse_product


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


def test_the_same_product_twice_has_the_same_bits() -> None:
    row, column, value = entries(5, 40, 2000, 1)
    dense = torch.randn(40, 16, dtype=torch.float64)
    assert torch.equal(*(sparse_product(row, column, value, 5, dense) for _ in range(2)))
