"""Sizes in a manifest, an index or a line are believed only within bounds."""

import gzip
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from schemas import arrow
from schemas import manifest as manifests
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import MANIFEST, Manifest, Shard, open_manifest, publish
from schemas.shard_files import webdataset
from tests.command import call, refused
from tests.hostile.test_manifests import seal
from tests.pipelines.raw import write_tiny
from trainer.tracking import read_metrics

OUTSIDE = ("../other/part-0.parquet", "queries/../../secret", "/etc/passwd", "s3://bucket/key", "..\\windows", "")


@pytest.mark.parametrize("path", OUTSIDE)
def test_neither_a_shard_nor_a_part_of_a_data_set_can_lie_outside(path: str, tmp_path: Path) -> None:
    """In a manifest whose digest is right, as a hostile author would write it."""
    shard = {"path": path, "rows": 1, "bytes": 1, "sha256": "0" * 64}
    for kind, lie in (("queries", {"shards": [shard]}), ("data", {"parents": {path: "0" * 64}})):
        seal(tmp_path, {**json.loads(Manifest(kind=kind).model_dump_json()), **lie})
        with pytest.raises(TableError, match="points outside of the table's folder"):
            open_manifest(str(tmp_path))


@pytest.mark.parametrize("name", ["../x", "a/b", "..", ".hidden", "s3:", "", "a\\b"])
def test_the_name_of_a_split_or_source_is_one_folder(name: str) -> None:
    for path in (
        lambda: DataLayout("root").queries(name),
        lambda: RunLayout("root").negatives(1, name),
        lambda: RunLayout("root").embeddings(1, name),
        lambda: RunLayout("root").evaluation(name, 1),
    ):
        with pytest.raises(InputError, match="lead out of the folder"):
            path()


def test_a_manifest_beyond_all_measure_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(str(tmp_path), Manifest(kind="queries"))
    monkeypatch.setattr(manifests, "MAX_BYTES", 10)
    with pytest.raises(TableError, match="a manifest has at most 10"):
        open_manifest(str(tmp_path))


def test_nested_beyond_all_measure_is_damage_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("[" * 200_000)
    refused(call("inspect", tmp_path), "damaged")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + '{"step":' * 200_000 + "\n")
    assert read_metrics(RunLayout(str(tmp_path))) == [{"step": 1}]


def test_a_line_of_input_nested_beyond_all_measure_is_rejected(tmp_path: Path) -> None:
    raw = write_tiny(tmp_path / "raw", rows=2000)
    lines = gzip.decompress((raw / "trn.json.gz").read_bytes()).splitlines()
    lines[5] = b'{"uid": "deep", "title": ' + b"[" * 100_000 + b"]" * 100_000 + b', "content": "", "target_ind": [1]}'
    (raw / "trn.json.gz").write_bytes(gzip.compress(b"\n".join(lines) + b"\n"))
    done = call("shard", raw, tmp_path / "data", "--tokenizer", "train:300", "--max-reject-share", "0.5", "--json")
    assert done.status == 0, done.err
    assert done.json["rows"]["train"] == 1999


def test_an_index_that_points_beyond_its_archive_is_damage(tmp_path: Path) -> None:
    """Its author also wrote the manifest, so that every checksum is right: sizes still have to fit the file."""
    ids, labels = np.arange(4), pa.array([[1], [2], [3], [4]], pa.list_(pa.int32()))
    tokens = pa.array([[1]] * 4, pa.list_(pa.uint16()))
    rows = pa.table(
        {
            "query_id": ids,
            "key": ["a", "b", "c", "d"],
            "input_ids": tokens,
            "label_ids": labels,
        },
        schema=arrow.queries(pa.uint16(), pa.int32()),
    )
    members = webdataset.members_of(rows.schema)
    schema = pa.schema(
        [(m.column, pa.uint32()) for m in members], metadata={"schema": rows.schema.serialize().to_pybytes()}
    )
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, schema) as index:
        batch = pa.record_batch([pa.array([1 << 31] * 4, pa.uint32()) for _ in members], schema=schema)
        index.write_batch(batch, {"facts": json.dumps({"start": 0, "first_id": 0, "crc32": {}})})
    content = out.getvalue().to_pybytes()
    end = webdataset._FOOTER.pack(webdataset.crc32(content), len(content), webdataset._MAGIC)
    (tmp_path / "part-00000-of-00001.tar").write_bytes(webdataset.END + content + end)
    data = webdataset.END + content + end
    shard = Shard(path="part-00000-of-00001.tar", rows=4, bytes=len(data), sha256=manifests.storage.sha256(data))
    opened = webdataset.open_shard(str(tmp_path), shard)
    for read in (lambda: opened.read_row_group(0), lambda: opened.fetch(0)):
        with pytest.raises(ValueError, match="past the end of the file"):
            read()
