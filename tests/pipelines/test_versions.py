"""Versions of a data set against a dictionary: ids that never move, points by key, labels that come and go."""

import json
import random
import shutil
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pipelines.options import Again
from pipelines.shard import ShardOptions, shard
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.table import Table
from schemas.versions import open_data
from trainer.stream import JoinedStream, open_sources

OPTIONS = ShardOptions(tokenizer="train:200", row_group_rows=3, keep_text=True, shards=2)


@dataclass(frozen=True)
class Day:
    """Input of a version: labels by key (None: no file), whether the list is whole, points (key, text, labels)."""

    labels: dict[str, str] | None
    whole: bool
    points: list[tuple[str, str, list[str]]]
    again: Again = "replace"


@dataclass
class Model:
    """What a dictionary makes of the days."""

    ids: dict[str, int] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    retired: set[str] = field(default_factory=set)
    points: list[tuple[str, str, frozenset[str]]] = field(default_factory=list)

    def add(self, day: Day) -> None:
        for key, text in (day.labels or {}).items():
            self.texts[key] = text
            self.retired.discard(key)
        if day.labels is not None and day.whole:
            self.retired = self.texts.keys() - day.labels.keys()
        new = {key: (key, text, frozenset(labels)) for key, text, labels in day.points}
        if day.again == "merge":
            for key, _, labels in self.points:
                if key in new:
                    new[key] = (*new[key][:2], new[key][2] | labels)
        if day.again != "keep":
            self.points = [point for point in self.points if point[0] not in new]
        self.points += new.values()

    @property
    def frequency(self) -> Counter[str]:
        return Counter(label for _, _, labels in self.points for label in labels)


NAMES = [f"l{number}" for number in range(9)]


@st.composite
def days(draw: st.DrawFn) -> list[Day]:
    listed, sequence = set[str](), list[Day]()
    for number in range(draw(st.integers(2, 3))):
        whole = number == 0 or draw(st.booleans())
        some = draw(st.sets(st.sampled_from(NAMES), min_size=1 if number == 0 else 0, max_size=9))
        labels = {key: draw(st.sampled_from([f"{key} old", f"{key}\nnew", "", " \t"])) for key in sorted(some)}
        given_file = number == 0 or bool(labels)
        listed |= some
        keys = draw(st.sets(st.integers(0, 14), min_size=1, max_size=10))
        naming = st.lists(st.sampled_from(sorted(listed)), min_size=1, max_size=3)
        points = [(f"p{key}", f"text\n{draw(st.integers(0, 9))}", draw(naming)) for key in sorted(keys)]
        again = draw(st.sampled_from(get_args(Again))) if number else "replace"
        sequence.append(Day(labels if given_file else None, whole, points, again))
    return sequence


def write(folder: Path, day: Day, order: random.Random | None = None) -> str:
    """JSON lines of a day; with `order` in another order of lines, points in two files."""
    folder.mkdir(parents=True)
    points = [{"key": key, "text": text, "labels": labels} for key, text, labels in day.points]
    labels = [{"key": key, "text": text} for key, text in (day.labels or {}).items()]
    files: dict[str, list[Any]] = {"train": points}
    if order is not None:
        order.shuffle(points)
        order.shuffle(labels)
        cut = order.randrange(len(points) + 1)
        files = {"train-0": points[cut:], "train-1": points[:cut]}
        files = {name: rows for name, rows in files.items() if rows}
    if day.labels is not None:
        files["labels"] = labels
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def make(root: Path, sequence: list[Day], order: random.Random | None = None) -> list[str]:
    """Shard each day onto the one before; the data sets."""
    data: list[str] = []
    for number, day in enumerate(sequence):
        raw = write(root / f"raw{number}", day, order)
        onto = {}
        if data:
            labels = None if day.labels is None else "all" if day.whole else "new"
            onto = {"onto": data[-1], "labels": labels, "again": day.again}
        shard(raw, str(root / f"data{number}"), OPTIONS.model_copy(update=onto))
        data.append(str(root / f"data{number}"))
    return data


def rows_of(url: str) -> list[dict[str, Any]]:
    manifest = open_manifest(url)
    Table(url, manifest).verify()
    groups = list(Table(url, manifest).batches())
    assert [len(group) for group in groups] == np.diff(Table(url, manifest).groups.first).tolist()
    return [row for group in groups for row in group.to_pylist()]


def check_version(data: str, model: Model) -> None:
    """Compare a version with the dictionary, and note the ids of its new labels."""
    labels = rows_of(DataLayout(data).labels)
    assert [row["label_id"] for row in labels] == list(range(len(labels)))
    by_key = {row["key"]: row for row in labels}
    assert by_key.keys() == model.texts.keys()
    for key, row in by_key.items():
        assert model.ids.setdefault(key, row["label_id"]) == row["label_id"]
        assert row["text"] == model.texts[key]
        assert bool(row.get("retired")) == (key in model.retired)
        assert row["frequency"] == model.frequency[key]
    blank = sum(not text.strip() for text in model.texts.values())
    assert open_manifest(DataLayout(data).labels).counters["empty_texts"] == blank
    names = {number: key for key, number in model.ids.items()}
    points = rows_of(DataLayout(data).queries("train"))
    assert [row["query_id"] for row in points] == list(range(len(points)))
    found = Counter((row["key"], row["text"], frozenset(names[label] for label in row["label_ids"])) for row in points)
    assert found == Counter(model.points)
    tokenizer = Tokenizer.from_buffer(Table.open(DataLayout(data).tokenizer).read_files()["tokenizer.json"])
    for row in [*labels, *points]:
        assert row["title_tokens"] == len(tokenizer.encode(row["text"].partition("\n")[0]).ids)
    assert open_data(data)[0].digest == open_manifest(data).digest
    assert open_manifest(DataLayout(data).labels).parameters["training_points"] == len(points)


@pytest.mark.parametrize("examples", [2, pytest.param(12, marks=pytest.mark.slow)])
def test_versions_are_what_a_dictionary_makes_of_the_days(examples: int) -> None:
    options = {"deadline": None, "suppress_health_check": [*HealthCheck], "phases": [Phase.generate]}
    settings(max_examples=examples, derandomize=True, **options)(given(sequence=days())(check_versions))()


def check_versions(sequence: list[Day]) -> None:
    root = Path(tempfile.mkdtemp())
    try:
        model = Model()
        for data, day in zip(make(root, sequence), sequence, strict=True):
            model.add(day)
            check_version(data, model)
    finally:
        shutil.rmtree(root)


def test_merged_days_have_the_points_of_both_days_at_once(tmp_path: Path) -> None:
    days = ["text,label\none,a\none,b\ntwo,a\n", "text,label\none,c\none,a\nthree,b\nfour,d\n"]
    for name, rows in (("0", days[0]), ("1", days[1]), ("both", days[0] + days[1].partition("\n")[2])):
        (tmp_path / f"{name}.csv").write_text(rows)

    def points(name: str, data: str, **options: Any) -> tuple[set[Any], str]:
        lines: list[str] = []
        shard(f"{tmp_path}/{name}.csv", f"{tmp_path}/{data}", OPTIONS.model_copy(update=options), progress=lines.append)
        named = [row["key"] for row in rows_of(f"{tmp_path}/{data}/labels")]
        rows = rows_of(f"{tmp_path}/{data}/queries/train")
        found = {(row["key"], row["text"], *sorted(named[label] for label in row["label_ids"])) for row in rows}
        return found, next((line for line in lines if line.startswith("onto")), "")

    both = points("both", "both")[0]
    points("0", "first")
    merged, said = points("1", "merged", onto=f"{tmp_path}/first", again="merge")
    assert merged == both
    assert said.endswith("1 points replaced")
    assert points("1", "new", onto=f"{tmp_path}/first")[1].endswith(
        '1 points replaced, 1 of their labels are not repeated (again="merge" keeps them)'
    )


SEQUENCE = [
    Day({key: key for key in NAMES[:6]}, True, [(f"p{i}", f"t{i}", [NAMES[i % 6]]) for i in range(12)]),
    Day(
        {key: key + "!" for key in NAMES[3:]},
        True,
        [(f"p{i}", f"u{i}", [NAMES[i % 9], NAMES[2]]) for i in range(8, 20)],
    ),
    Day(None, True, [("p3", "again", ["l8"])]),
]


def contents(folder: str) -> dict[str, bytes]:
    """Every file below `folder` but its manifest, which names the input's bytes."""
    paths = sorted(Path(folder).rglob("*"))
    files = {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}
    return {name: data for name, data in files.items() if name != "_manifest.json"}


def test_bytes_are_the_same_for_every_order_of_arrival(tmp_path: Path) -> None:
    first = make(tmp_path / "a", SEQUENCE[:2])
    second = make(tmp_path / "b", SEQUENCE[:2], random.Random(5))
    for one, other in zip(first, second, strict=True):
        assert contents(one) == contents(other)


def test_nothing_is_copied_and_the_base_does_not_change(tmp_path: Path) -> None:
    data = make(tmp_path, SEQUENCE[:1])
    before = contents(data[0])
    raw = write(tmp_path / "raw1", SEQUENCE[1])
    shard(raw, str(tmp_path / "data1"), OPTIONS.model_copy(update={"onto": data[0]}))
    assert contents(data[0]) == before
    old = {content for name, content in before.items() if name.endswith((".parquet", "tokenizer.json"))}
    assert not old & set(contents(str(tmp_path / "data1")).values())
    parts = Table.open(f"{tmp_path}/data1/queries/train").parts
    assert [(part.name, part.rows) for part in parts] == [("0001", 8), ("0002", 12)]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make(tmp_path_factory.mktemp("versions"), SEQUENCE)


def test_versions_move_together_and_a_part_that_is_gone_is_named(versions: list[str], tmp_path: Path) -> None:
    there = shutil.copytree(Path(versions[2]).parent, tmp_path / "there")
    queries = DataLayout(f"{there}/data2").queries("train")
    assert rows_of(queries) == rows_of(DataLayout(versions[2]).queries("train"))
    shutil.rmtree(there / "data1")
    with pytest.raises(TableError, match=r"part 0002 .*there/data1/parts/0002/queries/train.* is missing"):
        open_data(f"{there}/data2")
    with pytest.raises(TableError, match=r"there/data1.*missing"):
        rows_of(queries)


def test_a_finished_version_is_kept_and_another_one_refused(tmp_path: Path) -> None:
    data = make(tmp_path, SEQUENCE[:2])
    options = OPTIONS.model_copy(update={"onto": data[0], "labels": "all"})
    lines: list[str] = []
    shard(f"{tmp_path}/raw1", data[1], options, progress=lines.append)
    assert "up to date" in lines[0]
    with pytest.raises(InputError, match="was built with a different onto"):
        shard(f"{tmp_path}/raw1", data[1], options.model_copy(update={"again": "keep"}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"part": "0001"}, "has a part with this name"),
        ({"max_tokens": 7}, r"max_tokens = 7, but .* was sharded with None"),
        ({}, r"lacks 5 of the 6 labels .* Give labels=\"new\""),
    ],
)
def test_what_a_version_cannot_be_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = make(tmp_path, SEQUENCE[:1])
    raw = write(tmp_path / "raw1", Day({"l0": "l0"}, True, [("p0", "t", ["l0"])]))
    with pytest.raises(InputError, match=message):
        shard(raw, str(tmp_path / "data1"), OPTIONS.model_copy(update={"onto": data[0], **changes}))
    assert not (tmp_path / "data1" / "_manifest.json").exists()


def test_the_stream_deals_each_row_of_a_version_once(versions: list[str]) -> None:
    data = versions[-1]
    sources = open_sources(DataLayout(data), "train", label_texts=False)
    labels = open_manifest(DataLayout(data).labels).rows
    dealt = [(batch.rows, batch.positives) for batch in JoinedStream(sources, labels, batch=4, streams=2)]
    rows = rows_of(DataLayout(data).queries("train"))
    assert sorted(np.concatenate([ids for ids, _ in dealt]).tolist()) == list(range(len(rows)))
    expected = Counter(label for row in rows for label in row["label_ids"])
    assert Counter(np.concatenate([positives for _, positives in dealt]).tolist()) == expected
