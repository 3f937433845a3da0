"""Forms with string keys, end to end: the join against a dictionary, and bytes that no order of the input changes."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pipelines.shard import ShardOptions, shard
from pipelines.sharding import read
from schemas.errors import InputError
from schemas.manifest import open_manifest
from tests.pipelines.raw import rows_of

OPTIONS = ShardOptions(
    tokenizer="train:300", shards=3, shard_bytes=400, row_group_rows=8, keep_text=True, max_reject_share=0.5
)
Line = dict[str, Any]


@dataclass
class Raw:
    """Lines of a data set with keys: some labels and points come twice, some name labels that are not there."""

    train: list[Line] = field(default_factory=list)
    test: list[Line] = field(default_factory=list)
    labels: list[Line] = field(default_factory=list)


@pytest.fixture(scope="module")
def raw() -> Raw:
    draw = random.Random(7)
    made = Raw()
    made.labels = [{"key": f"L{i}", "text": f"label {i % 13}"} for i in range(40)]
    made.labels += [made.labels[3], {**made.labels[5], "text": "another text"}]
    for split, count in (("train", 150), ("test", 40)):
        rows = getattr(made, split)
        for i in range(count):
            named = [f"L{draw.randrange(44)}" for _ in range(draw.randint(1, 5))]  # L40 to L43 are not there
            rows.append({"key": f"{split}/é{i}", "text": f"boat {i % 7} sea {i}", "labels": named})
        rows.append({**rows[2], "labels": ["L1", "L2"]})  # the same text: one point with the labels of both
        rows.append({**rows[4], "text": "quite another text"})  # another text: one of the two stays
        rows.append({"key": f"{split}/lost", "text": "no label of it is there", "labels": ["L41", "nowhere"]})
    return made


def write(folder: Path, raw: Raw, files: int = 1) -> Path:
    folder.mkdir()
    for name in ("train", "test", "labels"):
        rows: Sequence[Line] = getattr(raw, name)
        for number in range(files):
            place = folder / (f"{name}.jsonl" if files == 1 else f"{name}-{number}.jsonl")
            place.write_text("".join(json.dumps(row) + "\n" for row in rows[number::files]))
    return folder


@pytest.fixture(scope="module")
def data(raw: Raw, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sharded from one file a table, in blocks of a few rows."""
    folder = tmp_path_factory.mktemp("keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "BLOCK_ROWS", 16)
        shard(str(write(folder / "raw", raw)), str(folder / "data"), OPTIONS)
    return folder / "data"


def test_the_join_is_a_dictionary(raw: Raw, data: Path) -> None:
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    labels = rows_of(f"{data}/labels")
    assert [row["label_id"] for row in labels] == list(range(40))
    assert len(open_manifest(f"{data}/labels").shards) > 1
    ids = {row["key"]: row["label_id"] for row in labels}
    assert set(ids) == {f"L{i}" for i in range(40)}
    for row in labels:
        texts = {record["text"] for record in raw.labels if record["key"] == row["key"]}
        assert row["text"] in texts
        assert row["input_ids"] == tokenizer.encode(row["text"]).ids
    counts: Counter[int] = Counter()
    for split in ("train", "test"):
        lines: list[Line] = getattr(raw, split)
        rows = rows_of(f"{data}/queries/{split}")
        assert [row["query_id"] for row in rows] == list(range(len(rows)))
        assert {row["key"] for row in rows} == {line["key"] for line in lines} - {f"{split}/lost"} - nameless(
            lines, ids
        )
        for row in rows:
            same = [line for line in lines if (line["key"], line["text"]) == (row["key"], row["text"])]
            named = {ids[key] for line in same for key in line["labels"] if key in ids}
            assert row["label_ids"] == sorted(named)
            assert row["input_ids"] == tokenizer.encode(row["text"]).ids
            if split == "train":
                counts.update(named)
    assert [row["frequency"] for row in labels] == [counts[label] for label in range(40)]
    assert open_manifest(f"{data}/queries/train").counters["rows_merged"] == 1


def nameless(lines: Sequence[Line], ids: dict[str, int]) -> set[str]:
    """Keys of points none of whose labels is there."""
    keys = {line["key"] for line in lines if any(key in ids for key in line["labels"])}
    return {line["key"] for line in lines} - keys


def test_every_dropped_row_and_label_is_in_the_rejects(raw: Raw, data: Path) -> None:
    counted = Counter((row["source"], row["line"], row["reason"]) for row in rows_of(f"{data}/rejects"))
    keys = {row["key"] for row in raw.labels}
    expected: Counter[tuple[str, int, str]] = Counter()
    for split in ("train", "test"):
        lines: list[Line] = getattr(raw, split)
        for number, line in enumerate(lines, start=1):
            gone = [key for key in dict.fromkeys(line["labels"]) if key not in keys]
            expected[f"{split}.jsonl", number, "unknown_label"] += len(gone)
            expected[f"{split}.jsonl", number, "no_labels"] += not set(line["labels"]) & keys
    twice = {key: n for key, n in counted.items() if key[2] == "duplicate_key"}
    assert {source for source, _, _ in twice} == {"train.jsonl", "test.jsonl", "labels.jsonl"}
    assert sum(twice.values()) == 3
    assert counted - Counter(twice) == +expected
    details = [row["detail"] for row in rows_of(f"{data}/rejects") if row["reason"] == "unknown_label"]
    assert "'train/lost' names the unknown label 'nowhere'" in details


@pytest.mark.parametrize(
    "flags",
    ["in process", pytest.param("two processes", marks=pytest.mark.slow)],
    indirect=True,
)
def test_shuffled_lines_and_more_files_give_the_same_shards_on_every_runner(
    raw: Raw, data: Path, flags: tuple[str, ...], tmp_path: Path
) -> None:
    draw = random.Random(1)
    other = Raw(*(draw.sample(rows, len(rows)) for rows in (raw.train, raw.test, raw.labels)))
    shard(str(write(tmp_path / "raw", other, files=4)), str(tmp_path / "data"), OPTIONS, flags)
    tables = ("tokenizer", "labels", "queries/train", "queries/test")
    for table in tables:
        whole, again = (
            {p.name: p.read_bytes() for p in (root / table).iterdir()} for root in (data, tmp_path / "data")
        )
        assert whole == again, table
        assert len(whole) >= 3
    digests = [open_manifest(str(root)).parents for root in (data, tmp_path / "data")]
    assert [digests[0][table] for table in tables] == [digests[1][table] for table in tables]


def test_too_many_unknown_labels_fail_the_run_and_leave_nothing(raw: Raw, tmp_path: Path) -> None:
    source = write(tmp_path / "raw", raw)
    with pytest.raises(InputError) as caught:
        shard(str(source), str(tmp_path / "data"), OPTIONS.model_copy(update={"max_reject_share": 0.02}))
    message = str(caught.value)
    assert "label mentions of train.jsonl" in message
    assert "names the unknown label" in message
    assert "raise max_reject_share, which is 0.02." in message
    assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []


def test_pairs_join_as_labels_do(raw: Raw, data: Path, tmp_path: Path) -> None:
    """Points without labels and a file of pairs are the same data."""
    source = tmp_path / "raw"
    source.mkdir()
    for split in ("train", "test"):
        lines: list[Line] = getattr(raw, split)
        pairs = [(line["key"], key) for line in lines for key in line["labels"]]
        random.Random(2).shuffle(pairs)
        rows = [{"key": line["key"], "text": line["text"]} for line in lines]
        (source / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        content = ["query_key\tlabel_key\tweight", *(f"{query}\t{label}\t1" for query, label in pairs)]
        content += [f"{split}/é0\tL39\t0", "not a query\tL1\t1"]
        (source / f"pairs_{split}.tsv").write_text("\n".join(content) + "\n")
    (source / "labels.jsonl").write_text("".join(json.dumps(row) + "\n" for row in raw.labels))
    shard(str(source), str(tmp_path / "data"), OPTIONS)
    for split in ("train", "test"):
        own, paired = (rows_of(f"{root}/queries/{split}") for root in (data, tmp_path / "data"))
        texts = Counter(line["key"] for line in {(li["key"], li["text"]): li for li in getattr(raw, split)}.values())
        for row, other in zip(own, paired, strict=True):
            assert (row["key"], row["text"], row["input_ids"]) == (other["key"], other["text"], other["input_ids"])
            # A pair cannot say which of two texts it means: its label goes to the one that stays.
            assert row["label_ids"] == other["label_ids"] or texts[row["key"]] > 1
    reasons = Counter(row["reason"] for row in rows_of(f"{tmp_path}/data/rejects"))
    assert reasons["unknown_query"] == 2
    ids = dict.fromkeys((row["key"] for row in raw.labels), 0)
    assert reasons["no_labels"] == len(nameless(raw.train, ids)) + len(nameless(raw.test, ids)) > 0
