"""Measurements of one or several calls: lines of DIR/results.jsonl, each on disk before the next measurement begins."""

import json
import os
from pathlib import Path
from typing import Any

FILE = "results.jsonl"


class Results:
    """The lines of a file by measurement; an incomplete last line is ignored."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        text = self._path.read_bytes() if self._path.exists() else b""
        self._whole = text.rfind(b"\n") + 1
        rows = [json.loads(line) for line in text[: self._whole].splitlines()]
        self.rows: dict[str, dict[str, Any]] = {row.pop("name"): row for row in rows}

    def add(self, name: str, figures: dict[str, Any]) -> None:
        """Append a line, and wait until it is on disk."""
        line = json.dumps({"name": name, **figures}).encode() + b"\n"
        with self._path.open("ab") as file:
            file.truncate(self._whole)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._whole += len(line)
        self.rows[name] = figures

    def drop_failed(self) -> None:
        """Remove failed measurements, so that they are repeated."""
        self.rows = {name: row for name, row in self.rows.items() if "failed" not in row}
        lines = [json.dumps({"name": name, **row}) + "\n" for name, row in self.rows.items()]
        new = self._path.with_suffix(".new")
        new.write_text("".join(lines))
        new.replace(self._path)
        self._whole = self._path.stat().st_size
