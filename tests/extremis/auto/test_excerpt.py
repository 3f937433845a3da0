"""Excerpts of data: the labels drawn keep all of their points, and nothing else is there."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from extremis.auto import draw_labels, write_excerpt
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.shard_files.parquet import list_column
from schemas.shares import ALL_ROWS
from schemas.table import Table
from tests.builders import SmallData, build_data
from trainer.settings.data_statistics import measure


def rows_of(url: str, kind: str) -> pa.Table:
    return pa.concat_tables(Table.open(url, kind).batches())


def test_each_label_drawn_keeps_all_of_its_points(small: SmallData, tmp_path: Path) -> None:
    layout = DataLayout(str(tmp_path / "excerpt"))
    kept = draw_labels(small.layout, 30)
    write_excerpt(small.layout, layout.root, 30)
    of_whole, of_part = (rows_of(data.labels, "labels") for data in (small.layout, layout))
    assert of_part["key"].to_pylist() == of_whole["key"].filter(pa.array(kept)).to_pylist()
    assert of_part["label_id"].to_pylist() == list(range(kept.sum()))

    points = {}
    for name, labels, data in (("whole", of_whole, small.layout), ("part", of_part, layout)):
        queries, keys = rows_of(data.queries("train"), "queries"), np.array(labels["key"].to_pylist())
        names = [keys[row].tolist() for row in (queries["label_ids"].to_pylist())]
        points[name] = dict(zip(queries["key"].to_pylist(), names, strict=True))
    drawn = set(of_part["key"].to_pylist())
    expected = {key: [label for label in labels if label in drawn] for key, labels in points["whole"].items()}
    assert points["part"] == {key: labels for key, labels in expected.items() if labels}

    counts = np.zeros(len(drawn), np.int64)
    queries = rows_of(layout.queries("train"), "queries")
    np.add.at(counts, list_column(queries, "label_ids").entries, 1)
    assert of_part["frequency"].to_pylist() == counts.tolist()
    assert queries["query_id"].to_pylist() == list(range(queries.num_rows))


@pytest.mark.parametrize("rows", [1, 10, 30, 60])
def test_about_as_many_rows_as_asked_for(small: SmallData, rows: int) -> None:
    drawn = draw_labels(small.layout, rows)
    labels = rows_of(small.layout.queries("train"), "queries")["label_ids"].to_pylist()
    places = np.flatnonzero(drawn)
    count = sum(bool(set(row) & set(places)) for row in labels)
    most = max(np.bincount(np.concatenate(labels)))  # points of one label
    assert rows <= count <= rows + most


def test_small_data_is_there_whole_and_another_excerpt_is_the_same(small: SmallData, tmp_path: Path) -> None:
    assert draw_labels(small.layout, 64).all()
    digests = set()
    for name in ("a", "b"):
        write_excerpt(small.layout, str(tmp_path / name), 20)
        digests.add(open_manifest(str(tmp_path / name), "data").digest)
    assert len(digests) == 1


def test_what_settings_come_from_is_as_of_the_whole(tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 4000}, labels=400, most_positives=3)
    write_excerpt(data.layout, str(tmp_path / "excerpt"), 500)
    whole, part = (
        measure(layout, "train", ALL_ROWS, False) for layout in (data.layout, DataLayout(str(tmp_path / "excerpt")))
    )
    assert part.queries == pytest.approx(500, abs=50)
    assert part.median_frequency == pytest.approx(whole.median_frequency, rel=0.15)
    assert part.labels < 100


@pytest.fixture
def small(tmp_path: Path) -> SmallData:
    return build_data(str(tmp_path / "data"), features=9)
