"""Tables of labels as files."""

from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from extremis.label_tables import write_labels


def test_formulas_are_texts_in_a_spreadsheet(tmp_path: Path) -> None:
    texts = ["=1+1", "@x", "-5", "- a", 'a "b", c\nd', "", "'=2"]
    lists = [[text, "b"] for text in texts]
    table = pa.table({"label": texts, "F1": [100 / 3] * 7, "missed_for": lists, "missed_for_queries": [[2, 1]] * 7})
    for name in ("labels.csv", "labels.parquet"):
        write_labels(table, str(tmp_path / name))
    assert pq.read_table(tmp_path / "labels.parquet").equals(table)
    lines = pa.csv.read_csv(
        tmp_path / "labels.csv", parse_options=pa.csv.ParseOptions(newlines_in_values=True)
    ).to_pydict()
    assert lines["label"] == ["'=1+1", "'@x", "-5", "'- a", 'a "b", c\nd', "", "''=2"]
    assert lines["missed_for"] == ["'=1+1 | b", "'@x | b", "'-5 | b", "'- a | b", 'a "b", c\nd | b', " | b", "''=2 | b"]
    assert lines["missed_for_queries"] == ["2 | 1"] * 7
    assert lines["F1"] == [33.3333] * 7
