"""Laws of the stream of examples: what it deals is what the table and DATA say, once, whoever deals it."""

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from schemas.errors import InputError, TableError
from schemas.table import Table
from scoring.tuples import TupleStream
from tests.builders import build_data, build_negatives
from tests.laws import assert_exact_resume
from tests.scoring.tuples.world import World, build, expected, frozen

FORMS = ["triplets", "tuples", "pairs", "lists", "tevatron", "flagembedding"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("tuples") / "mined")


def open_stream(world: World, **options: object) -> TupleStream:
    return TupleStream(world.root, **{"batch": 16, "threads": 0, **options})


@settings(max_examples=20)
@given(form=st.sampled_from(FORMS), n=st.integers(1, 5), seed=st.integers(0, 9), batch=st.sampled_from([8, 24, 64]))
def test_an_epoch_has_each_example_once(world: World, form: str, n: int, seed: int, batch: int) -> None:
    options = {"form": form, "negatives": n, "seed": seed, "batch": batch}
    stream = open_stream(world, each_positive=True, **options)
    dealt = list(stream)
    assert Counter(map(frozen, dealt)) == expected(world, form, n)
    assert len(dealt) == len(stream)
    assert list(stream) == []  # until the next epoch
    one = list(open_stream(world, **options))
    assert not Counter(map(frozen, one)) - expected(world, form, n)
    if form in ("tuples", "lists"):
        rows = [
            row
            for row, some in enumerate(world.positives)
            if some and len(world.found(row)) >= (n if form == "tuples" else 1)
        ]
        assert sorted(example["anchor"] for example in one) == sorted(world.queries[row] for row in rows)


def test_another_epoch_has_another_order_and_in_time_every_positive(world: World) -> None:
    stream, seen = open_stream(world, form="lists"), set()
    orders = []
    for epoch in range(40):
        stream.set_epoch(epoch)
        dealt = list(stream)
        orders.append([example["anchor"] for example in dealt])
        seen |= {(example["anchor"], example["documents"][0]) for example in dealt}
    assert orders[0] != orders[1]
    assert {frozenset(order) for order in orders} == {frozenset(orders[0])}
    rows = [row for row, some in enumerate(world.positives) if some and world.found(row)]
    assert seen == {(world.queries[row], world.labels[label]) for row in rows for label in world.positives[row]}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("tuples") / "mined", rows=20, width=2)


@given(form=st.sampled_from(FORMS), each=st.booleans(), epoch=st.integers(0, 3), threads=st.integers(0, 1))
@settings(max_examples=4)
def test_what_resumes_goes_on_as_if_it_had_not_stopped(
    small: World, form: str, each: bool, epoch: int, threads: int
) -> None:
    def make() -> TupleStream:
        stream = open_stream(small, form=form, each_positive=each, batch=8, threads=threads)
        stream.set_epoch(epoch)
        return stream

    assert assert_exact_resume(make)


@given(ranks=st.sampled_from([1, 2, 4, 8]), form=st.sampled_from(FORMS), batch=st.sampled_from([8, 40]))
@settings(max_examples=12)
def test_ranks_have_shares_that_are_all(world: World, ranks: int, form: str, batch: int) -> None:
    options = {"form": form, "each_positive": True, "batch": batch}
    parts = [list(open_stream(world, rank=rank, ranks=ranks, **options)) for rank in range(ranks)]
    together = Counter(frozen(example) for part in parts for example in part)
    assert together == Counter(map(frozen, open_stream(world, **options)))


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_of_ranks_have_shares_that_are_all(world: World, workers: int) -> None:
    whole = open_stream(world, form="pairs", each_positive=True, batch=8)
    dealt = []
    for rank in range(2):
        stream = open_stream(world, form="pairs", each_positive=True, batch=8, rank=rank, ranks=2)
        loader = DataLoader(stream, batch_size=None, num_workers=workers, persistent_workers=True)
        for epoch in (0, 1):
            stream.set_epoch(epoch)
            dealt += [(epoch, frozen(example)) for example in loader]
    expected_once = []
    for epoch in (0, 1):
        whole.set_epoch(epoch)
        expected_once += [(epoch, frozen(example)) for example in whole]
    assert Counter(dealt) == Counter(expected_once)


@pytest.mark.parametrize("stop", [3, 17])
def test_workers_go_on_by_the_state_of_their_loader(world: World, stop: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def make() -> Any:
        return torchdata.StatefulDataLoader(
            open_stream(world, form="triplets", negatives=3), batch_size=4, num_workers=2
        )

    loader = make()
    batches = iter(loader)
    for _ in range(stop):
        next(batches)
    state = loader.state_dict()
    rest = list(batches)
    resumed = make()
    resumed.load_state_dict(state)
    assert list(resumed) == rest


def test_a_state_goes_on_with_workers_too(world: World) -> None:
    stream = open_stream(world, form="pairs", each_positive=True)
    dealing = iter(stream)
    for _ in range(21):
        next(dealing)
    state = stream.state_dict()
    rest = Counter(map(frozen, dealing))
    resumed = open_stream(world, form="pairs", each_positive=True)
    resumed.load_state_dict(state)
    loader = DataLoader(resumed, batch_size=None, num_workers=2)
    assert Counter(map(frozen, loader)) == rest


def test_a_copy_deals_the_same(world: World) -> None:
    stream = open_stream(world)
    assert list(pickle.loads(pickle.dumps(stream))) == list(stream)


def test_an_epoch_may_bring_another_table(world: World, tmp_path: Path) -> None:
    other = build(tmp_path / "mined", seed=1)
    stream = open_stream(world, form="lists", negatives=2)
    stream.set_epoch(1, other.root)
    assert not Counter(map(frozen, stream)) - expected(other, "lists", 2)
    assert len(stream) == sum(bool(some and other.found(row)) for row, some in enumerate(other.positives))


@pytest.mark.parametrize("form", FORMS[:-2])
def test_scores_are_those_of_the_search(world: World, form: str) -> None:
    places = {text: label for label, text in enumerate(world.labels)}
    rows = {text: row for row, text in enumerate(world.queries)}

    def score(row: int, label: int) -> float:
        found = world.positives[row]
        if label in found:
            return world.positive_scores[row][found.index(label)]
        return float(world.scores[row, world.negatives[row].tolist().index(label)])

    for example in open_stream(world, form=form, scores="search", negatives=3):
        row = rows[example.pop("anchor")]
        got = example.pop("scores", None) or [example.pop("score")]
        texts = example["documents"] if form == "lists" else list(example.values())
        np.testing.assert_allclose(got, [score(row, places[text]) for text in texts], rtol=1e-3)


def test_scores_of_flagembedding(world: World) -> None:
    for example in open_stream(world, form="flagembedding", scores="search"):
        row = world.queries.index(example["query"])
        np.testing.assert_allclose(example["pos_scores"], world.positive_scores[row], rtol=1e-5)
        found = world.scores[row][: len(example["neg"])].astype(np.float32)
        np.testing.assert_array_equal(np.float32(example["neg_scores"]), found)


def test_a_teacher_has_scored_negatives_alone(world: World) -> None:
    for example in open_stream(world, form="lists", scores="teacher", negatives=2):
        first, *others = example["scores"]
        assert first is None
        found = world.scores[world.queries.index(example["anchor"])][: len(others)].astype(np.float32)
        np.testing.assert_allclose(others, 2 * found, rtol=1e-3)


def test_negatives_of_several_label_ranges_are_the_best_of_all(tmp_path: Path) -> None:
    several = build(tmp_path / "mined", ranges=2)
    assert Counter(map(frozen, open_stream(several, negatives=2, each_positive=True))) == expected(several, "tuples", 2)


def test_keys_stand_in_for_texts(world: World) -> None:
    for example in open_stream(world, form="tuples", keys=True, negatives=2):
        row = int(example["anchor"][1:])
        assert int(example["positive"][1:]) in world.positives[row]
        assert [int(example[f"negative_{i}"][1:]) for i in (1, 2)] == world.found(row)[:2]


def test_a_table_and_its_data_are_opened_by_name_and_a_run_by_its_newest(world: World) -> None:
    assert list(TupleStream(world.table, world.data)) == list(TupleStream(world.root))


class TestRefusals:
    def refused(self, *places: object, match: str, kind: type[Exception] = InputError, **options: object) -> None:
        with pytest.raises(kind, match=match):
            list(TupleStream(*map(str, places), **options))

    def test_no_table(self, world: World, tmp_path: Path) -> None:
        self.refused(tmp_path / "nowhere", match="no table here", kind=TableError)
        self.refused(world.data, match="expected a table of kind negatives, got data", kind=TableError)
        self.refused(world.table, match="give the DATA that this table was mined from")

    def test_other_data(self, world: World, tmp_path: Path) -> None:
        other = build(tmp_path / "mined", seed=1)
        self.refused(
            world.table,
            other.data,
            match=r"not mined from the queries of .*mined/data \(train\)",
            kind=TableError,
        )
        self.refused(world.table, tmp_path / "nowhere", match="no table here", kind=TableError)

    def test_no_texts(self, tmp_path: Path) -> None:
        data = build_data(str(tmp_path / "data"))
        queries = Table.open(data.layout.queries("train")).manifest
        build_negatives(str(tmp_path / "table"), queries, data.points["train"].positives, data.labels, 4)
        places = tmp_path / "table", tmp_path / "data"
        self.refused(*places, match="have no texts. Shard the data again with keep_text=True, or give keys=True")
        assert list(TupleStream(*map(str, places), keys=True, negatives=1))
        self.refused(*places, match="no teacher has scored", scores="teacher", keys=True)

    def test_more_than_there_is(self, world: World) -> None:
        self.refused(world.root, match=r"negatives=6: .*queries has 5 negatives per row", negatives=6)
        self.refused(world.root, match="form: expected 'triplets'", form="quartets")
        self.refused(world.table, world.data, match="only in the output of mining arrays", scores="search")

    def test_a_state_of_others(self, world: World, tmp_path: Path) -> None:
        state = open_stream(world).state_dict()
        for other in (open_stream(world, negatives=2), open_stream(world, seed=1), open_stream(world, batch=8)):
            with pytest.raises(InputError, match="cannot resume"):
                other.load_state_dict(state)
        with pytest.raises(InputError, match="cannot resume the stream: tables was"):
            open_stream(build(tmp_path / "mined", seed=1)).load_state_dict(state)

    def test_no_example(self, tmp_path: Path) -> None:
        worlds = (build(tmp_path / str(seed), rows=3, width=3, seed=seed) for seed in range(100))
        empty = next(world for world in worlds if not expected(world, "tuples", 3))
        stream = open_stream(empty, negatives=3)
        with pytest.raises(InputError, match="no row has a positive and enough negatives for tuples"):
            len(stream)
