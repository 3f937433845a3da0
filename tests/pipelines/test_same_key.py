"""A corpus that contains the queries: no query is its own negative or its own answer, wherever it could become one."""

import json
import random
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import pytrec_eval
from hypothesis import given, settings
from hypothesis import strategies as st

from extremis.auto import write_excerpt
from pipelines.options import ShardOptions
from pipelines.shard import shard
from schemas.layout import DataLayout
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from tests.command import call, refused, sets
from trainer.stream import JoinedStream, open_sources
from trainer.stream.batch import Batch

CASE = Path(__file__).parents[1] / "cases" / "self-negative"
SMALL = "--tokenizer", "train:300"


def own_filters(data: Path | str, split: str) -> dict[str, tuple[list[str], list[str]]]:
    """(label keys, filtered keys) of each query, by key."""
    keys = keys_of(Path(data), "labels")
    return {
        row["key"]: ([keys[i] for i in row["label_ids"]], [keys[i] for i in row["filter_label_ids"]])
        for rows in Table.open(f"{data}/queries/{split}").batches(["key", "label_ids", "filter_label_ids"])
        for row in rows.to_pylist()
    }


def keys_of(data: Path, table: str) -> list[str]:
    return [key for rows in Table.open(f"{data}/{table}").batches(["key"]) for key in rows["key"].to_pylist()]


def mined_at(out: Path) -> np.ndarray:
    rows = Table.open(f"{out}/queries").batches(["label_ids"])
    return np.concatenate([matrix_column(some, "label_ids") for some in rows])


def enumerate_filters(batch: Batch) -> list[tuple[int, list[int]]]:
    assert batch.filtered is not None
    rows = np.split(batch.filtered.values, batch.filtered.offsets[1:-1])
    return list(zip(batch.rows.tolist(), (row.tolist() for row in rows), strict=True))


def lines_of(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@settings(max_examples=5)
@given(st.integers(0, 10**6), st.booleans())
def test_the_filter_pairs_are_equal_keys_except_positives(
    tmp_path_factory: pytest.TempPathFactory, seed: int, pairs: bool
) -> None:
    draw, root = random.Random(seed), tmp_path_factory.mktemp("same")
    labels, queries = [f"k{i}" for i in range(12)], [f"k{draw.randrange(20)}" for _ in range(25)]
    named = {key: draw.sample(labels, draw.randint(1, 3)) for key in queries}
    rows: list[dict[str, object]] = [{"key": key, "text": f"text {key}", "labels": named[key]} for key in queries]
    (root / "labels.jsonl").write_text(lines_of([{"key": key, "text": key} for key in labels]))
    (root / ("queries.jsonl" if pairs else "train.jsonl")).write_text(lines_of(rows))
    if pairs:
        (root / "pairs_train.tsv").write_text("".join(f"{q}\t{key}\n" for q, own in named.items() for key in own))
    said: list[str] = []
    options = ShardOptions(tokenizer="train:300", same_key="filter", shards=3)
    shard(str(root), str(root / "out"), options, progress=said.append)
    expected = {key: (sorted(own), [key] if key in labels and key not in own else []) for key, own in named.items()}
    found = own_filters(root / "out", "train")
    assert {key: (sorted(own), filters) for key, (own, filters) in found.items()} == expected
    count = sum(len(filters) for _, filters in expected.values())
    assert any(line.startswith(f"{count:,} queries have the key of a label") for line in said)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("beir") / "data"
    done = call("shard", CASE / "beir", out, *SMALL)
    assert done.status == 0, done.err
    assert "\n40 queries have the key of a label, which is never their negative or prediction" in done.err
    return out


def test_beir_filters_and_the_option_keeps(data: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        assert all(filters == [key] for key, (_, filters) in own_filters(data, split).items())
    assert call("shard", CASE / "beir", tmp_path / "out", *SMALL, "--same-key", "keep").status == 0
    assert "filter_label_ids" not in Table.open(f"{tmp_path}/out/queries/test").columns


def test_a_version_filters_as_the_data_before_it(data: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(
        lines_of([{"key": key, "text": key, "labels": ["d1"]} for key in ("d7", "x")])
    )
    done = call("shard", tmp_path, tmp_path / "out", "--onto", data)
    assert done.status == 0, done.err
    found = own_filters(tmp_path / "out", "train")
    assert (found["d7"], found["x"], len(found)) == ((["d1"], ["d7"]), (["d1"], []), 31)
    refused(call("shard", tmp_path, tmp_path / "b", "--onto", data, "--same-key", "keep"), "same_key = 'keep', but")


def test_no_stage_gives_a_query_to_itself(data: Path, tmp_path: Path) -> None:
    own = {key: label for label, key in enumerate(keys_of(data, "labels"))}
    queries = [own[key] for key in keys_of(data, "queries/train")]
    stream = JoinedStream(open_sources(DataLayout(str(data)), "train", label_texts=True), 40, batch=8, streams=2)
    seen = {int(row): filters for batch in stream for row, filters in enumerate_filters(batch)}
    assert {row: labels for row, labels in seen.items() if row < 30} == {n: [label] for n, label in enumerate(queries)}
    assert all(seen[row] == [] for row in seen if row >= 30)  # texts of labels
    excerpt = tmp_path / "excerpt"  # for the trials of `run auto`
    write_excerpt(DataLayout(str(data)), str(excerpt), 15)
    drawn = {*keys_of(excerpt, "labels")}
    filters = {key: filtered for key, (_, filtered) in own_filters(excerpt, "train").items()}
    assert filters == {key: [key] if key in drawn else [] for key in filters}
    assert [] in filters.values()
    assert any(filters.values())
    np.save(tmp_path / "q.npy", np.eye(40, dtype=np.float32)[queries])
    np.save(tmp_path / "d.npy", np.eye(40, dtype=np.float32))  # each query is the best match of itself
    vectors = tmp_path / "q.npy", tmp_path / "d.npy"
    done = call("mine", *vectors, "--positives", data, "--out", tmp_path / "m", "--width", "4")
    assert done.status == 0, done.err
    assert not (mined_at(tmp_path / "m") == np.array(queries)[:, None]).any()


def test_predictions_of_a_split_are_what_trec_eval_counts(data: Path, tmp_path: Path) -> None:
    """`evaluate` and pytrec-eval agree on a run of unique keys and on the qrels of BEIR."""
    run, export, out = tmp_path / "run", tmp_path / "export", tmp_path / "run.trec"
    for arguments in (
        (
            "train",
            "astra",
            data,
            run,
            *sets("train.epochs=1", "order.batch=8", "order.streams=1", "refresh.source=in-trainer", "refresh.start=0"),
        ),
        ("export", data, run, export),
        ("predict", export, "--data", data, "--split", "test", out, "--max-labels", "39"),
    ):
        done = call(*arguments)
        assert done.status == 0, done.err
    with out.open() as file:
        ranked = pytrec_eval.parse_run(file)
    assert len(ranked) == 10
    assert all(len(labels) == 39 and key not in labels for key, labels in ranked.items())
    rows = [line.split("\t") for line in (CASE / "beir" / "qrels" / "test.tsv").read_text().splitlines()[1:]]
    qrels = pytrec_eval.parse_qrel(f"{query} 0 {document} {score}" for query, document, score in rows)
    scores = pytrec_eval.RelevanceEvaluator(qrels, {"P_5", "recall_10"}).evaluate(ranked)
    report = call("evaluate", data, run, "--json").json
    assert report["filter_pairs"] == 10
    for name, measure in (("P@5", "P_5"), ("R@10", "recall_10")):
        mean = 100 * np.mean([each[measure] for each in scores.values()])
        assert report["metrics"][name] == pytest.approx(mean, abs=0.01), report["metrics"]
    repeated, again = CASE.parent / "trec-duplicate-key" / "dk3.jsonl", tmp_path / "again.trec"
    refused(call("predict", export, repeated, again), "the key 'a' belongs to two rows")
    assert not again.exists()
    nested = CASE.parent / "hidden-and-nested" / "s4"
    done = call("predict", export, nested, tmp_path / "out.jsonl")
    assert f"{nested}: not read: train/more/\n" in done.err, done.err


def test_vectors_in_files_are_mined_without_the_query_itself(tmp_path: Path) -> None:
    arguments = CASE / "q.parquet", CASE / "d.parquet", "--positives", CASE / "p.csv", "--width", "7"
    said = {}
    for kind in ("keep", "filter"):
        done = call("mine", *arguments, "--same-key", kind, "--out", tmp_path / kind)
        assert done.status == 0, done.err
        said[kind] = done.err
        assert (mined_at(tmp_path / kind) == np.arange(8)[:, None]).any(axis=1).all() == (kind == "keep")
    assert "8 queries have the key of a document, which is never their negative" in said["filter"]
    table = pq.read_table(CASE / "q.parquet").drop_columns(["key"])
    pq.write_table(table, tmp_path / "q.parquet")
    refused(
        call("mine", tmp_path / "q.parquet", *arguments[1:2], "--same-key", "filter", "--out", tmp_path / "o"),
        "both sides need keys",
    )


def test_formats_without_keys_refuse_the_option(tmp_path: Path) -> None:
    for name, text in (("trn_X.txt", "a\n"), ("Y.txt", "a\n"), ("trn_X_Y.txt", "1 1\n0:1\n")):
        (tmp_path / name).write_text(text)
    refused(
        call("shard", tmp_path, tmp_path / "out", "--same-key", "filter"),
        "--same-key filter: labels of the format xc-text",
    )
