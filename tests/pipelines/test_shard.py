import importlib
import itertools
import json
import random
import resource
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import pytest
from tokenizers import Tokenizer

from pipelines.flow import Flow, Packet
from pipelines.formats import choose
from pipelines.progress import Watch
from pipelines.runners.local import LocalRunner
from pipelines.shard import ShardOptions, shard
from pipelines.sharding import plans, read, rows
from schemas import storage
from schemas.errors import InputError, StorageError, TableError
from schemas.hashing import near, normalized
from schemas.manifest import open_manifest
from schemas.options import check
from schemas.owners import KIND_FILE
from schemas.shares import RowShare
from schemas.table import Table
from tests.pipelines.raw import contents, point, read_lines, rows_of, write_lines, write_tate, write_tiny

OPTIONS = ShardOptions(tokenizer="train:300")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "raw")


def test_tate_round_trip_against_plain_reading(tmp_path: Path) -> None:
    raw = write_tate(tmp_path / "raw", 400, 100)
    (raw / "tst_filter_labels.txt").write_text("3 17\n3 5\n99 0\n3 17\n")
    data = str(tmp_path / "data")
    options = ShardOptions(
        tokenizer="train:2000",
        max_tokens=24,
        shards=3,
        shard_bytes=20_000,
        row_group_rows=16,
        propensity_a=0.55,
        propensity_b=1.5,
    )
    manifest = shard(str(raw), data, options)
    tokenizer = Tokenizer.from_file(f"{data}/tokenizer/tokenizer.json")
    labels = read_lines(raw / "lbl.json.gz")
    filters = {3: [5, 17], 99: [0]}
    train_counts: Counter[int] = Counter()
    for split, name in (("train", "trn"), ("test", "tst")):
        table = open_manifest(f"{data}/queries/{split}", "queries")
        Table(f"{data}/queries/{split}", table).verify()
        rows = rows_of(f"{data}/queries/{split}")
        points = read_lines(raw / f"{name}.json.gz")
        assert [row["query_id"] for row in rows] == list(range(len(points)))
        assert table.id_range == (0, len(points))
        assert (table.row_group_rows, len(table.shards)) == (16, 3)
        assert min(entry.rows for entry in table.shards) > 0
        by_key = {row["key"]: row for row in rows}
        assert len(by_key) == len(points)
        assert [row["key"] for row in rows] != [record["uid"] for record in points]
        for number, record in enumerate(points):
            row = by_key[record["uid"]]
            title = len(tokenizer.encode(record["title"]).ids) if record["content"] else 24
            assert row["title_tokens"] == min(title, len(row["input_ids"]))
            assert row["input_ids"] == tokenizer.encode(f"{record['title']} {record['content']}".rstrip(" ")).ids
            assert row["label_ids"] == sorted(set(record["target_ind"]))
            assert row.get("filter_label_ids") == (filters.get(number, []) if split == "test" else None)
            if split == "train":
                train_counts.update(set(record["target_ind"]))
        assert table.counters["rows_out"] == table.counters["rows_in"] == len(points)
        assert table.counters["tokens"] == sum(len(row["input_ids"]) for row in rows)
        assert table.counters["rejected"] == {}
        assert table.counters.get("filter_pairs_applied") == (3 if split == "test" else None)
    assert any(len(row["input_ids"]) == 24 for row in rows)
    out = rows_of(f"{data}/labels")
    assert len(open_manifest(f"{data}/labels", "labels").shards) == 3
    assert rows_of(f"{data}/rejects") == []
    assert [row["label_id"] for row in out] == list(range(len(labels)))
    assert [(row["key"], row["text"]) for row in out] == [(record["uid"], record["title"]) for record in labels]
    assert [row["input_ids"] for row in out] == [tokenizer.encode(record["title"]).ids for record in labels]
    assert all(row["title_tokens"] == len(row["input_ids"]) for row in out)
    assert [row["frequency"] for row in out] == [train_counts[label] for label in range(len(labels))]
    assert open_manifest(f"{data}/labels").parameters["training_points"] == 400
    assert manifest.kind == "data"
    assert manifest.parameters["propensity"] == {"a": 0.55, "b": 1.5}
    assert manifest.parameters["filters"] == {"test": {"file": "tst_filter_labels.txt", "pairs": 3}}
    assert manifest.parents == {
        name: open_manifest(f"{data}/{name}").digest
        for name in ("tokenizer", "labels", "queries/train", "queries/test", "rejects")
    }


_read_locations = rows.read_locations


def read_shuffled(packet: Packet) -> list[Packet]:
    """The same packets, as if they had arrived in another order."""
    packets = _read_locations(packet)
    return random.Random(1).sample(packets, len(packets))


@pytest.mark.slow
def test_bytes_are_the_same_on_every_run_whatever_arrives_first(tiny: Path, tmp_path: Path) -> None:
    options = ShardOptions(tokenizer="train:300", shards=3, row_group_rows=4, keep_text=True)
    shard(str(tiny), str(tmp_path / "a"), options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows, "read_locations", read_shuffled)
        patch.setattr("pipelines.flow._HELD_BYTES", 1)
        patch.setattr(read, "BLOCK_ROWS", 4)
        shard(str(tiny), str(tmp_path / "b"), options)
    workers = ["--direct_num_workers=2", "--direct_running_mode=multi_processing"]
    shard(str(tiny), str(tmp_path / "c"), options, workers)
    made = contents(tmp_path / "a")
    assert made == contents(tmp_path / "b")
    assert made == contents(tmp_path / "c")
    # 2 splits of 3 shards, 1 shard of labels, 2 files of the tokenizer, 6 manifests
    assert len(made) == 15
    assert str(tmp_path).encode() not in b"".join(made.values())
    shard(str(tiny), str(tmp_path / "d"), options.model_copy(update={"seed": 1}))
    first, second = ([{**row, "query_id": 0} for row in rows_of(f"{tmp_path}/{name}/queries/train")] for name in "ad")
    assert first != second
    assert sorted(first, key=str) == sorted(second, key=str)
    assert any(row["text"] == "point 1\nsea " for row in rows_of(f"{tmp_path}/a/queries/train"))


def test_a_small_phase_is_no_job_elsewhere(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has a job less, and the bytes are the same."""
    module = importlib.import_module("pipelines.shard")
    jobs: list[int] = []

    class Far(LocalRunner):
        far = True

        def run(self, flow: Flow, watch: Watch | None = None) -> None:
            jobs[-1] += 1
            super().run(flow, watch)

    monkeypatch.setattr("pipelines.job.choose_runner", lambda *_: Far())
    for size in (0, 1 << 20):
        jobs.append(0)
        monkeypatch.setattr(module, "_WORTH_A_JOB", size)
        shard(str(tiny), str(tmp_path / str(size)), OPTIONS)
    assert jobs == [4, 3]
    assert contents(tmp_path / "0") == contents(tmp_path / str(1 << 20))


def test_in_memory_and_with_every_older_name(tiny: Path) -> None:
    for name, as_name in (
        ("trn.json.gz", "trn.raw.json.gz"),
        ("tst.json.gz", "tst.json.gz"),
        ("tst.json.gz", "val.json.gz"),
        ("lbl.json.gz", "lbl.raw.json.gz"),
    ):
        storage.write_bytes(f"memory://raw/{as_name}", (tiny / name).read_bytes())
    storage.write_bytes("memory://raw/trn_filter_labels.txt", b"0 1\n")
    storage.write_bytes("memory://raw/filter_labels_test.txt", b"")
    manifest = shard("memory://raw", "memory://data", OPTIONS)
    assert set(manifest.parents) == {"tokenizer", "labels", "rejects", "queries/train", "queries/val", "queries/test"}
    assert manifest.parameters["rows"] == {"train": 30, "val": 15, "test": 15}
    names = [column.name for column in open_manifest("memory://data/queries/train").columns]
    assert names == ["query_id", "key", "input_ids", "title_tokens", "label_ids", "filter_label_ids"]
    assert "filter_label_ids" not in [column.name for column in open_manifest("memory://data/queries/test").columns]
    assert sum(len(row["filter_label_ids"]) for row in rows_of("memory://data/queries/train")) == 1
    assert storage.list_names("memory://data") == ["_manifest.json", "labels", "queries", "rejects", "tokenizer"]


def test_a_pretrained_directory_is_known_by_its_content(tiny: Path, tmp_path: Path) -> None:
    shard(str(tiny), str(tmp_path / "a"), OPTIONS)
    manifest = shard(str(tiny), str(tmp_path / "b"), ShardOptions(tokenizer=str(tmp_path / "a" / "tokenizer")))
    assert manifest.parameters["options"]["tokenizer"].startswith("directory:")
    assert str(tmp_path) not in json.dumps(manifest.parameters)
    tokens = [[row["input_ids"] for row in rows_of(f"{tmp_path}/{name}/labels")] for name in "ab"]
    assert tokens[0] == tokens[1]


def test_a_finished_data_set_is_kept_and_another_is_refused(tiny: Path, tmp_path: Path) -> None:
    data = str(tmp_path / "data")
    made = shard(str(tiny), data, OPTIONS)
    before = {path: path.stat().st_mtime_ns for path in Path(data).rglob("*")}
    said: list[str] = []
    assert shard(str(tiny), data, OPTIONS, progress=said.append) == made
    assert "up to date" in said[-1]
    assert before == {path: path.stat().st_mtime_ns for path in Path(data).rglob("*")}
    with pytest.raises(InputError, match=r"options\.max_tokens was not set, now it is 9\)\. .*overwrite=True"):
        shard(str(tiny), data, ShardOptions(tokenizer="train:300", max_tokens=9))
    write_tiny(tiny, rows=31)
    with pytest.raises(InputError, match=r"input\.test was tst.json.gz|input\.train was trn\.json\.gz \(\d+ bytes"):
        shard(str(tiny), data, OPTIONS)
    assert open_manifest(data, "data") == made
    again = shard(str(tiny), data, OPTIONS, overwrite=True)
    assert again.parameters["rows"]["train"] == 31
    assert open_manifest(f"{data}/queries/train").digest == again.parents["queries/train"]
    Path(data, "labels", "_manifest.json").unlink()
    with pytest.raises(TableError, match="unfinished table"):
        shard(str(tiny), data, OPTIONS)


def test_an_unfinished_attempt_is_made_again_and_foreign_files_are_left_alone(tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shard(str(tiny), str(data), OPTIONS)
    whole = contents(data)
    (data / "_manifest.json").unlink()
    (data / "queries" / "train" / "part-00000-of-00004.parquet").write_bytes(b"half")
    with pytest.raises(InputError, match="contains other files, but this command writes a data set"):
        shard(str(tiny), str(data), OPTIONS)
    (data / KIND_FILE).write_text("sharded\n")
    shard(str(tiny), str(data), OPTIONS)
    assert contents(data) == whole


def fails(tiny: Path, error: type[Exception] = InputError, options: ShardOptions = OPTIONS) -> str:
    """The message of a run that must fail and leave nothing."""
    data = tiny.parent / "data"
    with pytest.raises(error) as caught:
        shard(str(tiny), str(data), options)
    assert not data.exists() or contents(data) == {}
    return str(caught.value)


def test_bad_lines_fail_with_one_message_and_leave_nothing(tiny: Path) -> None:
    lines: list[Any] = [point(i, 7) for i in range(30)]
    lines[4] = b"{oops"
    lines[9] = {"uid": "x", "title": "no labels", "target_ind": []}
    lines[11] = {"uid": "y", "title": "far", "target_ind": [7]}
    lines[20] = {**point(3, 7), "title": "again"}
    lines[25] = {"uid": "z", "target_ind": [1]}
    write_lines(tiny / "trn.json.gz", lines)
    message = fails(tiny)
    assert message.splitlines() == [
        "rejected 3 of 30 rows of trn.json.gz (1 missing_field, 1 no_labels, 1 not_json). The first rejects are:",
        "  trn.json.gz, line 5: not JSON "
        "(Expecting property name enclosed in double quotes: line 1 column 2 (char 1)): '{oops'",
        "  trn.json.gz, line 10: the point 'x' has no labels (target_ind is empty)",
        "  trn.json.gz, line 26: the field 'title' is missing; found ['target_ind', 'uid']",
        'Fix these rows, leave out rows without labels with unlabelled="skip", or raise max_reject_share, which is '
        "0.001 "
        "(a label's line number is its id, so no label may be rejected).",
    ]
    message = fails(tiny, options=ShardOptions(tokenizer="train:300", max_reject_share=0.1))
    assert "rejected 5 of 30 rows of trn.json.gz (1 duplicate_key, 1 label_out_of_range, 1 missing_field" in message
    assert "trn.json.gz, line 12: label 7 does not exist; the labels are 0 to 6" in message
    data = str(tiny.parent / "data")
    shard(str(tiny), data, ShardOptions(tokenizer="train:300", max_reject_share=0.2))
    table = open_manifest(f"{data}/queries/train")
    assert table.rows == table.counters["rows_out"] == 25
    assert table.counters["rejected"] == {
        "duplicate_key": 1, "label_out_of_range": 1, "missing_field": 1, "no_labels": 1, "not_json": 1
    }  # fmt: skip
    rejected = [(row["source"], row["line"], row["reason"]) for row in rows_of(f"{data}/rejects")]
    # Of two points with one uid either may stay, but always the same one.
    assert rejected[3][1] in (4, 21)
    reasons = ["not_json", "no_labels", "label_out_of_range", "duplicate_key", "missing_field"]
    lines_of = dict(zip(reasons, [5, 10, 12, rejected[3][1], 26], strict=True))
    assert rejected == sorted(("trn.json.gz", line, reason) for reason, line in lines_of.items())
    assert open_manifest(data).parents["rejects"] == open_manifest(f"{data}/rejects", "rejects").digest
    rows = rows_of(f"{data}/queries/train")
    assert sorted(row["key"] for row in rows) == sorted(f"p{i}" for i in range(30) if i not in (4, 9, 11, 20, 25))
    kept = [point(i, 7) for i in range(30) if i not in (4, 9, 11, 20, 25)]
    frequency = [row["frequency"] for row in rows_of(f"{data}/labels")]
    assert frequency == [sum(label in record["target_ind"] for record in kept) for label in range(7)]


def test_a_bad_label_fails_at_any_share(tiny: Path) -> None:
    write_lines(tiny / "lbl.json.gz", [{"title": "a"}] * 6 + [{"uid": "b"}])
    message = fails(tiny, options=ShardOptions(tokenizer="train:300", max_reject_share=1.0))
    assert "rejected 1 of 7 rows of lbl.json.gz (1 missing_field)" in message
    assert "lbl.json.gz, line 7: the field 'title' is missing" in message


def test_two_files_of_one_split_fail(tiny: Path) -> None:
    (tiny / "trn.raw.json.gz").touch()
    assert "both trn.json.gz and trn.raw.json.gz are here" in fails(tiny)


def test_a_missing_file_says_what_was_looked_for_and_what_is_there(tiny: Path) -> None:
    (tiny / "trn.json.gz").rename(tiny / "train.json.gz")
    message = fails(tiny)
    assert f"{tiny}: no trn.json.gz or trn.raw.json.gz here; found: lbl.json.gz, train.json.gz, tst.json.gz." in message
    assert "found: nothing" in fails(tiny / "none")


def test_a_full_disk_surfaces_as_itself_and_leaves_nothing(tiny: Path) -> None:
    write_tiny(tiny, rows=3000)  # the shards outgrow what the tokenizer's files need
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16_000, hard))
    try:
        message = fails(tiny, StorageError, ShardOptions(tokenizer="train:150", shards=1, keep_text=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert message.startswith(f"could not write {tiny.parent}/data/")
    assert "after 1 attempt(s): File too large; free some space and run the same command again." in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text": "body"}, "text: expected 'title\\+content' or 'title', got 'body'"),
        ({"max_tokens": 0}, "max_tokens: expected a number greater than or equal to 1, got 0"),
        ({"shards": 0}, "shards: expected a number greater than or equal to 1"),
        ({"seed": -1}, "seed: expected a number greater than or equal to 0"),
        ({"max_reject_share": 1.5}, "max_reject_share: expected a number less than or equal to 1"),
        ({"propensity_a": 0.5}, "propensity: expected both A and B, or neither"),
        ({"tokenizer": "train:no"}, "expected train:SIZE"),
    ],
)
def test_odd_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check(ShardOptions, options)


def test_validation_is_cut_out_of_train_by_key(tmp_path: Path) -> None:
    raw = write_tate(tmp_path / "raw", 400, 50)
    cut = OPTIONS.model_copy(update={"validation_share": 0.25})
    shard(str(raw), str(tmp_path / "whole"), OPTIONS)
    manifest = shard(str(raw), str(tmp_path / "cut"), cut)
    whole = {row["key"]: row for row in rows_of(f"{tmp_path}/whole/queries/train")}
    parts = {
        split: {row["key"]: row for row in rows_of(f"{tmp_path}/cut/queries/{split}")} for split in ("train", "val")
    }
    assert not parts["train"].keys() & parts["val"].keys()
    assert parts["train"].keys() | parts["val"].keys() == whole.keys()
    assert 60 <= len(parts["val"]) <= 140
    for row in [*parts["train"].values(), *parts["val"].values()]:
        assert row["label_ids"] == whole[row["key"]]["label_ids"]
    counts = Counter(label for row in parts["train"].values() for label in row["label_ids"])
    labels = rows_of(f"{tmp_path}/cut/labels")
    assert [row["frequency"] for row in labels] == [counts[label] for label in range(len(labels))]
    assert manifest.parameters["rows"] == {"val": len(parts["val"]), "train": len(parts["train"]), "test": 50}


@pytest.mark.parametrize("group", ["equal", "near"])
def test_rows_of_a_group_are_held_out_together(tmp_path: Path, group: Literal["equal", "near"]) -> None:
    draw, form = random.Random(0), near if group == "near" else normalized
    words = ["sea", "ship", "storm", "harbour", "cloud"]
    chosen = [draw.sample(words, draw.randint(1, 3)) for _ in range(500)]
    texts = [" ".join(some) if draw.random() < 0.5 else " ".join(some).upper() for some in chosen]
    lines = [{"key": f"k{n}", "text": text, "labels": ["l"]} for n, text in enumerate(texts)]
    options = {"keep_text": True, "validation_share": 0.25, "test_share": 0.25, "shards": 3, "row_group_rows": 20}
    write_lines(tmp_path / "train.jsonl.gz", lines)
    cut = ShardOptions(tokenizer="train:300", group=group, **options)
    shard(str(tmp_path / "train.jsonl.gz"), str(tmp_path / "data"), cut)
    tables = {split: Table.open(f"{tmp_path}/data/queries/{split}", "queries") for split in ("train", "val", "test")}
    texts_of = {split: [row["text"] for row in rows_of(table.url)] for split, table in tables.items()}
    assert sorted(itertools.chain(*texts_of.values())) == sorted(texts)
    groups = [{form(text) for text in some} for some in texts_of.values()]
    assert all(groups)
    assert sum(map(len, groups)) == len({form(text) for text in texts})
    for table in tables.values():  # rows lie in the order of their keys' hashes, so shares of a split still work
        assert 0 < RowShare(0.3, 0.8).rows(table) < table.rows
    with pytest.raises(InputError, match="group: expected off, because a row of a new version"):
        shard(str(tmp_path / "train.jsonl.gz"), str(tmp_path / "more"), ShardOptions(onto=f"{tmp_path}/data"))
    with pytest.raises(InputError, match="group: expected off, because no rows are held out"):
        ShardOptions(group=group)


def test_validation_share_beside_a_validation_file_is_refused(tiny: Path) -> None:
    (tiny / "val.json.gz").write_bytes((tiny / "tst.json.gz").read_bytes())
    with pytest.raises(InputError, match="is already a validation split"):
        plans.check_inputs(choose(str(tiny)).find(str(tiny)), OPTIONS.model_copy(update={"validation_share": 0.1}))
