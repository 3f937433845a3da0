import bz2
import gzip
import hashlib
import lzma
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.formats import base
from schemas import storage
from schemas.errors import InputError

LINE = st.binary(max_size=30).map(lambda line: line.translate(None, b"\r\n\xef\xff\xfe"))


@settings(deadline=None)
@given(st.lists(LINE, min_size=1, max_size=20), st.booleans(), st.integers(1, 7), st.integers(1, 60))
def test_blocks_hold_every_line_once(content: list[bytes], ends: bool, block: int, chunk: int) -> None:
    if not ends and not content[-1]:
        content[-1] = b"x"
    data = gzip.compress(b"\n".join(content) + (b"\n" if ends else b""))
    url = "memory://lines/some.gz"
    storage.write_bytes(url, data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_CHUNK", chunk)
        blocks = [batch["line"].to_pylist() for batch in base.LineBlocks(url, block)]
        identity = base.identify(url)
    assert [line for some in blocks for line in some] == content
    assert all(len(some) == block for some in blocks[:-1])
    assert identity == (len(data), hashlib.sha256(data).hexdigest())


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=9).map(lambda line: line.translate(None, b"\r\n")), min_size=1, max_size=9), st.data()
)
def test_marks_and_line_ends_of_other_systems_do_not_show(content: list[bytes], data: st.DataObject) -> None:
    content[0] = b"head"
    ended = data.draw(st.booleans()) or not content[-1]
    ends = [data.draw(st.sampled_from([b"\n", b"\r\n"])) for _ in content]
    ends[-1] = ends[-1] if ended else b""
    mark = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf"]))
    url = "memory://lines/other"
    storage.write_bytes(url, mark + b"".join(line + end for line, end in zip(content, ends, strict=True)))
    skip = data.draw(st.integers(0, len(content)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "_CHUNK", data.draw(st.integers(1, 20)))
        blocks = base.LineBlocks(url, 4, skip)
        assert [line for batch in blocks for line in batch["line"].to_pylist()] == content[skip:]
        assert blocks.ended == ended
        assert base.first_line(url) == b"head"


@pytest.mark.parametrize("data", [b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff"])
def test_a_mark_alone_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(InputError, match="the file is empty"):
        list(base.LineBlocks(str(tmp_path / "a"), 5))


def test_several_gzip_members_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"one\ntw") + gzip.compress(b"o\n"))
    (batch,) = base.LineBlocks(str(tmp_path / "a.gz"), 10)
    assert batch["line"].to_pylist() == [b"one", b"two"]


CODECS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": lambda d: pa.compress(d, "zstd")}


@pytest.mark.parametrize("suffix", CODECS)
def test_every_codec_by_its_suffix(tmp_path: Path, suffix: str) -> None:
    content = b"".join(b"line %d\n" % i for i in range(20_000))
    place = tmp_path / f"a.jsonl{suffix}"
    packed = bytes(CODECS[suffix](content))
    for data in (packed, packed + packed):
        place.write_bytes(data)
        got = [line for batch in base.LineBlocks(str(place), 3000) for line in batch["line"].to_pylist()]
        assert got == content.splitlines() * (len(data) // len(packed))
    place.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(InputError, match="incomplete"):
        list(base.LineBlocks(str(place), 3000))
    place.write_bytes(b"plain text, not compressed\n" * 10)
    with pytest.raises(InputError, match=r"not a \w+ file"):
        list(base.LineBlocks(str(place), 3000))


def test_a_plain_file_of_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\n\nthree")
    (batch,) = base.LineBlocks(str(tmp_path / "a.txt"), 10)
    assert batch["line"].to_pylist() == [b"one", b"", b"three"]


WHOLE = gzip.compress(b'{"title": "a"}\n' * 5000 + bytes(range(256)) * 40, compresslevel=1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (gzip.compress(b"", mtime=0), "the file is empty"),
        (b'{"title": "plain"}\n', r"not a gzip file.*compress a plain file with `gzip`"),
        (WHOLE[: len(WHOLE) // 2], r"incomplete: the gzip stream stops after \d+ bytes"),
        (WHOLE[:-3], "incomplete"),
        (WHOLE[:-8] + b"\0" * 8, "not a gzip file, or damaged"),
        (WHOLE[:40] + b"\xff" * 30 + WHOLE[70:], "damaged"),
        (WHOLE + b"garbage", "damaged"),
    ],
)
def test_what_is_no_whole_gzip_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    place = tmp_path / "trn.json.gz"
    place.write_bytes(data)
    with pytest.raises(InputError, match=message) as caught:
        list(base.LineBlocks(str(place), 100))
    assert str(place) in str(caught.value)


def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(base, "_CHUNK", 300)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"short\n" + b"x" * 5000))
    with pytest.raises(InputError, match="a line is longer than 1,000 bytes"):
        list(base.LineBlocks(str(tmp_path / "a.gz"), 10))


def test_a_missing_file_is_named() -> None:
    with pytest.raises(InputError, match="memory://lines/none: file not found"):
        list(base.LineBlocks("memory://lines/none", 10))
