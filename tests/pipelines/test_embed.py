from pathlib import Path

import numpy as np
import pytest

from pipelines.embed import EmbedOptions, embed
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, open_manifest, publish, unpublish
from schemas.owners import KIND_FILE
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from tests.builders import SmallData, build_data
from trainer.checkpoints import Checkpoint
from trainer.loop import Trainer
from trainer.model import load_model
from trainer.recipe_files import validate

RECIPE = validate(
    {
        "encoder": {"dimension": 6, "buckets": 64},
        "classifier": {"bias": True, "initial_scale": 0.1},
        "negatives": {"random": 8},
        "order": {"batch": 16, "streams": 2},
        "checkpoint": {"keep": 9},
        "train": {"epochs": 2, "threads": 1},
        "logging": {"tensorboard": False},
    },
    "of the test",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallData:
    return build_data(str(tmp_path_factory.mktemp("embed") / "data"))


@pytest.fixture(scope="module")
def run(small: SmallData) -> str:
    run = str(Path(small.layout.root).parent / "run")
    for _ in Trainer.start(small.layout.root, run, RECIPE, lambda line: None).train():
        pass
    return run


def table_of(layout: DataLayout, what: str) -> str:
    return layout.labels if what == "labels" else layout.queries("test")


@pytest.mark.parametrize("what", ["queries", "labels"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_are_what_the_model_gives_in_the_order_of_the_table(
    small: SmallData, run: str, tmp_path: Path, what: str, dtype: str
) -> None:
    out = str(tmp_path / "out")
    manifest = embed(small.layout.root, run, out, EmbedOptions(what=what, dtype=dtype))
    url = table_of(small.layout, what)
    source = open_manifest(url, what)
    _, model, _ = load_model(small.layout, RunLayout(run))
    Table(out, manifest).verify()
    assert manifest == open_manifest(out, "vectors" if what == "labels" else "embeddings")
    groups = list(zip(Table(out, manifest).batches(), Table(url, source).batches(), strict=True))
    assert sum(rows.num_rows for rows, _ in groups) == source.rows > 0
    for got, rows in groups:
        id_column = "label_id" if what == "labels" else "query_id"
        assert got.column(id_column).equals(rows.column(id_column))
        expected = model.embed_table(rows).numpy()
        assert expected.shape[1] == 7  # the last column meets the bias
        np.testing.assert_array_equal(matrix_column(got, "vector"), expected.astype(dtype))


def test_it_is_aligned_and_knows_its_parents(small: SmallData, run: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    manifest = embed(small.layout.root, run, out)
    queries = open_manifest(small.layout.queries("test"))
    assert [shard.rows for shard in manifest.shards] == [shard.rows for shard in queries.shards]
    assert (manifest.rows, manifest.row_group_rows) == (queries.rows, queries.row_group_rows)
    checkpoint = Checkpoint.open(RunLayout(run).checkpoint(manifest.parameters["step"]))
    assert manifest.parents == {"queries": queries.digest, "checkpoint": checkpoint.table.digest}
    assert storage.list_names(out) == ["_manifest.json", *(shard.path for shard in manifest.shards)]


def test_two_runs_give_the_same_bytes(small: SmallData, run: str, tmp_path: Path) -> None:
    flags = ["--direct_num_workers=2", "--direct_running_mode=multi_threading"]
    first_run = embed(small.layout.root, run, str(tmp_path / "one"))
    second_run = embed(small.layout.root, run, str(tmp_path / "two"), beam_options=flags)
    assert first_run.digest == second_run.digest
    for name in storage.list_names(str(tmp_path / "one")):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_an_earlier_step_gives_other_vectors(small: SmallData, run: str, tmp_path: Path) -> None:
    steps = [int(name.removeprefix("step-")) for name in storage.list_names(RunLayout(run).checkpoints)]
    first = embed(small.layout.root, run, str(tmp_path / "first"), EmbedOptions(step=min(steps)))
    last = embed(small.layout.root, run, str(tmp_path / "last"))
    assert (first.parameters["step"], last.parameters["step"]) == (min(steps), max(steps))
    assert [shard.sha256 for shard in first.shards] != [shard.sha256 for shard in last.shards]


def test_what_is_there_already_is_kept_and_nothing_else_is_overwritten(
    small: SmallData, run: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "out")
    made = embed(small.layout.root, run, out)
    place = tmp_path / "out" / made.shards[0].path
    written = place.stat().st_mtime_ns
    assert embed(small.layout.root, run, out) == made
    assert place.stat().st_mtime_ns == written
    with pytest.raises(
        InputError, match="out: contains a finished embeddings table, but this command writes a vectors table"
    ):
        embed(small.layout.root, run, out, EmbedOptions(what="labels"))
    with pytest.raises(InputError, match="the command reads this"):
        embed(small.layout.root, run, small.layout.root)
    (tmp_path / "out" / KIND_FILE).write_text("embedded\n")  # by a process that was killed as it replaced the table
    unpublish(out)
    assert embed(small.layout.root, run, out) == made


def test_refusals_leave_nothing(small: SmallData, run: str, tmp_path: Path) -> None:
    out, data = str(tmp_path / "out"), small.layout.root
    with pytest.raises(InputError, match="no split 'dev'; known splits: test, train"):
        embed(data, run, out, EmbedOptions(split="dev"))
    with pytest.raises(TableError, match="step-00000099: no table here"):
        embed(data, run, out, EmbedOptions(step=99))
    with pytest.raises(InputError, match=r"nowhere/config.toml: no run here"):
        embed(data, str(tmp_path / "nowhere"), out)
    other = build_data(str(tmp_path / "other"), seed=1)
    with pytest.raises(InputError, match="trained on different data"):
        embed(other.layout.root, run, out)
    assert storage.list_names(out) == []


def test_a_value_beyond_the_dtype_is_named(run: str, small: SmallData, tmp_path: Path) -> None:
    wild = RECIPE.model_copy(update={"encoder": RECIPE.encoder.model_copy(update={"scale": 1e6, "normalize": True})})
    other = str(tmp_path / "run")
    trainer = Trainer.start(small.layout.root, other, wild, lambda line: None)
    trainer.save()
    trainer.context.writer.wait()
    out = str(tmp_path / "out")
    with pytest.raises(InputError, match=r"step 0: .*does not fit into float16\. Embed with dtype=\"float32\""):
        embed(small.layout.root, other, out)
    assert not storage.exists(str(tmp_path / "out" / "_manifest.json"))
    assert embed(small.layout.root, other, out, EmbedOptions(dtype="float32")).rows == 20


def test_a_damaged_shard_is_named(run: str, tmp_path: Path) -> None:
    broken = build_data(str(tmp_path / "data"))
    shard = Path(broken.layout.queries("test"), open_manifest(broken.layout.queries("test")).shards[1].path)
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(TableError, match=r"part-00001-of-00003.parquet: damaged"):
        embed(broken.layout.root, run, str(tmp_path / "out"))
    assert not storage.exists(str(tmp_path / "out" / "_manifest.json"))


def test_a_foreign_table_is_no_run(small: SmallData, tmp_path: Path) -> None:
    publish(str(tmp_path / "run"), Manifest(kind="data"))
    with pytest.raises(InputError, match="no run here"):
        embed(small.layout.root, str(tmp_path / "run"), str(tmp_path / "out"))
