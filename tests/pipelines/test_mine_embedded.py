"""θ-hard negatives from tables of `extremis embed`, end to end; and the same bytes from several worker processes."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.embed import EmbedOptions, embed
from pipelines.mine import MineOptions, mine
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from schemas.shard_files.parquet import matrix_column
from schemas.storage import join
from schemas.table import Table
from tests.builders import SmallData, build_data
from tests.pipelines.mining.world import brute_force, random_world, read_negatives
from tests.pipelines.test_embed import RECIPE
from trainer.loop import Trainer


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("embedded") / "data"))


@pytest.fixture(scope="module")
def run(small: SmallData) -> str:
    run = str(Path(small.layout.root).parent / "run")
    for _ in Trainer.start(small.layout.root, run, RECIPE, lambda line: None).train():
        pass
    for what in ("queries", "labels"):
        embed(small.layout.root, run, f"{run}-{what}", EmbedOptions(what=what, split="train", dtype="float32"))
    return run


def matrix(url: str) -> np.ndarray:
    return np.concatenate([matrix_column(group, "vector") for group in Table.open(url).batches()])


def test_embedded_queries_meet_embedded_labels(small: SmallData, run: str, tmp_path: Path) -> None:
    options = MineOptions(queries=f"{run}-queries", vectors=f"{run}-labels", out=str(tmp_path), width=4, block_rows=11)
    manifest = mine(small.layout.root, run, options=options)["queries"]
    _, label_ids, _ = read_negatives(join(str(tmp_path), "queries"), manifest)
    x, z = (matrix(f"{run}-{what}").astype(np.float64) for what in ("queries", "labels"))
    assert (x[:, -1] == 1).all()
    assert (z[:, -1] == 1).all()  # meets the bias column of classifier vectors, and says nothing here
    scores = x[:, :-1] @ z[:, :-1].T
    assert (label_ids == brute_force(scores, [{*row} for row in small.points["train"].positives], 4)).all()
    assert manifest.parameters["by"] == "labels"
    assert manifest.parents["vectors"] == open_manifest(f"{run}-labels", "vectors").digest


def test_where_it_goes_has_to_be_said(small: SmallData, run: str) -> None:
    options = MineOptions(queries=f"{run}-queries", vectors=f"{run}-labels", width=4)
    with pytest.raises(InputError, match="a location for the table: give for_epoch=E or out=URL"):
        mine(small.layout.root, run, options=options)
    mine(small.layout.root, run, options=options.model_copy(update={"for_epoch": 7}))
    table = open_manifest(RunLayout(run).negatives(7, "queries"), "negatives")
    assert table.parameters["use_from"] == 7


def test_tables_of_two_checkpoints_or_of_other_data_are_refused(small: SmallData, run: str, tmp_path: Path) -> None:
    steps = [int(name.removeprefix("step-")) for name in storage.list_names(RunLayout(run).checkpoints)]
    early = f"{run}-early"
    embed(small.layout.root, run, early, EmbedOptions(what="labels", step=min(steps)))
    options = MineOptions(queries=f"{run}-queries", vectors=early, out=str(tmp_path), width=4)
    with pytest.raises(TableError, match=r"comes from step \d+, .* comes from step \d+ .*extremis embed --step"):
        mine(small.layout.root, run, options=options)
    other = build_data(str(tmp_path / "other"), labels=31, seed=1)
    with pytest.raises(TableError, match="built from a queries table"):
        mine(other.layout.root, run, options=options)
    wrong = options.model_copy(update={"vectors": f"{run}-queries", "by": "labels"})
    with pytest.raises(TableError, match=r"expected the vectors|no label embeddings"):
        mine(small.layout.root, run, options=wrong)


@pytest.mark.parametrize("mode", ["multi_threading", pytest.param("multi_processing", marks=pytest.mark.slow)])
def test_two_workers_publish_the_bytes_of_one(tmp_path: Path, mode: str) -> None:
    world = random_world(str(tmp_path), rows=150, labels=300, dimension=8, shards=3, width=6)
    world.write_dump()
    contents = []
    for number, flags in enumerate(([], ["--direct_num_workers=2", f"--direct_running_mode={mode}"])):
        out = str(tmp_path / f"out-{number}")
        options = MineOptions(index="IVF8,PQ4x4fs", block_rows=100, tasks_per_block=2, margin=0.1, out=out)
        mine(world.data, world.run, options=options, beam_options=flags)
        table = join(out, "queries")
        contents.append({name: storage.read_bytes(join(table, name)) for name in storage.list_names(table)})
    assert len(contents[0]) == 4
    assert contents[0] == contents[1]
