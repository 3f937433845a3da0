"""Identity of a data set: the content of its input files."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pipelines.formats import lines
from pipelines.formats.base import Inputs

_THREADS = 8

Identity = dict[str, dict[str, Any]]


def files_of(inputs: Inputs) -> tuple[str, ...]:
    """List the URLs of all input files, each once."""
    return tuple(sorted({url for _, url in _places(inputs)}))


def read_files(inputs: Inputs) -> dict[str, tuple[int, str]]:
    """Return (bytes, SHA-256) of every input file by its URL. Raises InputError, StorageError."""
    urls = files_of(inputs)
    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(urls, pool.map(lines.identify, urls), strict=True))


def identity(inputs: Inputs, files: Mapping[str, tuple[int, str]]) -> Identity:
    """Return name, bytes and SHA-256 of the files, by their use.

    In a form with keys neither names nor the order of files matter, so that several files of one kind are known by
    their sorted digests.
    """
    kinds: dict[str, list[str]] = {}
    for kind, url in _places(inputs):
        kinds.setdefault(kind, []).append(url)
    return {kind: _described(urls, files, inputs.keyed) for kind, urls in kinds.items()}


def _described(urls: list[str], files: Mapping[str, tuple[int, str]], keyed: bool) -> dict[str, Any]:
    size = sum(files[url][0] for url in urls)
    digests = [files[url][1] for url in urls]
    if keyed:
        digests.sort()
    digest = digests[0] if len(urls) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
    name = urls[0].rsplit("/", 1)[-1] if not keyed and len(urls) == 1 else f"{len(urls)} file(s)"
    return {"file": name, "bytes": size, "sha256": digest}


def _places(inputs: Inputs) -> list[tuple[str, str]]:
    """List (kind, URL) of every file: `train`, or `train/text` where a part has several files."""
    places = [
        (part.table if len(part.files) == 1 else f"{part.table}/{role}", url)
        for part in inputs.parts
        for role, url in part.files.items()
    ]
    return [*places, *((f"filter/{split}", url) for split, url in inputs.filters.items())]
