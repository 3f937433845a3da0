from functools import partial

import numpy as np
import pytest

from scoring.plans import code_factories, weigh
from search.index import Factory, Lift, build
from search.topk import Block, search_exactly, search_index, unpack


def vectors(rows, dimension, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, dimension)).astype(np.float32)


@pytest.mark.parametrize("batch", [1, 512])
@pytest.mark.parametrize("target", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("bias", [0.0, -30.0])
def test_the_way_that_is_chosen_has_the_recall_and_the_least_cost_of_those_tried(batch, target, bias):
    centres, queries = vectors(60, 8), vectors(100, 8, seed=1)
    rows = centres.repeat(50, axis=0) + 0.2 * vectors(3000, 8, seed=2) + np.float32(bias)
    ways = [Factory("exact"), Factory("IVF64,Flat"), *code_factories(8)]
    block = Block(0, rows)

    def make(factory):
        return build(factory, rows, 0, Lift.of(rows, queries) if factory.lists else None)

    (factory, index, params), plans = weigh(block, ways, make, queries, 10, target, batch)
    assert {plan.factory for plan in plans} == {way.spec for way in ways}
    assert all(plan.microseconds > 0 and plan.bytes > 0 for plan in plans)
    recalls = {plan.factory: plan.recall for plan in plans}
    assert recalls[factory.spec] >= target
    exact = unpack(search_exactly(block, queries, 10))[0]
    found = exact if index is None else unpack(search_index(Block(0, rows, index), queries, 10, params.factor)[0])[0]
    share = np.mean([len({*ours} & {*best}) / 10 for ours, best in zip(found, exact, strict=True)])
    assert share == pytest.approx(recalls[factory.spec], abs=1e-3)
    (none, *_), _ = weigh(block, code_factories(8), partial(build, vectors=rows, seed=0), queries, 10, 1.1, batch)
    assert none is None
