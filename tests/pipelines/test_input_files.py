"""Files that people have: damaged, changing, hidden and nested ones, and filter files. Each is read whole, or said."""

import bz2
import gzip
import io
import lzma
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pipelines.formats import base
from pipelines.formats.base import list_files, notes_on
from pipelines.formats.keyed import Texts
from pipelines.sharding import read
from schemas import storage
from schemas.errors import InputError
from schemas.table import Table
from tests.command import call, refused
from tests.faults import Proxy

BUCKET = "states"
CASES = Path(__file__).parents[1] / "cases"


def zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


CODECS: dict[str, Callable[[bytes], bytes]] = {
    "gz": lambda data: gzip.compress(data, mtime=0),
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": zstd,
}


def content_of(name: str, data: bytes) -> bytes | None:
    """Return what is read from `data` in a file called `name`; None if it is refused with this name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "open_file", lambda url: io.BytesIO(data))
        try:
            return b"".join(base.read_chunks(name))
        except InputError as error:
            return None if str(error).startswith(f"{name}: ") else b"unnamed"


@pytest.mark.parametrize("codec", CODECS)
def test_damage_to_any_byte_of_several_streams_is_refused_or_changes_nothing(codec: str) -> None:
    draw, place = random.Random(1), f"a.{codec}"
    parts = [bytes(draw.choices(b"abcdef \n", k=60)) for _ in range(3)]
    streams = [CODECS[codec](part) for part in parts]
    whole, ends = b"".join(streams), {sum(map(len, streams[:n])) for n in range(4)}
    assert content_of(place, whole) == b"".join(parts)
    found: Counter[str] = Counter()
    for at in range(len(whole)):
        kinds = {f"flip {bit}": bytes([whole[at] ^ 1 << bit]) for bit in range(8)}
        kinds |= {"zero": b"\0", "random": bytes([draw.randrange(256)]), "hole": b""}
        for byte in kinds.values():
            got = content_of(place, whole[:at] + byte + whole[at + 1 :])
            assert got in (None, b"".join(parts)), (codec, at, byte)
            found["refused" if got is None else "the same"] += 1
        if at not in ends:  # a cut at a stream's end leaves a whole file
            assert content_of(place, whole[:at]) is None, (codec, "cut", at)
    assert found["refused"] > 10 * found["the same"] or codec == "gz"  # a gzip header has a time and a system


@given(st.lists(st.tuples(st.binary(max_size=40), st.integers(0, 3)), min_size=1, max_size=5), st.integers(1, 90))
def test_xz_streams_with_padding_are_one_file(streams: list[tuple[bytes, int]], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_CHUNK", chunk)
        packed = b"".join(lzma.compress(data) + b"\0" * 4 * words for data, words in streams)
        assert content_of("a.xz", packed) == b"".join(data for data, _ in streams)
        assert content_of("a.xz", packed + b"\0") is None


@pytest.mark.parametrize("case", sorted(path.name for path in (CASES / "bz2-xz-damaged-stream").iterdir()))
def test_a_damaged_later_stream_is_refused(case: str, tmp_path: Path) -> None:
    folder = CASES / "bz2-xz-damaged-stream" / case
    (damaged,) = (path for path in folder.iterdir() if path.suffix in (".bz2", ".xz"))
    refused(call("shard", folder, tmp_path / "out", "--tokenizer", "train:300"), damaged.name, "damaged")
    assert not (tmp_path / "out").exists()
    with pytest.raises(InputError, match="damaged"):
        list(Texts(str(damaged), form="text").batches(10, features=False))


@pytest.mark.parametrize("case", ["zst_long", "zst_long31"])
def test_a_long_window_is_said_to_be_one(case: str, tmp_path: Path) -> None:
    done = call("shard", CASES / "zstd-long-window" / case, tmp_path / "out")
    refused(done, "train.jsonl.zst: zstd with a window of more than 128 MiB", "zstd -dc -M2048MB FILE | zstd")
    assert "damaged" not in done.err


def test_files_without_checksums_are_said(tmp_path: Path) -> None:
    data = b'{"key": "a", "text": "a ship", "labels": ["sea"]}\n'
    (tmp_path / "labels.jsonl.xz").write_bytes(lzma.compress(b'{"key": "sea", "text": "sea"}\n', check=lzma.CHECK_NONE))
    (tmp_path / "test.jsonl.zst").write_bytes(zstd(data))
    (tmp_path / "train.jsonl.zst").write_bytes(bytes(pa.compress(data, "zstd")))
    (tmp_path / "val.jsonl.xz").write_bytes(lzma.compress(data))
    done = call("shard", tmp_path, tmp_path / "out", "--tokenizer", "train:300")
    assert done.status == 0, done.err
    names = f"{tmp_path}/labels.jsonl.xz, {tmp_path}/train.jsonl.zst"
    assert f"damage cannot be noticed, because these files have no checksums: {names}\n" in done.err, done.err


@pytest.mark.parametrize("name", ["train.jsonl", "labels.jsonl"])
def test_input_that_changes_while_it_is_read_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(CASES / "hidden-and-nested" / "s11", tmp_path / "in")
    reads = read.read_part

    def read_and_append(number: int, plan: read.ReadPlan):  # type: ignore[no-untyped-def]
        yield from reads(number, plan)
        if plan.inputs.parts[number].name == name:
            with (tmp_path / "in" / name).open("a") as file:
                file.write('{"key": "new", "text": "new", "labels": ["sea"]}\n')

    monkeypatch.setattr(read, "read_part", read_and_append)
    done = call("shard", tmp_path / "in", tmp_path / "out", "--tokenizer", "train:300")
    refused(done, f"/{name}: the file changed while it was read", "Run the same command again")
    assert not (tmp_path / "out" / "_manifest.json").exists()
    monkeypatch.undo()
    done = call("shard", tmp_path / "in", tmp_path / "out", "--tokenizer", "train:300")
    assert done.status == 0, done.err
    keys = {key for rows in Table.open(f"{tmp_path}/out/queries/train").batches(["key"]) for key in rows["key"]}
    assert ("new" in map(str, keys)) == (name == "train.jsonl")


@pytest.mark.parametrize("new", [b"b", b"longer"])
def test_the_state_of_a_file_differs_after_a_change(new: bytes, tmp_path: Path, store: Proxy) -> None:
    for url in (f"{tmp_path}/a", "memory://states/a", f"s3://{BUCKET}/a"):
        storage.write_bytes(url, b"a")
        before = storage.state(url)
        assert storage.state(url) == before
        storage.write_bytes(url, new)
        assert storage.state(url) != before


def test_texts_that_change_while_they_are_read_are_refused(tmp_path: Path) -> None:
    place = tmp_path / "a.txt"
    place.write_text("one\ntwo\n")
    batches = Texts(str(tmp_path)).batches(1, features=False)
    next(batches)
    place.write_text("one\ntwo\nthree\n")
    with pytest.raises(InputError, match=r"a\.txt: the file changed while it was read"):
        list(batches)


@pytest.mark.parametrize(
    ("case", "rows", "unread"),
    [
        ("s1", 60, None),  # Spark's folder train.parquet, with _SUCCESS
        ("s4", 30, "train/more/"),
        ("s5", 60, None),  # macOS's ._a.jsonl
        ("s11", 30, "train (1).jsonl"),
    ],
)
def test_hidden_files_are_skipped_and_other_files_are_said(
    case: str, rows: int, unread: str | None, tmp_path: Path
) -> None:
    folder = CASES / "hidden-and-nested" / case
    done = call("shard", folder, tmp_path / "out", "--tokenizer", "train:300", "--json")
    assert done.status == 0, done.err
    assert done.json["rows"]["train"] == rows
    assert f"{folder}: not read: {unread}\n" in done.err if unread else "not read" not in done.err
    assert Table.open(f"{tmp_path}/out/rejects").rows == 0


def test_a_folder_of_folders_is_refused_by_name(tmp_path: Path) -> None:
    refused(call("shard", CASES / "hidden-and-nested/s3", tmp_path / "out"), "found: labels.parquet, train/day=1/")


def test_texts_skip_hidden_names_but_read_a_file_that_is_named_whole() -> None:
    folder = CASES / "hidden-and-nested" / "prd"
    for source in (folder, f"{folder}/*.txt"):
        texts = Texts(str(source))
        assert [url.rsplit("/", 1)[-1] for url in texts.places()] == ["a1.txt", "a[1].txt", "b#2 %41.txt"]
        assert list(texts.notes()) == []
    assert Texts(f"{folder}/._a.txt").places() == [f"{folder}/._a.txt"]


NAMES = st.text("ab._x-", min_size=1, max_size=6).filter(lambda name: set(name) - {"."} and not name.startswith(".tmp"))


@given(st.dictionaries(NAMES, st.none() | st.lists(NAMES, min_size=1, max_size=2, unique=True), max_size=5))
def test_every_visible_file_is_listed_and_read_or_said(
    tmp_path_factory: pytest.TempPathFactory, names: dict[str, list[str] | None]
) -> None:
    root = tmp_path_factory.mktemp("tree")
    files = [f"{name}/{each}" for name, inside in names.items() for each in inside or ()]
    files += [name for name, inside in names.items() if inside is None]
    for name in files:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).with_name(f"{(root / name).name}.txt").write_text("x")
    visible = sorted(f"{n}.txt" for n in files if not any(part.startswith((".", "_")) for part in n.split("/")))
    assert list_files(str(root)) == (str(root), visible)
    said = "".join(notes_on(str(root), [f"{root}/{name}" for name in visible[1:]]))
    assert said == (f"{root}: not read: {visible[0]}" if visible else "")


@pytest.mark.parametrize("case", ["attentionxml", "beir", "csv", "jsonl", "parquet"])
def test_filter_files_beside_data_with_keys_are_refused_by_name(case: str, tmp_path: Path) -> None:
    folder = CASES / "filter-ignored" / case
    if not folder.exists():
        folder = tmp_path / "in"
        folder.mkdir()
        rows = pa.table({"key": ["a", "b"], "text": ["a ship", "a rose"], "labels": [["sea"], ["sea"]]})
        labels = pa.table({"key": ["sea"], "text": ["sea"]})
        for name, table in (("train", rows), ("test", rows), ("labels", labels)):
            if case == "parquet":
                pq.write_table(table, folder / f"{name}.parquet")
            else:
                (folder / f"{name}.jsonl").write_text(table.to_pandas().to_json(orient="records", lines=True))
        (folder / "filter_labels_test.txt").write_text("0 0\n")
    refused(call("shard", folder, tmp_path / "out"), "filter_labels_test.txt: a filter file names points", "xc-text")
    assert not (tmp_path / "out").exists()
