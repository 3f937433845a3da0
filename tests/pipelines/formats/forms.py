"""Input forms in tests: every table of a source, read and parsed in small blocks without a pipeline."""

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.formats import by_name
from pipelines.formats.base import LABELS, PAIRS, Format, Inputs, Reject, labels_schema, pairs_schema


@dataclass
class Table:
    """Rows as Python values, and rejects, in the order of the parts."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)

    def column(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows]


def read_all(
    name: str | Format, source: str | Path, block_rows: int = 3, text: str = "title+content"
) -> tuple[Inputs, dict[str, Table]]:
    """The data set at `source` as the form called `name` gives it. Checks what every form promises of its blocks."""
    form = by_name(name) if isinstance(name, str) else name
    form = pickle.loads(pickle.dumps(form))
    inputs = form.find(str(source))
    assert pickle.loads(pickle.dumps(inputs)) == inputs
    tables: dict[str, Table] = {}
    for part in inputs.parts:
        table = tables.setdefault(part.table, Table())
        first = 0
        short = False
        for raw in form.read(part, block_rows):
            assert not short, "only the last block may be shorter"
            assert 0 < raw.num_rows <= block_rows
            short = raw.num_rows < block_rows
            raw = pickle.loads(pickle.dumps(raw))
            parsed = form.parse(raw, first, part, text)
            if part.table == LABELS:
                assert parsed.batch.schema in (labels_schema(False), labels_schema(True))
            elif part.table.startswith(PAIRS):
                assert parsed.batch.schema == pairs_schema()
            parsed.batch.validate(full=True)
            rows = parsed.batch["row"].to_pylist()
            derived = part.contents.derived  # a row may name several labels
            assert rows == sorted(rows if derived else set(rows))
            assert not rows or (first <= rows[0] and rows[-1] < first + raw.num_rows)
            if not inputs.keyed:
                assert len(rows) + len(parsed.rejects) == raw.num_rows
            assert all(len(str(reject)) < 600 for reject in parsed.rejects)
            table.rows += parsed.batch.to_pylist()
            table.rejects += parsed.rejects
            first += raw.num_rows
    for table in tables.values():
        for row in table.rows:
            for column in ("label_ids", "label_keys", "feature_ids"):
                assert row.get(column) is None or row[column] == sorted(set(row[column]))
    return inputs, tables


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """`files` by name below `folder`."""
    for name, content in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder
