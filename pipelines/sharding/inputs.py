"""The XC raw form at a source: points by split, labels, filter pairs, each under all its usual names, and surveyed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.sharding import filters, lines
from schemas import storage
from schemas.errors import InputError
from schemas.storage import join

SPLITS = ("train", "val", "test")
_SHORT = {"train": "trn", "val": "val", "test": "tst"}


@dataclass(frozen=True)
class InputFile:
    """One file: its name, its place, its identity (bytes, SHA-256), and its lines (of a filter: its pairs)."""

    name: str
    url: str
    bytes: int
    sha256: str
    rows: int

    @property
    def identity(self) -> dict[str, Any]:
        return {"file": self.name, "bytes": self.bytes, "sha256": self.sha256}


@dataclass(frozen=True)
class Inputs:
    """The files of one data set; points and filters by split, those present."""

    points: Mapping[str, InputFile]
    filters: Mapping[str, InputFile]
    labels: InputFile

    @property
    def identity(self) -> dict[str, dict[str, Any]]:
        """What must be equal for the data set to be the same."""
        of_filters = {f"filter/{split}": file for split, file in self.filters.items()}
        return {name: file.identity for name, file in {**self.points, "labels": self.labels, **of_filters}.items()}


def find(source: str) -> Inputs:
    """Find and survey the input at the prefix `source`; every file is read once.

    Raises InputError: no train points or no labels, two names for one thing, a file that is no gzip of lines, a filter
    pair that points nowhere; StorageError.
    """
    names = storage.list_names(source)
    points = {split: _one(source, names, _raw(_SHORT[split]), split == "train") for split in SPLITS}
    labels = _one(source, names, _raw("lbl"), True)
    of_points = {split: _lines(source, name) for split, name in points.items() if name}
    of_labels = _lines(source, str(labels))
    of_filters = {
        split: _pairs(source, name, of_points[split].rows, of_labels.rows)
        for split in of_points
        if (name := _one(source, names, _filter(split), False))
    }
    return Inputs(of_points, of_filters, of_labels)


def _raw(stem: str) -> tuple[str, ...]:
    return f"{stem}.json.gz", f"{stem}.raw.json.gz"


def _filter(split: str) -> tuple[str, ...]:
    return f"filter_labels_{split}.txt", f"{_SHORT[split]}_filter_labels.txt"


def _one(source: str, names: Sequence[str], usual: Sequence[str], required: bool) -> str | None:
    present = [name for name in usual if name in names]
    if len(present) > 1:
        raise InputError(f"{source}: both {present[0]} and {present[1]} are here, for the same thing. Remove one.")
    if not present and required:
        here = ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "nothing"
        raise InputError(
            f"{source}: no {' or '.join(usual)} here; found: {here}. "
            "Expected the XC raw form: trn.json.gz, lbl.json.gz, and where there are any tst.json.gz, val.json.gz."
        )
    return present[0] if present else None


def _lines(source: str, name: str) -> InputFile:
    url = join(source, name)
    found = lines.survey(url)
    return InputFile(name, url, found.bytes, found.sha256, found.lines)


def _pairs(source: str, name: str, rows: int, labels: int) -> InputFile:
    url = join(source, name)
    content = storage.read_bytes(url)
    pairs = filters.parse_pairs(content, url, rows, labels)
    return InputFile(name, url, len(content), storage.sha256(content), len(pairs))
