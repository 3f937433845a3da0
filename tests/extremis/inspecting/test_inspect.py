"""`extremis inspect`: tables, DATA and RUN as wholes, words for ids, and one query with its joined negatives."""

import shutil
from pathlib import Path

import pyarrow as pa
import pytest

from extremis.inspecting import clean_text, find_row
from schemas.errors import TableError
from schemas.manifest import open_manifest
from schemas.table import Table
from tests.command import Done, call, refused


def read(url: Path, row: int) -> dict:
    """One row, in the plainest way."""
    manifest = open_manifest(str(url))
    for shard in manifest.shards:
        if row < shard.rows:
            return pa.parquet.read_table(url / shard.path).slice(row, 1).to_pylist()[0]
        row -= shard.rows
    raise AssertionError


def texts(data: Path, labels: list[int]) -> list[str]:
    return [clean_text(read(data / "labels", label)["text"]) for label in labels]


def test_a_table(data: Path, mined: Path) -> None:
    done = call("inspect", data / "queries" / "train", "--verify", "--rows", "2", "--json")
    assert done.status == 0, done.err
    body = done.json
    assert (body["kind"], body["rows"], body["verified"]) == ("queries", 1500, True)
    assert body["digest"] == open_manifest(str(data / "queries" / "train")).digest
    assert done.err.count("'input_ids'") == done.err.count("'words'") == 2
    assert "verified: " in done.err
    for url in (
        data,
        data / "tokenizer",
        mined / "dumps" / "epoch-0000" / "vectors",
        max((mined / "checkpoints").iterdir()),
    ):
        assert call("inspect", f"{url}/_manifest.json").status == 0


def test_data_as_a_whole(data: Path) -> None:
    done = call("inspect", data, "--verify", "--json")
    body = done.json
    assert body["kind"] == "data"
    assert set(body["tables"]) == {"labels", "queries/train", "queries/test", "rejects", "tokenizer"}
    assert body["tables"]["queries/train"]["rows"] == 1500
    assert body["bytes"] == sum(
        path.stat().st_size for path in data.rglob("*") if path.is_file() and path.name != "_manifest.json"
    )
    assert body["checks"] == {}
    first = read(data / "queries" / "train", 0)
    assert body["queries"][0]["key"] == first["key"]
    assert [item["label_id"] for item in body["queries"][0]["positives"]] == first["label_ids"]
    assert [item["text"] for item in body["queries"][0]["positives"]] == texts(data, first["label_ids"])


def test_a_run_as_a_whole(mined: Path) -> None:
    body = call("inspect", mined, "--verify", "--json").json
    assert body["kind"] == "run"
    assert {"dumps/epoch-0000/queries", "dumps/epoch-0000/vectors", "negatives/epoch-0002/queries"} <= set(
        body["tables"]
    )
    assert body["tables"]["negatives/epoch-0002/queries"]["kind"] == "negatives"


def test_what_is_unfinished_damaged_or_replaced_is_named(data: Path, mined: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(data, tmp_path / "data"))
    (copy / "queries" / "test" / "_manifest.json").unlink()
    shutil.copy(copy / "labels" / "_manifest.json", copy / "queries" / "train" / "_manifest.json")
    done = call("inspect", copy, "--rows", "0", "--json")
    assert done.status == 0, done.err
    assert done.json["checks"]["queries/test"][0].startswith("unfinished")
    assert "the table was replaced" in done.json["checks"]["queries/train"][0]
    refused(call("inspect", copy, "--rows", "0", "--verify"), "queries/train")
    other = Path(shutil.copytree(mined, tmp_path / "run"))
    shard = next((other / "negatives" / "epoch-0002" / "queries").glob("part-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert call("inspect", other).status == 0
    refused(call("inspect", other, "--verify"), shard.name, "damaged")


def test_a_query_by_its_key_with_positives_and_negatives_in_words(data: Path, mined: Path) -> None:
    row = read(data / "queries" / "train", 777)
    done = call("inspect", data, "--run", mined, "--key", row["key"], "--json")
    (query,) = done.json["queries"]
    assert (query["split"], query["query_id"], query["key"]) == ("train", 777, row["key"])
    assert [item["text"] for item in query["positives"]] == texts(data, row["label_ids"])
    joined = read(mined / "negatives" / "epoch-0004" / "queries", 777)
    assert [item["label_id"] for item in query["negatives"]] == joined["label_ids"]
    assert [item["text"] for item in query["negatives"]] == texts(data, joined["label_ids"])
    assert [item["score"] for item in query["negatives"]] == pytest.approx(joined["scores"])
    for text in texts(data, row["label_ids"] + joined["label_ids"]):
        assert text in done.err


def test_a_query_of_another_split_has_no_negatives_and_says_so(data: Path, mined: Path) -> None:
    key = read(data / "queries" / "test", 3)["key"]
    done = call("inspect", data, "--run", mined, "--key", key, "--json")
    assert done.json["queries"][0]["split"] == "test"
    assert done.json["queries"][0]["negatives"] == []
    assert "no hard negatives" in done.err


def test_a_miner_cut_off_at_its_work_hides_no_table(data: Path, mined: Path, tmp_path: Path) -> None:
    """Whoever kills a miner leaves its claim and candidates beside, or in the place of, tables."""
    copy = Path(shutil.copytree(mined, tmp_path / "run"))
    for epoch in ("epoch-0004", "epoch-0005"):
        (copy / "negatives" / epoch / ".candidates").mkdir(parents=True)
        (copy / "negatives" / epoch / ".claim.json").write_text("{}")
    told = [call("inspect", data, "--run", place, "--json").json["queries"] for place in (mined, copy)]
    assert told[0] == told[1]
    assert told[0][0]["negatives"]
    done = call("report", data, copy, "--queries", "5", "--no-predictions", "--out", tmp_path / "page.html")
    assert done.status == 0, done.err


def test_wrong_use_is_refused(data: Path, mined: Path, tmp_path: Path) -> None:
    refused(call("inspect", data, "--key", "no such key"), "no such key", "rejects")
    refused(call("inspect", data, "--key", "x", "--split", "nosuch"), "nosuch", "train")
    refused(call("inspect", data, "--run", data), "config.toml")
    refused(call("inspect", tmp_path / "nothing"), "no table here")
    (tmp_path / "foreign" / "deep").mkdir(parents=True)
    (tmp_path / "foreign" / "deep" / "file.txt").write_text("hello")
    refused(call("inspect", tmp_path / "foreign"), "foreign")


@pytest.mark.parametrize("seed", [0, None])
def test_every_key_is_found_by_bisection_and_by_reading(data: Path, seed: int | None) -> None:
    """`extremis shard` sorts by the keys' hash; without its seed nothing is known of the order."""
    url = str(data / "queries" / "train")
    manifest = open_manifest(url)
    table = Table(url, manifest.model_copy(update={"parameters": {} if seed is None else {"seed": seed}}))
    keys = table.read(["key"]).column("key").to_pylist()
    for row in (0, 63, 64, 750, manifest.rows - 1):
        assert find_row(table, keys[row]) == row
    assert find_row(table, "no such key") is None
    assert find_row(table, "") is None


def test_a_text_cannot_write_to_the_terminal() -> None:
    assert clean_text("a\x1b[31mred\x07\n b\u202e") == "a�[31mred� b�"
    assert clean_text("long text", 5) == "long…"


def test_a_key_with_control_characters_is_shown_harmless(tmp_path: Path) -> None:
    from tests.pipelines.raw import point, write_lines, write_tiny

    raw = write_tiny(tmp_path / "raw", rows=20)
    write_lines(raw / "trn.json.gz", [{**point(i, 7), "uid": f"p{i}\x1b[2J"} for i in range(20)])
    sharded: Done = call("shard", raw, tmp_path / "data", "--tokenizer", "train:300")
    assert sharded.status == 0, sharded.err
    shown = call("inspect", tmp_path / "data")
    assert shown.status == 0
    assert "\x1b[2J" not in shown.out
    assert "\x1b[2J" not in call("inspect", tmp_path / "data" / "queries" / "train").out


def test_a_damaged_manifest_below_a_prefix_is_an_entry_not_the_end(mined: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(mined, tmp_path / "run"))
    (other / "dumps" / "epoch-0000" / "vectors" / "_manifest.json").write_text("{")
    body = call("inspect", other, "--json").json
    assert "damaged" in body["checks"]["dumps/epoch-0000/vectors"][0]
    with pytest.raises(TableError):
        open_manifest(str(other / "dumps" / "epoch-0000" / "vectors"))
