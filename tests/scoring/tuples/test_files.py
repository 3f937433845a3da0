"""Files of examples: what the stream deals, published whole, as the libraries read them that they are for."""

import bz2
import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

import extremis
from schemas.errors import InputError
from schemas.table import Table
from scoring.tuples import TupleStream, write_tuples
from tests.command import call, refused
from tests.scoring.tuples.test_stream import FORMS
from tests.scoring.tuples.world import World, build, frozen

READERS = {"": bytes, ".gz": gzip.decompress, ".bz2": bz2.decompress}
READERS[".zst"] = lambda data: zstandard.ZstdDecompressor().decompressobj().decompress(data)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return build(tmp_path_factory.mktemp("tuples") / "mined")


def lines(path: Path) -> list[dict]:
    data = READERS[path.suffix if path.suffix in READERS else ""](path.read_bytes())
    return [json.loads(line) for line in data.decode().splitlines()]


@pytest.mark.parametrize("form", FORMS)
def test_files_hold_what_the_stream_deals(world: World, form: str, tmp_path: Path) -> None:
    def stream(**options: object) -> TupleStream:
        opened = TupleStream(world.root, form=form, negatives=2, **options)
        opened.set_epoch(3)
        return opened

    dealt = list(stream())
    write_tuples(stream(), str(tmp_path / "shuffled.jsonl"), shuffle=True)
    assert lines(tmp_path / "shuffled.jsonl") == dealt
    manifest = write_tuples(stream(), str(tmp_path / "shuffled"), shuffle=True, shards=3)
    table = Table.open(str(tmp_path / "shuffled"), "tuples")
    assert table.manifest == manifest
    assert table.read().to_pylist() == dealt
    assert [shard.rows for shard in table.shards] == [len(dealt) * (i + 1) // 3 - len(dealt) * i // 3 for i in range(3)]
    write_tuples(stream(), str(tmp_path / "rows.jsonl.gz"))
    rows = lines(tmp_path / "rows.jsonl.gz")
    assert Counter(map(frozen, rows)) == Counter(map(frozen, dealt))
    anchors = [world.queries.index(row["query" if form in FORMS[-2:] else "anchor"]) for row in rows]
    assert anchors == sorted(anchors)


@settings(max_examples=10)
@given(end=st.sampled_from(list(READERS)), shards=st.integers(1, 80), threads=st.integers(0, 2))
def test_the_same_input_gives_the_same_bytes(
    world: World, tmp_path_factory: pytest.TempPathFactory, end: str, shards: int, threads: int
) -> None:
    made = []
    for number, streams in enumerate((0, threads)):
        folder = tmp_path_factory.mktemp(str(number))
        for out, count in ((f"rows.jsonl{end}", None), ("shards", shards)):
            write_tuples(TupleStream(world.root, threads=streams), str(folder / out), True, count)
        made.append({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()})
    assert made[0] == made[1]


@pytest.mark.parametrize("form", FORMS)
def test_datasets_reads_them(world: World, form: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    options = {"form": form, "negatives": 2, "progress": False}
    made = extremis.tuples(world.root, tmp_path / "rows.jsonl.zst", **options)
    extremis.tuples(world.root, tmp_path / "shards", shards=2, **options)
    cache = {"cache_dir": str(tmp_path / "cache"), "split": "train"}
    of_lines = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl.zst"), **cache)
    of_shards = datasets.load_dataset(str(tmp_path / "shards"), **cache)
    assert of_lines.to_list() == of_shards.to_list()
    assert len(of_shards) == made.examples
    expected = {
        "triplets": ["anchor", "positive", "negative"],
        "tuples": ["anchor", "positive", "negative_1", "negative_2"],
        "pairs": ["anchor", "other", "label"],
        "lists": ["anchor", "documents", "labels"],
        "tevatron": ["query_id", "query", "positive_passages", "negative_passages"],
        "flagembedding": ["query", "pos", "neg"],
    }
    assert of_shards.column_names == expected[form]


def test_tevatron_and_flagembedding_find_the_fields_that_they_need(world: World, tmp_path: Path) -> None:
    """By what their loaders read: tevatron's `TrainDataset`, FlagEmbedding's `AbsEmbedderTrainDataset`."""
    write_tuples(TupleStream(world.root, form="tevatron"), str(tmp_path / "tevatron.jsonl"))
    for line in lines(tmp_path / "tevatron.jsonl"):
        assert isinstance(line["query_id"], str)
        assert isinstance(line["query"], str)
        for passage in [*line["positive_passages"], *line["negative_passages"]]:
            assert {name: type(value) for name, value in passage.items()} == dict.fromkeys(
                ("docid", "title", "text"), str
            )
        assert line["positive_passages"]
        assert line["negative_passages"]
    write_tuples(TupleStream(world.root, form="flagembedding", scores="search"), str(tmp_path / "flag.jsonl"))
    for line in lines(tmp_path / "flag.jsonl"):
        assert isinstance(line["query"], str)
        for side in ("pos", "neg"):
            assert line[side]
            assert all(isinstance(text, str) for text in line[side])
            assert len(line[f"{side}_scores"]) == len(line[side])


def test_what_fails_leaves_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = TupleStream.blocks

    def broken(stream: TupleStream, shuffle: bool = True):
        yield from list(blocks(stream, shuffle))[:2]
        raise InputError("the rest is damaged")

    monkeypatch.setattr(TupleStream, "blocks", broken)
    for out in ("rows.jsonl", "rows.jsonl.gz", "shards"):
        with pytest.raises(InputError, match="the rest is damaged"):
            write_tuples(TupleStream(world.root), str(tmp_path / out))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_the_command(world: World, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    done = call(
        "tuples", world.table, out, "--data", world.data, "--form", "pairs", "--shuffle", "--seed", "4", "--json"
    )
    expected = list(TupleStream(world.root, form="pairs", seed=4))
    assert Table.open(str(out)).read().to_pylist() == expected
    assert done.json["examples"] == len(expected)
    again = call(
        "tuples", world.table, out, "--data", world.data, "--form", "pairs", "--shuffle", "--seed", "4", "--json"
    )
    assert again.json["digest"] == done.json["digest"]
    refused(
        call("tuples", world.root, out, "--form", "lists"), "made with other options", "form was 'pairs'", "--overwrite"
    )
    call("tuples", world.root, out, "--form", "lists", "--overwrite")
    assert Table.open(str(out)).parameters["form"] == "lists"
    assert "tuples" in call("inspect", out).out


def test_what_is_in_the_way_stays(world: World, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("kept\n")
    (tmp_path / "rows.jsonl").write_text("kept\n")
    for out, words in (
        (tmp_path / "notes", ("other files", "give another path")),
        (tmp_path / "rows.jsonl", ("this file exists already", "--overwrite")),
        (world.root, ("the command reads this", "Give another path")),
        (Path(world.data) / "inside", ("is inside", "which the command reads")),
        (world.root / "queries" / "inside", ("is inside", "which the command reads")),
        (tmp_path / "rows.parquet", ("expected a file that ends in .jsonl", "or a folder")),
    ):
        refused(call("tuples", world.root, out), *words)
    refused(call("tuples", world.root, tmp_path / "new.jsonl", "--shards", "2"), "--shards works only with a folder")
    refused(call("tuples", world.root, tmp_path / "new", "--negatives", "9"), "has 5 negatives per row")
    assert (tmp_path / "rows.jsonl").read_text() == "kept\n"
    assert not (tmp_path / "new").exists()
