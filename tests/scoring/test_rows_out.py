"""Every CSV of predictions: each cell is read back as it was, and a spreadsheet takes none for a formula."""

import csv
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from pipelines.formats.from_columns import read_csv
from pipelines.formats.keyed import INPUT
from schemas.errors import InputError
from scoring.exported import Answer
from scoring.prediction_files import Layout, open_writer, prediction_table

CELL = some.text("=+-@'\t\r\n;,\"5.a é", max_size=5)


@settings(deadline=None, max_examples=60)
@given(
    some.lists(some.tuples(CELL, CELL), min_size=1, max_size=6),
    some.lists(CELL, min_size=3, max_size=3),
    some.sampled_from([",", ";", "\t"]),
    some.sampled_from([None, 2]),
    some.data(),
)
def test_every_cell_is_read_back_and_none_is_a_formula(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[str, str]],
    keys: list[str],
    separator: str,
    most: int | None,
    data: some.DataObject,
) -> None:
    ids = np.array([data.draw(some.permutations([0, 1, 2]))[:2] for _ in rows])
    ids[np.array(data.draw(some.lists(some.booleans(), min_size=len(rows), max_size=len(rows))))] = -1
    answer = Answer(np.full(ids.shape, -1.5, np.float32), ids, None, None, np.zeros(len(rows), bool))
    given = pa.StructArray.from_arrays([pa.array(column) for column in zip(*rows, strict=True)], ["=a", "label_1"])
    table = pa.table({"key": [str(n) for n in range(len(rows))], INPUT: given})
    labels = pa.table({"key": keys, "text": keys[::-1]})
    folder = tmp_path_factory.mktemp("cells")
    for wide in (True, False):
        out = folder / f"{wide}.csv"
        with open_writer(str(out), None, 3, Layout(wide, most, True, separator)) as write:
            write(prediction_table(table, answer, labels))
        cells = [*csv.reader(io.StringIO(out.read_bytes().decode(), newline=""), delimiter=separator)]
        for cell in (cell for row in cells for cell in row):
            assert cell[:1] not in "=+@\t\r\n" or not cell
            assert cell[:1] != "-" or cell[1:].replace(".", "").replace(",", "").isdigit()
        read = [row for block in read_csv(str(out), 9) for row in block.to_pylist() if row["\x01fields"]]
        if wide:
            width = most or int((ids >= 0).sum(axis=1).max())
            names = [f"{'predicted_' if n == 1 else ''}label_{n}" for n in range(1, width + 1)]
            predicted = [[keys[i] if i >= 0 else "" for i in row][:width] for row in ids.tolist()]
            expected = [
                [*row, *more]
                for row, more, own in zip(rows, predicted, ids, strict=True)
                if any(row) or max(own) >= 0  # else all cells are empty, and so is the row
            ]
            assert [[row[name] for name in ("=a", "label_1", *names)] for row in read] == expected
        else:
            pairs = [(str(n), keys[i]) for n, row in enumerate(ids.tolist()) for i in row if i >= 0]
            pairs += [(str(n), "") for n, row in enumerate(ids.tolist()) if max(row) < 0]
            assert sorted((row["key"], row["label"]) for row in read) == sorted(pairs)


def test_a_character_that_the_encoding_lacks_is_named(tmp_path: Path) -> None:
    answer = Answer(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.int64), None, None, np.zeros(1, bool))
    table = prediction_table(pa.table({"key": ["k"]}), answer, pa.table({"key": ["č"], "text": [""]}))
    writer = open_writer(str(tmp_path / "p.csv"), None, 1, Layout(encoding="cp1252"))
    with pytest.raises(InputError, match="'č' cannot be written in cp1252"), writer as write:
        write(table)
    assert not (tmp_path / "p.csv").exists()
