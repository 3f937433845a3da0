"""Dense vectors of `extremis shard`: given in rows or made by a model, the same whoever works; and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.shard import ShardOptions, shard
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from tests.command import PROCESSES
from tests.static_model import PROMPTS, write_static_model
from trainer.device import CPU
from trainer.encoders.texts import TextFiles
from trainer.stream import JoinedStream, open_sources

WORDS = ["a", "ship", "in", "a", "storm", "the", "sea", "oil", "on", "canvas"]
LABELS, ROWS, d = 6, 90, 5
OPTIONS = {"tokenizer": "train:100", "shards": 2, "row_group_rows": 16, "keep_text": True}


def points(first: int, rows: int, vectors: bool = True) -> list[dict[str, Any]]:
    draw = np.random.default_rng(first)
    return [
        {
            "key": f"q{first + i}",
            "text": " ".join(draw.choice(WORDS, 4)),
            "labels": [f"l{i % LABELS}"],
            **({"vector": draw.standard_normal(d).round(3).tolist()} if vectors else {}),
        }
        for i in range(rows)
    ]


def write(folder: Path, vectors: bool = True, **tables: list[dict[str, Any]]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    labels = [{**point, "key": f"l{i}", "text": f"label {i}"} for i, point in enumerate(points(500, LABELS, vectors))]
    of_tables = {"train": points(0, ROWS, vectors), "test": points(200, 20, vectors), "labels": labels, **tables}
    for name, rows in of_tables.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def content(data: str) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(Path(data).rglob("*")) if path.is_file()}


def by_key(url: str, column: str = "dense") -> dict[str, Any]:
    rows = Table.open(url).read(["key", column])
    values = matrix_column(rows, column) if column == "dense" else rows[column].to_pylist()
    return dict(zip(rows["key"].to_pylist(), values, strict=True))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_static_model(tmp_path_factory.mktemp("model"), [" ".join(WORDS), "label"])


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("given"))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("texts"), vectors=False)


@pytest.fixture(scope="module")
def made(texts: str, model: str) -> str:
    out = str(Path(texts).parent / f"{Path(texts).name}-made")
    shard(texts, out, ShardOptions(**OPTIONS, embed=model))
    return out


def test_given_vectors_come_out_as_float16_and_parquet_and_webdataset_give_the_same_batches(
    given: str, tmp_path: Path
) -> None:
    batches = []
    for sink in ("parquet", "webdataset"):
        manifest = shard(given, str(tmp_path / sink), ShardOptions(**OPTIONS, sink=sink))
        assert manifest.parameters["dense"] == d
        assert "dense_model" not in manifest.parameters
        layout = DataLayout(str(tmp_path / sink))
        expected = {row["key"]: np.float16(row["vector"]) for row in points(0, ROWS)}
        stored = by_key(layout.queries("train"))
        assert all((stored[key] == vector).all() for key, vector in expected.items())
        assert len(by_key(layout.labels)) == LABELS
        stream = JoinedStream(
            open_sources(layout, "train", True, "tokens+dense"), LABELS, batch=8, streams=4, inputs="tokens+dense"
        )
        batches.append([(batch.rows, batch.inputs.tokens.values, batch.inputs.dense) for batch in stream])
    for parquet, tar in zip(*batches, strict=True):
        assert all((one == other).all() for one, other in zip(parquet, tar, strict=True))
        assert parquet[2].dtype == np.float16
        assert parquet[2].shape[1] == d
    rows, _, dense = batches[0][0]
    stored = np.concatenate(
        [matrix_column(Table.open(url).read(["dense"]), "dense") for url in (layout.queries("train"), layout.labels)]
    )
    assert (stored[rows] == dense).all()


def test_columns_of_lists_are_read_as_lines_are(given: str, tmp_path: Path) -> None:
    for name in ("train", "test", "labels"):
        rows = [json.loads(line) for line in (Path(given) / f"{name}.jsonl").read_text().splitlines()]
        kinds = {
            "train": pa.list_(pa.float32(), d),
            "test": pa.large_list(pa.float64()),
            "labels": pa.list_(pa.float16()),
        }
        vectors = pa.array([row.pop("vector") for row in rows], pa.list_(pa.float64())).cast(pa.list_(pa.float64()))
        column = pa.array(
            vectors.to_pylist() if name != "labels" else [np.float16(v) for v in vectors.to_pylist()], kinds[name]
        )
        pq.write_table(pa.Table.from_pylist(rows).append_column("vector", column), tmp_path / f"{name}.parquet")
    shard(given, str(tmp_path / "lines"), ShardOptions(**OPTIONS))
    shard(str(tmp_path), str(tmp_path / "columns"), ShardOptions(**OPTIONS))
    for table in ("queries/train", "queries/test", "labels"):
        lines, columns = (by_key(str(tmp_path / form / table)) for form in ("lines", "columns"))
        assert all((lines[key] == columns[key]).all() for key in lines)


WRONG = {
    "missing": ({}, "missing_field"),
    "null": ({"vector": None}, "wrong_type"),
    "text": ({"vector": ["a"] * d}, "wrong_type"),
    "short": ({"vector": [1.0]}, "malformed"),
    "nan": ({"vector": [float("nan")] * d}, "malformed"),
    "large": ({"vector": [1e6] * d}, "malformed"),
}


@pytest.mark.parametrize("columns", [False, True])
def test_wrong_vectors_are_rejects_with_reason_and_line(columns: bool, tmp_path: Path) -> None:
    wrong = {name: case for name, case in WRONG.items() if not (columns and name in ("missing", "text"))}
    rows = [
        *points(0, 30),
        *({"key": name, "text": "sea", "labels": ["l0"], **row} for name, (row, _) in wrong.items()),
    ]
    raw = write(tmp_path / "raw", train=rows)
    if columns:
        (tmp_path / "raw" / "train.jsonl").unlink()
        (tmp_path / "raw" / "test.jsonl").unlink()
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "raw" / "train.parquet")
    form = "parquet" if columns else "jsonl"
    shard(raw, str(tmp_path / "data"), ShardOptions(**OPTIONS, max_reject_share=0.5, format=form))
    rejects = Table.open(DataLayout(str(tmp_path / "data")).rejects).read().to_pylist()
    expected = [(31 + i, reason) for i, (_, reason) in enumerate(wrong.values())]
    if columns:
        expected = [(line, "missing_field" if reason == "wrong_type" else reason) for line, reason in expected]
    assert [(row["line"], row["reason"]) for row in rejects] == expected
    assert all("vector" in row["detail"] for row in rejects)


def test_rows_of_one_key_with_other_vectors_are_others(tmp_path: Path) -> None:
    (row, other) = points(0, 2)
    again = {**row, "vector": other["vector"]}
    raw = write(tmp_path / "raw", train=[row, row, again, *points(1, 9)])
    manifest = shard(raw, str(tmp_path / "data"), ShardOptions(**OPTIONS, max_reject_share=0.5))
    counters = Table.open(DataLayout(str(tmp_path / "data")).queries("train")).manifest.counters
    assert counters["rejected"] == {"duplicate_key": 1 if counters["rows_merged"] else 2}
    assert manifest.parameters["rows"]["train"] == 10


def test_a_model_embeds_queries_and_labels_by_its_prompts(made: str, model: str) -> None:
    parameters = Table.open(made, "data").parameters
    stated = parameters["dense_model"]
    assert (parameters["dense"], stated["name"], stated["digest"]) == (6, model, TextFiles.find(model).digest)
    for table, prompt in (("queries/train", PROMPTS["query"]), ("labels", PROMPTS["document"])):
        stored, texts = by_key(storage.join(made, table)), by_key(storage.join(made, table), "text")
        expected = TextFiles.find(model).open(CPU, stated["compute"], prompt).embed([*texts.values()])
        np.testing.assert_allclose([stored[key] for key in texts], expected, atol=2e-3)


def test_processes_give_the_same_bytes_and_the_same_command_finds_them(
    texts: str, model: str, made: str, tmp_path: Path
) -> None:
    before = content(made)
    again = str(tmp_path / "again")
    shard(texts, again, ShardOptions(**OPTIONS, embed=model), PROCESSES)
    assert [*content(again).values()] == [*before.values()]
    said: list[str] = []
    shard(texts, made, ShardOptions(**OPTIONS, embed=model), progress=said.append)
    assert "up to date" in said[-1]
    with pytest.raises(InputError, match="embed"):
        shard(texts, made, ShardOptions(**OPTIONS))


def test_a_version_embeds_by_the_model_of_the_data_before(texts: str, made: str, model: str, tmp_path: Path) -> None:
    labels = [{"key": f"l{i}", "text": f"label {i}" if i else "sea"} for i in range(LABELS + 1)]
    raw = write(tmp_path / "more", False, train=points(40, 80, False), labels=labels)
    shard(raw, str(tmp_path / "v2"), ShardOptions(onto=made))
    for table, prompt in (("queries/train", PROMPTS["query"]), ("labels", PROMPTS["document"])):
        stored, said = (by_key(str(tmp_path / "v2" / table), column) for column in ("dense", "text"))
        expected = TextFiles.find(model).open(CPU, "float32", prompt).embed([*said.values()])
        np.testing.assert_allclose([stored[key] for key in said], expected, atol=2e-2)
    other = write_static_model(tmp_path / "other", ["sea"], seed=1)
    with pytest.raises(InputError, match=r"another model, .* \(different: digest"):
        shard(raw, str(tmp_path / "v3"), ShardOptions(onto=made, embed=other))
    with pytest.raises(InputError, match="INPUT: 5"):
        shard(write(tmp_path / "own"), str(tmp_path / "v3"), ShardOptions(onto=made))


def test_vectors_of_rows_and_of_a_model_do_not_go_together(given: str, texts: str, model: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has its own vectors of 5 numbers"):
        shard(given, str(tmp_path / "data"), ShardOptions(embed=model))
    with pytest.raises(InputError, match="not a local directory"):
        shard(texts, str(tmp_path / "data"), ShardOptions(embed=str(tmp_path / "nothing")))
