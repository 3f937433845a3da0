"""`extremis embed MODEL INPUT OUT` end to end: any input, equal bytes on every runner and after a kill, refusals."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

import extremis
from pipelines.embed import BLOCK_ROWS, embed_texts
from pipelines.options import EmbedTextsOptions
from schemas import storage
from schemas.errors import InputError
from schemas.layout import staging
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from tests.builders import build_data
from tests.command import ROOT
from tests.static_model import write_static_model
from trainer.device import CPU
from trainer.encoders.texts import TextFiles

ROWS = 2 * BLOCK_ROWS + 100
PROCESSES = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
TEXTS = ["a ship in a storm", "", "étude 漢字", "the sea", "word " * 600]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_static_model(tmp_path_factory.mktemp("table"), TEXTS)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows of three shards, in two files."""
    folder = tmp_path_factory.mktemp("many")
    for name, first, stop in (("a", 0, 9000), ("b", 9000, ROWS)):
        rows = [json.dumps({"key": f"k{i}", "text": f"{TEXTS[i % 4]} number {i}"}) for i in range(first, stop)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    return str(folder)


def content(out: str) -> dict[str, bytes]:
    return {name: Path(out, name).read_bytes() for name in storage.list_names(out)}


@pytest.fixture(scope="module")
def whole(model: str, many: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = str(tmp_path_factory.mktemp("whole") / "out")
    embed_texts(model, many, out, EmbedTextsOptions(dtype="float32"))
    return out


def test_rows_are_in_the_order_of_the_input_with_keys_and_texts(model: str, whole: str) -> None:
    table = Table.open(whole, "embeddings")
    assert [shard.rows for shard in table.shards] == [BLOCK_ROWS, BLOCK_ROWS, 100]
    rows = table.read()
    assert rows.column_names == ["query_id", "key", "text", "vector"]
    assert rows["query_id"].to_pylist() == [*range(ROWS)]
    assert rows["key"].to_pylist() == [f"k{i}" for i in range(ROWS)]
    some = [0, 7, 8999, 9000, BLOCK_ROWS, ROWS - 1]
    expected = TextFiles.find(model).open(CPU, "float32").embed([f"{TEXTS[i % 4]} number {i}" for i in some])
    np.testing.assert_allclose(matrix_column(rows, "vector")[some], expected, rtol=1e-6)
    assert pq.read_table(whole).num_rows == ROWS  # as other tools read it


def test_workers_and_threads_give_the_same_bytes(model: str, many: str, whole: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    embed_texts(model, many, out, EmbedTextsOptions(dtype="float32", threads=3), PROCESSES)
    assert content(out) == content(whole)


def test_a_killed_run_goes_on_from_its_shards(model: str, many: str, whole: str, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    program = (
        "import os, signal\n"
        "from pipelines import embed\n"
        "blocks_of = embed.TextsPlan.blocks_of\n"
        "def dying(plan, shard):\n"
        "    if shard == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return blocks_of(plan, shard)\n"
        "embed.TextsPlan.blocks_of = dying\n"
        f"embed.embed_texts({model!r}, {many!r}, {out!r}, embed.EmbedTextsOptions(dtype='float32'))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT)
    assert done.returncode == -9
    kept = {path.name: path.stat().st_mtime_ns for path in Path(staging(out)).rglob("part-*.parquet")}
    assert len(kept) == 2
    said: list[str] = []
    embed_texts(model, many, out, EmbedTextsOptions(dtype="float32"), progress=said.append)
    assert f"{out}: resuming an interrupted run" in said
    assert content(out) == content(whole)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in Path(out).glob("*.parquet")}.items()


def test_a_finished_one_is_returned_and_another_is_refused(model: str, many: str, whole: str, tmp_path: Path) -> None:
    before = content(whole)
    made = embed_texts(model, many, whole, EmbedTextsOptions(dtype="float32"))
    assert made == Table.open(whole).manifest
    for options in (EmbedTextsOptions(), EmbedTextsOptions(dtype="float32", what="queries")):
        with pytest.raises(InputError, match="made with other options"):
            embed_texts(model, many, whole, options)
    with pytest.raises(InputError, match="other input"):
        embed_texts(model, str(Path(many, "a.jsonl")), whole, EmbedTextsOptions(dtype="float32"))
    assert content(whole) == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="contains other files, but this command writes embeddings"):
        embed_texts(model, many, str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def write_input(folder: Path, form: str) -> tuple[str, str | None]:
    """TEXTS as INPUT in one form, and its --fields."""
    rows = [{"id": f"k{i}", "body": text} for i, text in enumerate(TEXTS)]
    if form == "txt":
        (folder / "x.txt").write_text("\n".join(TEXTS) + "\n")
        return str(folder / "x.txt"), None
    if form == "jsonl.gz":
        content = "\n".join(map(json.dumps, rows)).encode()
        (folder / "x.jsonl.gz").write_bytes(gzip.compress(content))
    elif form == "csv":
        (folder / "x.csv").write_text("id,body\n" + "".join(f'{row["id"]},"{row["body"]}"\n' for row in rows))
    else:
        (folder / "x").mkdir()
        pq.write_table(pa.Table.from_pylist(rows[:2]), folder / "x" / "0.parquet")
        pq.write_table(pa.Table.from_pylist(rows[2:]), folder / "x" / "1.parquet")
        return str(folder / "x"), "key=id,text=body"
    return str(folder / f"x.{form}"), "key=id,text=body"


@pytest.mark.parametrize("form", ["txt", "jsonl.gz", "csv", "parquet"])
def test_every_form_gives_the_same_vectors(model: str, tmp_path: Path, form: str) -> None:
    source, fields = write_input(tmp_path, form)
    out = tmp_path / "out"
    result = extremis.embed(model, source, out, fields=fields, progress=False, dtype="float32")
    rows = Table.open(str(out)).read()
    assert result.rows == len(TEXTS)
    assert rows["text"].to_pylist() == TEXTS
    assert rows["key"].to_pylist() == [str(i) if form == "txt" else f"k{i}" for i in range(len(TEXTS))]
    expected = TextFiles.find(model).open(CPU, "float32").embed(TEXTS)
    np.testing.assert_array_equal(matrix_column(rows, "vector"), expected)


def test_texts_at_hand_and_a_prompt_by_its_use(model: str, tmp_path: Path) -> None:
    extremis.embed(model, TEXTS, tmp_path / "out", what="queries", progress=False, dtype="float32")
    table = Table.open(str(tmp_path / "out"))
    assert table.parameters["prompt"] == "query "
    expected = TextFiles.find(model).open(CPU, "float32").embed([f"query {text}" for text in TEXTS])
    np.testing.assert_array_equal(matrix_column(table.read(), "vector"), expected)


def test_labels_of_data_are_aligned_and_queries_need_their_text(model: str, tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data")).layout
    made = embed_texts(model, data.root, str(tmp_path / "labels"), EmbedTextsOptions(what="labels"))
    labels, out = Table.open(data.labels), Table.open(str(tmp_path / "labels"))
    assert out.shard_sizes == labels.shard_sizes
    assert made.parents["labels"] == labels.digest
    assert out.read(["key", "text"]).equals(labels.read(["key", "text"]))
    with pytest.raises(InputError, match=r"queries/test: no column text; .*keep_text=True"):
        embed_texts(model, data.root, str(tmp_path / "queries"))
    assert not storage.exists(str(tmp_path / "queries"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "id,body\n1,a\n", r"x.csv: no column .*'text'.*; found: 'id', 'body'"),
        ("x.jsonl", '{"id": 1, "body": "a"}\n', r"line 1: .*'text' is missing; found .*body.*id"),
        ("x.txt", "", "empty"),
        ("x.csv", "text\n", "the input has no rows"),
        ("x.jsonl", '{"text": "a"}\n{"text": null}\n', "x.jsonl, line 2"),
        ("x.bin", "a", "unknown file extension"),
    ],
)
def test_input_that_cannot_be_read_leaves_nothing(
    model: str, tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=message):
        embed_texts(model, str(tmp_path / name), str(tmp_path / "out"))
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [name]


def test_a_value_beyond_the_dtype_and_options_of_the_other_form_are_refused(model: str, tmp_path: Path) -> None:
    wild = tmp_path / "wild"
    shutil.copytree(model, wild)
    save_file({"embedding.weight": torch.full((150, 6), 1e6)}, wild / "model.safetensors")
    (tmp_path / "x.txt").write_text("a ship\n")
    with pytest.raises(InputError, match=r"does not fit into float16\. Embed with dtype=\"float32\""):
        embed_texts(str(wild), str(tmp_path / "x.txt"), str(tmp_path / "out"))
    with pytest.raises(InputError, match=r"step works only with `extremis embed DATA RUN OUT`"):
        extremis.embed(model, tmp_path / "x.txt", tmp_path / "out", step=1, progress=False)
    with pytest.raises(InputError, match="not a local directory"):
        extremis.embed(tmp_path / "none", tmp_path / "x.txt", tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
