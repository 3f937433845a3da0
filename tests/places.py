"""Names that other programs take for something else, what they would take them for, and stores to try them on."""

import re
import shutil
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, unquote_plus

from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import strategies as st

if TYPE_CHECKING:
    from tests.s3 import Bucket

# Blanks, what URLs and shells give a meaning, patterns, quotes, accents, and an emoji; two letters that patterns match.
CHARACTERS = " #%+&;=[]{}*?'\"éü🎉,!()$-.ab2"
ALL = "a [ab]{a,b}*?#%20+&;='\"é🎉"  # each of them in one name
NAMES = st.one_of(
    st.text(CHARACTERS, min_size=1, max_size=12),
    st.lists(st.sampled_from(["[ab]", "[!a]", "{a,b}", "*", "**", "?", "%41", "#1", "a", "b", " "]), min_size=1).map(
        "".join
    ),
).filter(lambda name: name.strip(".") and len(name) <= 24)


def decoys(name: str) -> list[str]:
    """Names for which a pattern, a URL or a careless program takes `name`."""
    brackets = re.sub(r"\[!?([^\]])[^\]]*\]", r"\1", name)
    found = {
        brackets,
        re.sub(r"[*?]", "a", brackets),
        re.sub(r"[*?]", "", brackets),
        re.sub(r"[*?]", "a", name),
        re.sub(r"\{([^,}]*)[^}]*\}", r"\1", name),
        *(name[: name.index(character)] for character in "#?;&%[{*+=, " if character in name),
        unquote_plus(name),
        quote(name),
        name.strip(),
        unicodedata.normalize("NFD", name),
        name.replace("\\", ""),
        name + "a",
        name[:-1],
        "a",
    }
    return sorted(other for other in found - {name} if other.strip(".") and not set(other) & set("/\0"))


@dataclass
class Store:
    """A store whose places are below `root`; its files as their owner sees and changes them, past fsspec.

    `files(prefix)`: content by name, of names that begin with `prefix`; `stamps()`: what tells contents apart, by name.
    """

    root: str
    files: Callable[[str], dict[str, bytes]]
    stamps: Callable[[], Mapping[str, object]]
    put: Callable[[str, bytes], None]
    clear: Callable[[], None]


def on_disk(folder: Path, scheme: str = "") -> Store:
    """Return `folder`, which need not be there yet, as a store."""

    def files(prefix: str = "") -> dict[str, bytes]:
        paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
        return {name: path.read_bytes() for name, path in paths.items() if name.startswith(prefix)}

    def put(name: str, body: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)

    return Store(f"{scheme}{folder}", files, files, put, lambda: shutil.rmtree(folder, ignore_errors=True))


def in_memory() -> Store:
    """Return fsspec's `memory://`, emptied."""
    memory, stored = MemoryFileSystem(), MemoryFileSystem.store
    stored.clear()

    def files(prefix: str = "") -> dict[str, bytes]:
        paths = {path.removeprefix("/places/"): path for path in stored}
        return {name: bytes(stored[path].getbuffer()) for name, path in paths.items() if name.startswith(prefix)}

    def put(name: str, body: bytes) -> None:
        memory.pipe_file(f"/places/{name}", body)

    return Store("memory://places", files, files, put, stored.clear)


def in_bucket(bucket: "Bucket") -> Store:
    """Return a bucket as a store."""

    def clear() -> None:
        for key in bucket.keys("places/"):
            bucket.remove(f"places/{key}")

    def put(name: str, body: bytes) -> None:
        bucket.put(f"places/{name}", body)

    def files(prefix: str = "") -> dict[str, bytes]:
        return {f"{prefix}{key}": body for key, body in bucket.objects(f"places/{prefix}").items()}

    return Store(f"s3://{bucket.name}/places", files, lambda: bucket.stamps("places/"), put, clear)
