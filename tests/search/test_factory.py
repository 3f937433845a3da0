"""What `auto` stands for: exact search where it is cheap, inverted lists where they pay."""

import pytest

from search.index import Factory, choose, list_factories


@pytest.mark.parametrize("exact_rows", [1 << 15, 1 << 17])
def test_without_prices_a_number_of_vectors_decides(exact_rows: int) -> None:
    assert choose("auto", exact_rows, exact_rows).exact
    more = exact_rows + 1
    assert choose("auto", more, exact_rows).spec == f"IVF{int(4 * more**0.5)},Flat"
    assert choose(" IVF7,Flat,RFlat", 1, exact_rows).spec == "IVF7,Flat"


def test_with_prices_the_cheapest_that_can_be_is_chosen() -> None:
    specs = [factory.spec for factory in list_factories(10, 10_000)]
    assert specs[:3] == ["exact", "IVF100,Flat", "IVF100,PQ5x4fs"]

    def price(factory: Factory) -> float | None:
        return None if factory.exact else 1.0 + (factory.lists == 100)

    # Of equal prices the first by name.
    assert choose("auto", 10_000, price=price, dimension=10).spec == min(s for s in specs if s not in specs[:3])
    assert choose("exact", 10_000, price=price, dimension=10).exact


@pytest.mark.parametrize("spec", ["IVF400,Flat", "IVF400,PQ32x4fs"])
def test_lists_pay_where_few_are_read(spec: str) -> None:
    factory = Factory(spec)
    assert factory.saves_time(100_000, 50, 4, 64)
    assert not factory.saves_time(100_000, 50, 400, 64) or factory.lossy
    costs = [factory.query_cost(100_000, 50, nprobe, 64) for nprobe in (1, 10, 100, 400)]
    assert costs == sorted(costs)
    assert factory.saves_time(100_000, 50, None, 64)  # no lists were tuned
    assert Factory("exact").cost(1000, 2, 10, 5, None, 64) == 2 * 10 * 1000 * 64
