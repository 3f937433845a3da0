"""Points that are mined among themselves: against brute force; and who reads labels refuses their table."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.mine import MineOptions, mine
from pipelines.mining.derived import merge
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout
from schemas.table import Table
from tests.command import call
from tests.pipelines.mining.world import World, brute_force, random_world, read_negatives
from trainer.stream import Source


@pytest.fixture
def world(tmp_path: Path) -> World:
    made = random_world(str(tmp_path), rows=60, labels=20, dimension=6, filters=[[1]] * 60)
    made.write_dump(by="points")
    return made


def test_a_point_finds_the_nearest_others_and_never_itself(world: World) -> None:
    queries = world.queries.astype(np.float16).astype(np.float64)
    expected = brute_force(queries @ queries.T, [{row} for row in range(60)], world.width)
    for options in (MineOptions(), MineOptions(block_rows=13, overwrite=True, by="points")):
        manifest = mine(world.data, world.run, options=options)["queries"]
        url = world.layout.negatives(world.epoch + 2, "queries")
        ids, near, scores = read_negatives(url, manifest)
        np.testing.assert_array_equal(near, expected)
        assert not (near == ids[:, None]).any()
        np.testing.assert_allclose(scores, np.take_along_axis(queries @ queries.T, near, 1), rtol=1e-3)
        assert manifest.parameters["by"] == "points"
        assert manifest.quality["recall_at_k"] == 1.0


def test_who_reads_labels_refuses_points(world: World) -> None:
    mine(world.data, world.run)
    url = world.layout.negatives(world.epoch + 2, "queries")
    said = "the ids of this table are points, expected labels"
    with pytest.raises(TableError, match=said):
        Source("queries", Table.open(DataLayout(world.data).queries("train"))).with_negatives(url)
    with pytest.raises(TableError, match=said):
        merge(world.data, [url, url], f"{world.run}-merged")


@pytest.mark.parametrize("option", ["queries", "vectors"])
def test_other_embeddings_are_refused(world: World, option: str) -> None:
    other = {option: world.layout.embeddings(world.epoch, "queries")}
    with pytest.raises(InputError, match='by="points": points are searched among the points of the same dump'):
        mine(world.data, world.run, options=MineOptions(by="points", **other))


def test_several_sources_are_refused(tmp_path: Path) -> None:
    world = random_world(str(tmp_path), rows=30, labels=20, dimension=6, with_labels=True)
    world.write_dump()
    done = call("mine", world.data, world.run, "--by", "points")
    assert done.status == 2
    assert "the single source `queries`; got queries, labels" in done.err.replace("\n", " ")
