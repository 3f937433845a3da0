"""Versions of an export: what is opened is what a whole export would hold, and what is there already is not written."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InputError, TableError
from schemas.manifest import Manifest, Shard, publish
from schemas.storage import join, relative
from schemas.table import Table
from schemas.versions import VERSION
from scoring import export
from scoring.export import EarlierExport, write_vector_files
from scoring.export_versions import (
    CURRENT,
    KIND,
    ExportVersion,
    find_current,
    make_current,
    require_needed_exports,
    resolve_export,
)
from scoring.exported import INDEX, VECTORS, ExportFiles
from scoring.vectors import EarlierIndex, Vectors, open_indexes, search_indexes, write_indexes
from search.torch_topk import top_k
from tests.pipelines.test_versions import contents

DIMENSION = 4
FACTS = {"vocabulary": 0, "features": 0, "max_tokens": 1, "dimension": DIMENSION, "recipe": {}, "index": None}


def publish_at(out: str, shards: list[Shard], earlier: EarlierExport | None, **facts: object) -> Manifest:
    """Publish an export of `shards` alone."""
    version = ExportVersion(Path(out).name)
    if earlier is not None:
        onto = relative(out, earlier.table.url)
        version = ExportVersion(Path(out).name, onto, earlier.table.digest, earlier.needs(shards))
    parameters = {**FACTS, **facts, VERSION: asdict(version)}
    return publish(out, Manifest(kind=KIND, shards=tuple(shards), parameters=parameters))


def earlier_of(url: str, out: str) -> EarlierExport:
    return EarlierExport(Table.open(url), out)


def own_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors"))


@contextmanager
def folder_of(root: str) -> Iterator[str]:
    """A place on a local disk, or in memory as a store."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder if root == "disk" else f"memory://{Path(folder).name}"


@st.composite
def growing(draw: st.DrawFn) -> list[np.ndarray]:
    """Versions of vectors [L, D]: rows are added, and some change."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    rows = rng.standard_normal((draw(st.integers(1, 40)), DIMENSION), np.float32)
    versions = [rows]
    for _ in range(draw(st.integers(1, 4))):
        share = draw(st.sampled_from([0.0, 0.05, 0.2, 1.0]))
        rows = np.concatenate([rows, rng.standard_normal((draw(st.integers(0, 12)), DIMENSION), np.float32)])
        moved = rng.random(len(rows)) < share
        rows[moved] = rng.standard_normal((int(moved.sum()), DIMENSION), np.float32)
        versions.append(rows.copy())
    return versions


@pytest.mark.parametrize("store", ["disk", "memory"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_vectors_of_a_version_are_those_of_a_whole_export(
    store: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "ROWS_A_FILE", 16)

    @settings(max_examples=15)
    @given(versions=growing())
    def check(versions: list[np.ndarray]) -> None:
        with folder_of(store) as root, tempfile.TemporaryDirectory() as scratch:
            earlier = None
            for number, rows in enumerate(versions):
                out = join(root, str(number))
                place = out, dtype, Path(scratch) / str(number), earlier
                place[2].mkdir()
                tensor = torch.from_numpy(rows)
                shards, mapped = write_vector_files(VECTORS, len(rows), lambda a, b, of=tensor: of[a:b], *place)
                manifest = publish_at(out, shards, earlier)
                Table(out, manifest).verify()
                require_needed_exports(Table(out, manifest))
                files = ExportFiles(Table(out, manifest))
                opened = Vectors([files.vectors(shard) for shard in files.of(VECTORS)])
                expected = rows.astype(dtype)
                for each in (opened, mapped):
                    np.testing.assert_array_equal(each[:], expected)
                earlier = earlier_of(out, join(root, str(number + 1)))
            for number, rows in enumerate(versions):  # none has changed what an earlier one holds
                files = ExportFiles(Table.open(join(root, str(number))))
                opened = Vectors([files.vectors(shard) for shard in files.of(VECTORS)])
                np.testing.assert_array_equal(opened[:], rows.astype(dtype))

    check()


def write_rows(out: str, rows: np.ndarray, earlier: EarlierExport | None = None) -> list[Shard]:
    tensor = torch.from_numpy(rows)
    place = out, "float32", Path(out), earlier
    return write_vector_files(VECTORS, len(rows), lambda start, stop: tensor[start:stop], *place)[0]


def test_a_version_costs_what_has_changed(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((20_000, DIMENSION)).astype(np.float32)
    publish_at(f"{tmp_path}/1", write_rows(f"{tmp_path}/1", rows), None)
    whole = own_bytes(f"{tmp_path}/1")
    for number in range(2, 6):
        rows = np.concatenate([rows, np.ones((50, DIMENSION), np.float32)])
        rows[number::100] += 1
        out = f"{tmp_path}/{number}"
        earlier = earlier_of(f"{tmp_path}/{number - 1}", out)
        shards = write_rows(out, rows, earlier)
        needed = publish_at(out, shards, earlier).parameters[VERSION]["needs"]
        assert [place for _, place, _ in needed] == ["../1"]  # those between may go
        assert [shard.rows for shard in shards] == [20_000, 50 * (number - 1)]
        assert own_bytes(out) < 0.12 * whole


@pytest.mark.parametrize("spec", ["IVF8,Flat", "IVF8,PQ2x4fs", "HNSW8", "PCA4,IVF8,SQ8"])
def test_an_updated_index_finds_what_is_there_now(tmp_path: Path, spec: str) -> None:
    rng = np.random.default_rng(0)
    before = rng.standard_normal((600, DIMENSION)).astype(np.float32)
    after = np.concatenate([before, rng.standard_normal((20, DIMENSION)).astype(np.float32)])
    after[5:600:10] = rng.standard_normal((60, DIMENSION))
    queries = rng.standard_normal((50, DIMENSION)).astype(np.float32)
    target = 0.95 if "PQ" in spec else 1.0
    files = [f"{tmp_path}/before", f"{tmp_path}/after"]
    shards, facts = write_indexes(spec, Vectors([before]), queries, 5, target, files[0])
    entry = shards[0].model_copy(update={"path": f"{INDEX}/{shards[0].path}"})
    earlier = EarlierIndex(facts, [(Path(files[0]) / shards[0].path, entry)], lambda _: before)

    _, same = write_indexes(spec, Vectors([before]), queries, 5, target, files[1], earlier)
    assert not Path(files[1]).exists()
    assert same["moved"] == [0]

    vectors = Vectors([after[:600], after[600:]])
    written, facts = write_indexes(spec, vectors, queries, 5, target, files[1], earlier)
    assert facts["moved"] == [0 if spec == "HNSW8" else 60, 0]  # a graph is built anew
    assert facts["efforts"][1] is None
    opened = open_indexes([f"{files[1]}/{shard.path}" for shard in written], facts, vectors)
    assert opened[0].block.index.ntotal == 600
    ids, _ = search_indexes(opened, queries, 5)
    _, expected = top_k(torch.from_numpy(queries), torch.from_numpy(after), 5)
    recall = np.mean([np.isin(best, offered).mean() for best, offered in zip(expected.numpy(), ids, strict=True)])
    assert recall > 0.95


def test_an_index_of_which_most_has_moved_is_built_anew(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((200, DIMENSION)).astype(np.float32)
    queries = rows[:20]
    shards, facts = write_indexes("IVF4,Flat", Vectors([rows]), queries, 5, 1.0, f"{tmp_path}/0")
    for number, moved in ((1, 60), (2, 0)):
        path = tmp_path / str(number - 1) / shards[0].path
        earlier = EarlierIndex(facts, [(path, shards[0])], lambda _, of=rows: of)
        rows = rows.copy()
        rows[60 * (number - 1) : 60 * number] *= -1
        shards, facts = write_indexes("IVF4,Flat", Vectors([rows]), queries, 5, 1.0, f"{tmp_path}/{number}", earlier)
        assert facts["moved"] == [moved]


def test_what_a_version_needs_is_named_when_it_is_gone(tmp_path: Path) -> None:
    rows = np.ones((300, DIMENSION), np.float32)
    first, second = f"{tmp_path}/1", f"{tmp_path}/2"
    publish_at(first, write_rows(first, rows), None)
    earlier = earlier_of(first, second)
    manifest = publish_at(second, write_rows(second, np.concatenate([rows, rows[:9]]), earlier), earlier)
    require_needed_exports(Table(second, manifest))
    shutil.move(first, f"{tmp_path}/away")
    with pytest.raises(
        TableError, match=r"2: files that this version needs are missing: part 1 \(.*/1\) is missing\. Restore them"
    ):
        require_needed_exports(Table(second, manifest))
    publish_at(first, write_rows(first, rows[:5]), None)
    with pytest.raises(TableError, match=r"part 1 \(.*/1\) has been rebuilt since"):
        require_needed_exports(Table(second, manifest))


@pytest.mark.parametrize("store", ["disk", "memory"])
def test_current_names_one_of_a_folder(store: str) -> None:
    with folder_of(store) as root:
        for name in ("a", "b"):
            publish_at(join(root, name), [], None)
        assert find_current(root) is None
        with pytest.raises(InputError, match="no export in this folder is current"):
            resolve_export(root)
        assert resolve_export(join(root, "a", "nothing")) == join(root, "a", "nothing")
        with pytest.raises(InputError, match="no finished table here"):
            make_current(join(root, "c"))
        for name in ("a", "b", "a"):
            assert make_current(join(root, name)) == join(root, CURRENT)
            assert resolve_export(root) == join(root, name)
            assert resolve_export(join(root, "b")) == join(root, "b")


@pytest.mark.parametrize("content", [b"", b"../b\n", b"\xff", b"a/b", b"."])
def test_a_file_that_names_nothing_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / CURRENT).write_bytes(content)
    with pytest.raises(TableError, match=r"CURRENT: expected the name of a folder next to this file"):
        resolve_export(str(tmp_path))


def test_versions_may_move_together(tmp_path: Path) -> None:
    rows = np.ones((300, DIMENSION), np.float32)
    first, second = f"{tmp_path}/here/1", f"{tmp_path}/here/2"
    publish_at(first, write_rows(first, rows), None)
    earlier = earlier_of(first, second)
    publish_at(second, write_rows(second, np.concatenate([rows, rows[:9]]), earlier), earlier)
    before = contents(second)
    shutil.move(f"{tmp_path}/here", f"{tmp_path}/there")
    files = ExportFiles(Table.open(f"{tmp_path}/there/2"))
    assert sum(len(files.vectors(shard)) for shard in files.of(VECTORS)) == 309
    assert contents(f"{tmp_path}/there/2") == before


def test_ranges_are_searched_exactly_up_to_a_size(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).standard_normal((100, DIMENSION)).astype(np.float32)
    monkeypatch.setattr("scoring.vectors.EXACT_LABELS", 20)
    vectors = Vectors([rows[:50], rows[50:80], rows[80:]])
    _, facts = write_indexes("IVF2,Flat", vectors, rows[:5], 5, 1.0, str(tmp_path))
    assert [effort is None for effort in facts["efforts"]] == [False, False, True]
