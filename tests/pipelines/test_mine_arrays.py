"""Vectors in files, of any form: the tables that come of them, against brute force; and what bad files get."""

import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import extremis
from pipelines.arrays import open_mined
from pipelines.mining import search
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.shard_files.parquet import list_column, matrix_column
from schemas.table import Table
from tests.command import PROCESSES, call, command, environment, refused
from tests.pipelines.mining.world import brute_force, random_rows, read_negatives
from tests.pipelines.test_versions import SEQUENCE, make
from trainer.stream import JoinedStream, open_sources

BUCKET = "arrays"
MATRICES, COLUMNS = ("npy", "safetensors"), ("parquet", "lists.parquet", "feather", "arrow")
QUIET = {"progress": False, "index": "exact"}


def write(place: Path, form: str, vectors: np.ndarray, files: int = 1, **columns: list) -> Path:
    """Write rows as `files` files in the folder `place`, or one file beside it."""
    place.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(np.array_split(np.arange(len(vectors)), files)):
        at = place / f"part-{number:02d}.{form}"
        if form == "npy":
            np.save(at, vectors[rows])
        elif form == "safetensors":
            save_file({"vector": torch.from_numpy(vectors[rows])}, at)
        else:
            flat, width = pa.array(vectors[rows].reshape(-1)), vectors.shape[1]
            fixed = pa.FixedSizeListArray.from_arrays(flat, width)
            listed = pa.ListArray.from_arrays(pa.array(np.arange(len(rows) + 1) * width, pa.int32()), flat)
            made = {"vector": listed if form.startswith("lists") else fixed}
            made |= {name: pa.array([values[row] for row in rows]) for name, values in columns.items()}
            table = pa.table(made)
            if form.endswith("parquet"):
                pq.write_table(table, at, row_group_size=3)
            elif form == "feather":
                pa.feather.write_feather(table, at, chunksize=4)
            else:
                with pa.ipc.new_stream(at, table.schema) as stream:
                    stream.write_table(table, max_chunksize=5)
    return place


def write_pairs(path: Path, form: str, queries: list, documents: list) -> Path:
    """Write pairs, in qrels with pairs of the score 0 among them."""
    path = path / f"pairs.{form.rpartition('.')[2]}"
    if form == "parquet":
        pq.write_table(pa.table({"document": documents, "query": queries}), path)
        return path
    pairs = list(zip(queries, documents, strict=True))
    scored = [(q, d, 1) for q, d in pairs] + [(queries[0], d, 0) for d in documents]
    lines = {
        "header.csv": ["query,document", *(f"{q},{d}" for q, d in pairs)],
        "csv": [f"{q},{d}" for q, d in pairs],
        "tsv": [f"{q}\t{d}" for q, d in pairs],
        "beir.tsv": ["query-id\tcorpus-id\tscore", *(f"{q}\t{d}\t{s}" for q, d, s in scored)],
        "trec.txt": [f"{q} 0 {d} {s}" for q, d, s in scored],
    }
    path.write_text("\n".join(lines[form]) + "\n")
    return path


def bytes_of(out: Path) -> dict[str, bytes]:
    """All files of OUT, but for what tells of one run, or of the files that were read."""
    besides = {out / "data" / "_manifest.json", out / "queries" / "_manifest.json", out / "spent.json"}
    content = {
        str(each.relative_to(out)): each.read_bytes()
        for each in out.rglob("*")
        if each.is_file() and each not in besides
    }
    table = open_manifest(str(out / "queries"), "negatives")
    parents = {name: digest for name, digest in table.parents.items() if name == "queries"}
    return content | {"queries": table.model_copy(update={"parents": parents}).model_dump_json().encode()}


@settings(
    max_examples=15,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**32),
    queries=st.tuples(st.sampled_from((*MATRICES, *COLUMNS)), st.integers(1, 3), st.integers(3, 25)),
    documents=st.tuples(st.sampled_from((*MATRICES, *COLUMNS)), st.integers(1, 3), st.integers(3, 25)),
    dtype=st.sampled_from((np.float16, np.float32, np.float64)),
    metric=st.sampled_from(("inner", "cosine")),
    pairs=st.sampled_from((None, "parquet", "csv", "header.csv", "tsv", "beir.tsv", "trec.txt")),
    keyed=st.booleans(),
    width=st.integers(1, 8),
)
def test_a_row_holds_the_best_documents_that_are_not_its_own(
    tmp_path, seed, queries, documents, dtype, metric, pairs, keyed, width
):
    shutil.rmtree(tmp_path, ignore_errors=True)
    draw = np.random.default_rng(seed)
    sides = [draw.integers(-3, 4, (rows, 4)).astype(dtype) for _, _, rows in (queries, documents)]
    for side in sides:
        side[(side == 0).all(axis=1), 0] = 1
    keys = [[f"{name}{row}" for row in range(len(side))] for name, side in zip("qd", sides, strict=True)]
    named = [keyed and form in COLUMNS for form, _, _ in (queries, documents)]
    places = [
        write(tmp_path / name, form, side, files, **({"key": own, "text": own} if has_keys else {}))
        for name, (form, files, _), side, own, has_keys in zip(
            "qd", (queries, documents), sides, keys, named, strict=True
        )
    ]
    positives = random_rows(draw, len(sides[0]), len(sides[1]), 4 if pairs else 0)
    positives[0] = positives[0] or [0] * bool(pairs)
    options = {}
    if pairs:
        flat = [(q, d) for q, row in enumerate(positives) for d in row]
        columns = [
            [own[row] if has_keys else str(row) for row in rows]
            for own, has_keys, rows in zip(keys, named, zip(*flat, strict=True), strict=True)
        ]
        options["positives"] = write_pairs(tmp_path, pairs, *columns)
    out = tmp_path / "out"
    extremis.mine(*places, out=out, metric=metric, width=width, **options, **QUIET)

    if metric == "cosine":
        sides = [side.astype(np.float64) / np.linalg.norm(side.astype(np.float64), axis=1)[:, None] for side in sides]
        sides = [side.astype(np.float16 if dtype == np.float16 else np.float32) for side in sides]
    scores = sides[0].astype(np.float64) @ sides[1].astype(np.float64).T
    expected = brute_force(scores, [set(row) for row in positives], width)
    table = Table.open(str(out / "queries"), "negatives")
    ids, found, _ = read_negatives(table.url, table.manifest)
    assert ids.tolist() == list(range(len(scores)))
    assert ((found < 0) == (expected < 0)).all()
    best, mined = (np.take_along_axis(scores, np.maximum(each, 0), axis=1) for each in (expected, found))
    assert np.allclose(np.where(found < 0, 0, mined), np.where(found < 0, 0, best), atol=1e-6)
    assert not any({*row} & {*own} for row, own in zip(found.tolist(), positives, strict=True))
    if metric == "inner":
        assert (found == expected).all()

    data = DataLayout(str(out / "data"))
    rows, labels = Table.open(data.queries("train"), "queries").read(), Table.open(data.labels, "labels").read()
    own = list_column(rows, "label_ids")
    assert [own.values[a:b].tolist() for a, b in zip(own.offsets, own.offsets[1:], strict=False)] == positives
    assert rows["key"].to_pylist() == (keys[0] if named[0] else [str(row) for row in range(len(scores))])
    assert labels["text"].to_pylist() == (keys[1] if named[1] else [""] * len(sides[1]))
    assert ("text" in rows.column_names) is named[0]
    assert labels["frequency"].to_pylist() == np.bincount(own.values, minlength=len(sides[1])).tolist()
    vectors = open_mined(str(out))[1]
    assert vectors.parents == {"labels": Table.open(data.labels).digest}
    stored = np.float16 if dtype == np.float16 else np.float32
    assert matrix_column(vectors.read(), "vector").dtype == stored
    assert matrix_column(vectors.read(), "vector").tobytes() == sides[1].astype(stored).tobytes()


@pytest.fixture(scope="module")
def arrays() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(3)
    return draw.standard_normal((2500, 8)).astype(np.float32), draw.standard_normal((4100, 8)).astype(np.float32)


def test_every_form_and_cut_gives_the_same_tables(tmp_path, arrays):
    made = []
    for form, files in [("npy", 1), ("npy", 3), ("safetensors", 2), ("parquet", 1), ("feather", 2), ("arrow", 3)]:
        places = [
            write(tmp_path / f"{form}-{files}" / name, form, side, files)
            for name, side in zip("qd", arrays, strict=True)
        ]
        extremis.mine(*places, out=tmp_path / f"out-{form}-{files}", width=5, **QUIET)
        made.append(bytes_of(tmp_path / f"out-{form}-{files}"))
    assert len(made[0]) > 12
    assert all(each == made[0] for each in made)
    patterns = [f"{tmp_path}/npy-3/{name}/part-*.npy" for name in "qd"]
    extremis.mine(*patterns, out=tmp_path / "patterns", width=5, **QUIET)
    assert bytes_of(tmp_path / "patterns") == made[0]
    result = extremis.mine(*arrays, out=tmp_path / "at-hand", width=5, **QUIET)
    assert ([*result.to_json()], result.out) == (["out", "tables"], str(tmp_path / "at-hand"))
    with pytest.raises(InputError, match=r"these rows have no inputs.*in your own loop, give inputs='none'"):
        open_sources(DataLayout(str(tmp_path / "at-hand/data")), "train", label_texts=False)
    assert bytes_of(tmp_path / "at-hand") == made[0]
    big = [side.astype(">f4") for side in arrays]
    extremis.mine(*big, out=tmp_path / "big", width=5, **QUIET)
    assert bytes_of(tmp_path / "big") == made[0]


def test_worker_processes_write_the_same_bytes(tmp_path, arrays):
    for name, flags in (("here", ()), ("there", PROCESSES)):
        extremis.mine(*arrays, out=tmp_path / name, width=5, metric="cosine", beam_options=flags, **QUIET)
    assert bytes_of(tmp_path / "here") == bytes_of(tmp_path / "there")


def test_vectors_of_the_rows_of_a_version_are_joined_by_its_stream(tmp_path, arrays):
    """The version has two parts, so its shards have row groups of several sizes; its positives are left out."""
    make(tmp_path, SEQUENCE[:2])
    data, out = DataLayout(str(tmp_path / "data1")), tmp_path / "out"
    (rows,) = open_sources(data, "train", label_texts=False)
    sides = [side[:count] for side, count in zip(arrays, (rows.rows, Table.open(data.labels).rows), strict=True)]
    extremis.mine(*sides, positives=data.root, out=out, width=3, **QUIET)
    own = list_column(rows.table.read(), "label_ids")
    positives = [{*own.values[a:b].tolist()} for a, b in itertools.pairwise(own.offsets)]
    expected = brute_force(sides[0].astype(np.float64) @ sides[1].astype(np.float64).T, positives, 3)
    stream = JoinedStream([rows.with_negatives(str(out / "queries"))], len(sides[1]), batch=6, streams=2)
    stream.set_epoch(0)
    batches = list(stream)
    assert sorted(np.concatenate([batch.rows for batch in batches]).tolist()) == list(range(rows.rows))
    assert all((batch.hard == expected[batch.rows]).all() for batch in batches)

    before = bytes_of(out)
    extremis.mine(*sides, positives=data.root, out=out, width=3, **QUIET)
    assert bytes_of(out) == before
    (tmp_path / "pairs.csv").write_text("0,0\n")
    files = [write(tmp_path / name, "npy", side) for name, side in zip("qd", sides, strict=True)]
    words = ("mine", *files, "--out", out, "--width", "3", "--index", "exact", "--positives")
    refused(call(*words, tmp_path / "data0"), "20 vectors", "data0/queries/train has 12 rows", "row order")
    refused(call(*words, tmp_path / "pairs.csv"), "mined from different input", "--overwrite")
    assert bytes_of(out) == before
    assert call(*words, tmp_path / "pairs.csv", "--overwrite").status == 0
    refused(call(*words, data.root), "mined from different input", "--overwrite")
    assert call(*words, data.root, "--overwrite").status == 0
    assert bytes_of(out) == before
    refused(call(*words, data.root, "--query-texts", tmp_path / "pairs.csv"), "keys and texts come from")


def test_bfloat16_and_other_names(tmp_path, arrays):
    """Of tensors, columns, and of documents alone; keys and texts beside an array; pairs by row where none is a key."""
    queries, documents = (torch.from_numpy(side[:40]).to(torch.bfloat16) for side in arrays)
    save_file({"ids": torch.arange(40), "embeddings": queries}, tmp_path / "q.safetensors")
    np.save(tmp_path / "d.npy", documents.float().numpy())
    pq.write_table(
        pa.table({"doc": [f"d{row}" for row in range(40)], "body": ["a text"] * 40}), tmp_path / "texts.parquet"
    )
    (tmp_path / "pairs.csv").write_text("".join(f"{row},{(row + 1) % 40}\n" for row in range(40)))
    done = call(
        *("mine", tmp_path / "q.safetensors", tmp_path / "d.npy", "--document-texts", tmp_path / "texts.parquet"),
        *("--fields", "labels.key=doc,labels.text=body", "--positives", tmp_path / "pairs.csv"),
        *("--out", tmp_path / "out", "--width", "3"),
    )
    assert done.status == 0, done.err
    assert "40 pairs, identified by row number and row number" in done.err
    labels = Table.open(str(tmp_path / "out/data/labels")).read()
    assert labels["key"].to_pylist()[:2] == ["d0", "d1"]
    assert set(labels["text"].to_pylist()) == {"a text"}
    own = list_column(Table.open(str(tmp_path / "out/data/queries/train")).read(), "label_ids")
    assert own.values.tolist() == [(row + 1) % 40 for row in range(40)]
    stored = matrix_column(open_mined(str(tmp_path / "out"))[0].read(), "vector")
    assert (stored == queries.float().numpy()).all()


class TestAnOutputThatIsThere:
    @pytest.fixture
    def files(self, tmp_path, arrays) -> list[Path]:
        return [write(tmp_path / name, "npy", side[:60]) for name, side in zip("qd", arrays, strict=True)]

    def mine(self, files: list[Path], *more: str | Path):
        return call("mine", *files, "--out", files[0].parent / "out", "--width", "4", *more)

    def test_the_same_input_is_recognised_and_another_is_refused(self, files, arrays):
        out = files[0].parent / "out"
        self.mine(files)
        stamps = {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")}
        elsewhere = files[0].rename(files[0].parent / "elsewhere")
        assert "already mined" in self.mine([elsewhere, files[1]]).err
        assert {path: path.stat().st_mtime_ns for path in out.rglob("*.parquet")} == stamps
        before = bytes_of(out)
        refused(self.mine([elsewhere, files[1]], "--width", "3"), "width was 4, now it is 3", "--overwrite")
        write(elsewhere, "npy", arrays[0][60:120])
        refused(self.mine([elsewhere, files[1]]), "queries was", "SHA-256", "--overwrite")
        refused(self.mine([elsewhere, files[1]], "--metric", "cosine"), "metric was 'inner'")
        assert bytes_of(out) == before
        assert self.mine([elsewhere, files[1]], "--overwrite").status == 0
        fresh = call("mine", elsewhere, files[1], "--out", out.parent / "fresh", "--width", "4")
        assert fresh.status == 0
        assert bytes_of(out) == bytes_of(out.parent / "fresh")

    def test_a_file_that_changes_while_it_is_searched_is_an_error(self, files, arrays, monkeypatch):
        out, searched = files[0].parent / "out", search.search_group

        def change_first(*task):
            write(files[1], "npy", arrays[1][60:120])
            return searched(*task)

        monkeypatch.setattr(search, "search_group", change_first)
        refused(self.mine(files), "the file changed while it was read", str(files[1]))
        assert not (out / "queries").exists()
        monkeypatch.undo()
        assert self.mine(files, "--overwrite").status == 0
        assert call("mine", *files, "--out", out.parent / "fresh", "--width", "4").status == 0
        assert bytes_of(out) == bytes_of(out.parent / "fresh")

    def test_tables_of_a_run_are_not_replaced(self, files):
        out = files[0].parent / "out"
        self.mine(files)
        shutil.rmtree(out / "data")
        refused(self.mine(files), "mined from different input")


@pytest.mark.parametrize(
    "there",
    [
        ".staging/*/data/labels/part*",  # written by the import
        pytest.param("data/labels/_manifest.json", marks=pytest.mark.slow),  # published by it, but not all
        pytest.param("data/_manifest.json", marks=pytest.mark.slow),
        ".staging/phases/*/tables/queries/*.record",  # a finished shard of the mining
    ],
)
def test_a_killed_mining_goes_on_to_the_same_bytes(tmp_path, arrays, there):
    files = [write(tmp_path / name, "npy", np.tile(side, (4, 1))) for name, side in zip("qd", arrays, strict=True)]
    words = ("mine", *files, "--width", "4", "--block-rows", "3000", "--out")
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(*words, out), env=environment(), stderr=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None and not any(out.glob(there)):
        time.sleep(0.001)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert call(*words, tmp_path / "whole").status == 0
    done = call(*words, out)
    assert done.status == 0, done.err
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    assert not (out / ".staging").exists()


def test_two_processes_on_one_output_do_not_hurt_each_other(tmp_path, arrays):
    """Whichever is first, the table is whole, and the other is told that it is being mined, or finds it mined."""
    files = [write(tmp_path / name, "npy", side) for name, side in zip("qd", arrays, strict=True)]
    words, out = ("mine", *files, "--width", "4", "--out"), tmp_path / "out"
    both = [subprocess.Popen(command(*words, out), env=environment(), stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate()[1].decode() for process in both]
    assert 0 in [process.returncode for process in both], said
    for process, words_said in zip(both, said, strict=True):
        assert process.returncode == 0 or (process.returncode, "being mined by process" in words_said) == (5, True)
    assert call(*words, tmp_path / "alone").status == 0
    assert bytes_of(out) == bytes_of(tmp_path / "alone")


def test_input_and_output_on_an_object_store(tmp_path, arrays, bucket, store):
    import fsspec

    for name, side in zip("qd", arrays, strict=True):
        place = write(tmp_path / name, "parquet" if name == "q" else "npy", side[:300], 2)
        fsspec.filesystem("s3").put(f"{place}/", f"s3://{BUCKET}/{name}/", recursive=True)
    extremis.mine(tmp_path / "q", tmp_path / "d", out=tmp_path / "out", width=4, **QUIET)
    extremis.mine(f"s3://{BUCKET}/q", f"s3://{BUCKET}/d", out=f"s3://{BUCKET}/out", width=4, **QUIET)
    here, there = (Table.open(f"{root}/out/queries") for root in (tmp_path, f"s3://{BUCKET}"))
    assert here.manifest == there.manifest


class TestBadInput:
    """One message each, and nothing left behind."""

    GOOD = np.eye(6, dtype=np.float32)

    def mine(self, folder: Path, queries: Path | str, *more: str | Path, documents: Path | None = None):
        documents = documents or write(folder / "good", "npy", self.GOOD)
        done = call("mine", queries, documents, "--out", folder / "out", *more)
        assert not (folder / "out").exists() or done.status == 0
        return done

    def good(self, folder: Path) -> Path:
        return write(folder / "good", "npy", self.GOOD)

    def spoiled(self, value: float, dtype: type = np.float32) -> np.ndarray:
        vectors = self.GOOD.astype(dtype)
        vectors[4, 1] = value
        return vectors

    @pytest.mark.parametrize(
        ("form", "vectors", "said"),
        [
            ("npy", np.eye(5, dtype=np.float32), ["vectors of 5 dimensions", "have 6"]),
            ("npy", np.zeros((3, 6), np.int64), ["array of int64", "float16 or float32"]),
            ("npy", np.zeros(6, np.float32), ["float32 [6]"]),
            ("npy", np.empty((0, 6), np.float32), ["no rows"]),
            ("npy", np.asfortranarray(np.ones((4, 6), np.float32)), ["column by column", "ascontiguousarray"]),
        ],
    )
    def test_arrays_of_another_kind(self, tmp_path, form, vectors, said):
        (tmp_path / "q").mkdir()
        np.save(tmp_path / "q" / "part.npy", vectors)
        refused(self.mine(tmp_path, tmp_path / "q"), *said)

    @pytest.mark.parametrize("form", ["npy", "lists.parquet", "arrow"])
    def test_vectors_that_are_not_finite_or_zero(self, tmp_path, form):
        for value, dtype in ((np.nan, np.float32), (np.inf, np.float16), (1e300, np.float64)):
            place = write(tmp_path / f"{np.dtype(dtype)}", form, self.spoiled(value, dtype), files=2)
            refused(self.mine(tmp_path, place), f"part-01.{form}, row 1", "not finite")
        place = write(tmp_path / "zero", form, np.vstack([self.GOOD, self.GOOD * 0]))
        refused(self.mine(tmp_path, place, "--metric", "cosine"), "row 6", "zero", "no cosine")
        assert self.mine(tmp_path, place).status == 0

    def test_files_that_do_not_go_together(self, tmp_path):
        place = write(tmp_path / "mixed", "npy", self.GOOD)
        np.save(place / "part-01.npy", self.GOOD.astype(np.float16))
        refused(self.mine(tmp_path, place), "part-01.npy: dtype float16, but float32 in")
        np.save(place / "part-01.npy", self.GOOD[:, :3])
        refused(self.mine(tmp_path, place), "part-01.npy: dimension 3, but 6 in")
        (tmp_path / "empty").mkdir()
        refused(self.mine(tmp_path, tmp_path / "empty", "--metric", "inner"), "no vectors here; found: nothing")
        refused(self.mine(tmp_path, tmp_path / "q.npy"), "q.npy: file not found")
        (tmp_path / "q.csv").touch()
        refused(
            call("mine", place / "part-00.npy", tmp_path / "q.csv", "--out", tmp_path / "o"),
            "q.csv: no vectors",
            "of another format",
        )

    def test_files_that_are_not_what_their_name_says(self, tmp_path):
        for form in ("npy", "safetensors", "parquet", "arrow"):
            bad = tmp_path / f"bad.{form}"
            bad.write_bytes(b"no such thing, but long enough to be one")
            refused(self.mine(tmp_path, bad), f"bad.{form}: not a ")
        objects = tmp_path / "objects.npy"
        np.save(objects, np.array([{"a": 1}], dtype=object), allow_pickle=True)
        refused(self.mine(tmp_path, objects), "does not unpickle objects")
        torn = tmp_path / "torn.npy"
        torn.write_bytes(b"\x93NUMPY\x01\x00\x0b\x00{'descr': (" + bytes(40))
        refused(self.mine(tmp_path, torn), "torn.npy: not a .npy file, or damaged: has a header that cannot be")
        short = write(tmp_path / "short", "npy", self.GOOD) / "part-00.npy"
        short.write_bytes(short.read_bytes()[:-4])
        refused(self.mine(tmp_path, short), "too short for 6 × 6")
        pq.write_table(pa.table({"key": ["a"], "text": ["b"]}), tmp_path / "none.parquet")
        refused(self.mine(tmp_path, tmp_path / "none.parquet"), "no column 'vector'", "key (string), text (string)")
        save_file({"a": torch.zeros(2, 6), "b": torch.zeros(2, 6)}, tmp_path / "two.safetensors")
        refused(self.mine(tmp_path, tmp_path / "two.safetensors"), "no tensor 'vector'", "a (F32 [2, 6])", "--fields")

    def test_rows_of_columns_that_do_not_fit(self, tmp_path):
        lists = pa.table({"vector": pa.array([[1.0, 2.0], [1.0]], pa.list_(pa.float32()))})
        pq.write_table(lists, tmp_path / "ragged.parquet")
        refused(
            self.mine(tmp_path, tmp_path / "ragged.parquet", documents=tmp_path / "ragged.parquet"),
            "row 1",
            "1 numbers",
        )
        keys = write(tmp_path / "keys", "parquet", self.GOOD, key=["a", "b", "c", "b", "e", "f"])
        refused(self.mine(tmp_path, keys), "row 3", "'b' is also the key of row 1")
        none = write(tmp_path / "none", "parquet", self.GOOD, key=["a", None, "c", "b", "e", "f"])
        refused(self.mine(tmp_path, none), "row 1: no key")
        other = write(tmp_path / "other", "parquet", self.GOOD[:4], key=list("abcd"))
        refused(self.mine(tmp_path, self.good(tmp_path), "--document-texts", other), "4 rows, but 6 vectors")
        refused(
            self.mine(tmp_path, keys, "--fields", "key=id"), "--fields key=id", "no such column", "found: vector, key"
        )

    def test_pairs(self, tmp_path):
        keys = write(tmp_path / "keys", "parquet", self.GOOD, key=[f"q{row}" for row in range(6)])
        pairs = tmp_path / "pairs.csv"
        for content, *said in (
            ("q1,0\nq9,1\n", "row 2", "query 'q9'", "keys"),
            ("query,document\nq1,0\nq2,6\n", "row 3", "document '6'", "6 rows"),
            ("q1,0,1,2,3\n", "Expected a query, a document"),
            ("q1,0,high\n", "row 1", "score 'high' is not a number"),
            ("q1,0\nq2\n", "Expected 2 columns"),
            ("query,document\n", "no pairs"),
            ("", "the file is empty"),
        ):
            pairs.write_text(content)
            refused(self.mine(tmp_path, keys, "--positives", pairs), "pairs.csv", *said)
        refused(self.mine(tmp_path, keys, "--positives", tmp_path / "no.csv"), "no.csv")

    def test_options_and_places_of_the_other_kind(self, tmp_path, data):
        place = write(tmp_path / "q", "npy", self.GOOD)
        refused(call("mine", place, place), "--out")
        for flag in (["--epoch", "3"], ["--by", "labels"], ["--for-epoch", "2"], ["--watch"]):
            refused(self.mine(tmp_path, place, *flag), f"{flag[0]}: ", "vector files")
        refused(call("mine", data, place / "part-00.npy", "--out", tmp_path / "out"), f"{data}: no vectors here")
        for words in (["train", "astra", place / "part-00.npy", tmp_path / "run"], ["inspect", place / "part-00.npy"]):
            refused(call(*words), "part-00.npy", "extremis mine")
        with pytest.raises(InputError, match="no vectors here"):
            extremis.mine(data, tmp_path / "run", metric="cosine", out=tmp_path / "out", progress=False)
        for folder in (data, data / "queries/train"):
            with pytest.raises(InputError, match="no complete dump to mine"):
                extremis.mine(folder, tmp_path / "run", progress=False)
        with pytest.raises(InputError, match="does not unpickle objects"):
            extremis.mine(np.array([None]), self.GOOD, out=tmp_path / "out", progress=False)
