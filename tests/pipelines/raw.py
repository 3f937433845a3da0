"""Raw input for tests, files in the XC form, and what was made of it, read in the plainest way."""

import gzip
import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from schemas.table import Table

TATE = Path(__file__).parents[2] / "examples" / "tate"


def write_lines(path: Path, lines: Sequence[Any]) -> None:
    """Gzip of one JSON value a line; bytes are written as they are."""
    raw = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(gzip.compress(b"".join(line + b"\n" for line in raw), mtime=0))


def read_lines(path: Path) -> list[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_tiny(folder: Path, rows: int = 30, labels: int = 7) -> Path:
    """A data set of `rows` train points and half as many test points, over few words."""
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "lbl.json.gz", [{"uid": f"L{i}", "title": f"label {i}"} for i in range(labels)])
    write_lines(folder / "trn.json.gz", [point(i, labels) for i in range(rows)])
    write_lines(folder / "tst.json.gz", [point(1000 + i, labels) for i in range(rows // 2)])
    return folder


def point(i: int, labels: int) -> dict[str, Any]:
    return {
        "uid": f"p{i}",
        "title": f"point {i}",
        "content": "sea " * (i % 4),
        "target_ind": [i % labels, (i * i) % labels],
    }


def write_tate(folder: Path, rows: int, test_rows: int) -> Path:
    """The first lines of Tate, with all its labels up to the largest that they name."""
    folder.mkdir(parents=True, exist_ok=True)
    largest = 0
    for name, some in (("trn", rows), ("tst", test_rows)):
        with gzip.open(TATE / f"{name}.json.gz", "rt", encoding="utf-8") as file:
            points = [json.loads(line) for line in islice(file, some)]
        for record in points:
            record["target_ind"] = [label for label in record["target_ind"] if label < 2000] or [0]
            largest = max(largest, *record["target_ind"])
        write_lines(folder / f"{name}.json.gz", points)
    write_lines(folder / "lbl.json.gz", read_lines(TATE / "lbl.json.gz")[: largest + 1])
    return folder


def rows_of(url: str) -> list[dict[str, Any]]:
    """All rows of a table, whose files are those of its manifest."""
    table = Table.open(url)
    table.verify()
    return [row for group in Table(url, table.manifest).batches() for row in group.to_pylist()]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
