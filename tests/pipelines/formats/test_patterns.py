"""INPUT alone may be a pattern: `*` and `?` are one unless exactly this name exists; all else stands for itself."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.arrays import urls_of
from pipelines.formats.base import list_files
from pipelines.formats.keyed import Texts
from schemas import storage
from tests.command import call
from tests.places import ALL, in_memory

SEGMENTS = st.text("ab[]{}!*?-", min_size=1, max_size=5)
PATHS = st.lists(SEGMENTS, min_size=1, max_size=2).map("/".join)


@given(st.lists(PATHS, max_size=6, unique=True), PATHS)
def test_a_pattern_is_compared_by_brute_force(paths: list[str], pattern: str) -> None:
    folders = {path.partition("/")[0] for path in paths if "/" in path}
    paths = [path for path in paths if path not in folders]
    store = in_memory()
    for path in paths:
        store.put(path, b"1")
    root, names = list_files(f"{store.root}/{pattern}")
    found = {storage.join(root, name).removeprefix(f"{store.root}/") for name in names}
    shape = re.escape(pattern).replace(r"\*", "[^/]*").replace(r"\?", "[^/]")
    if pattern in {*paths, *folders} or not set(pattern) & set("*?"):
        assert root == f"{store.root}/{pattern}"
        assert found == {path for path in paths if path.startswith(f"{pattern}/")}
    else:
        assert found == {each for each in {*paths, *folders} if re.fullmatch(shape, each)}


@pytest.mark.parametrize("name", [ALL, "a*", "a?[ab]"])
def test_an_input_of_exactly_this_name_is_no_pattern(tmp_path: Path, name: str) -> None:
    for place, label in ((name, "sea"), (re.sub(r"\[ab\]|[*?]", "a", name), "land")):
        (tmp_path / place).mkdir()
        (tmp_path / place / "train.csv").write_text(f"text,label\none ship,{label}\n")
        (tmp_path / f"{place}.csv").write_text(f"text,label\none ship,{label}\n")
        (tmp_path / f"{place}.npy").write_bytes(b"")
    for number, source in enumerate((tmp_path / name, tmp_path / f"{name}.csv")):
        out = tmp_path / str(number)
        done = call("shard", source, out, "--tokenizer", "train:300")
        assert done.status == 0, done.err
        assert storage.list_names(str(out / "labels"))
        assert b"sea" in b"".join(path.read_bytes() for path in (out / "labels").glob("*.parquet"))
        assert Texts(str(source)).places() == [str(source if source.suffix else source / "train.csv")]
    assert urls_of(str(tmp_path / f"{name}.npy")) == [str(tmp_path / f"{name}.npy")]
