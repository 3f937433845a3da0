"""Raw inputs for both checkouts: the first lines of the Tate collection in four forms, and a small transformer."""

import gzip
import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

TATE = Path(__file__).parents[2] / "examples" / "tate"
FEATURES = 512


def write_inputs(folder: Path, rows: int, test_rows: int, labels: int, vocabulary: int) -> None:
    """Write `xc`, `jsonl`, `beir`, `sparse` and `bert` below `folder`; equal sizes give equal bytes."""
    names = [{**record, "uid": f"L{number}"} for number, record in enumerate(_read("lbl", labels))]
    points = {"trn": _read("trn", rows), "tst": _read("tst", test_rows)}
    for record in (*points["trn"], *points["tst"]):
        record["target_ind"] = [label for label in record["target_ind"] if label < labels] or [0]
    _write_xc(folder / "xc", points, names)
    _write_jsonl(folder / "jsonl", points, names)
    _write_beir(folder / "beir", points, names)
    _write_sparse(folder / "sparse", points, labels)
    _write_bert(folder / "bert", vocabulary)


def text_of(record: dict[str, Any]) -> str:
    return f"{record['title']} {record['content']}".strip()


def _read(name: str, count: int) -> list[dict[str, Any]]:
    with gzip.open(TATE / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in islice(file, count)]


def _write_xc(folder: Path, points: dict[str, list[dict[str, Any]]], names: list[dict[str, Any]]) -> None:
    for name, records in {**points, "lbl": names}.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    for split in ("train", "test"):  # a few predictions that the evaluation must ignore
        (folder / f"filter_labels_{split}.txt").write_text("0 1\n5 2\n9 3\n")


def _write_jsonl(folder: Path, points: dict[str, list[dict[str, Any]]], names: list[dict[str, Any]]) -> None:
    _write_lines(folder / "labels.jsonl", ({"key": record["uid"], "text": text_of(record)} for record in names))
    for name, split in (("trn", "train"), ("tst", "test")):
        records = [
            {"key": record["uid"], "text": text_of(record), "labels": [f"L{i}" for i in record["target_ind"]]}
            for record in points[name]
        ]
        if split == "train":  # one duplicate and one reject
            records += [records[0], {"key": "", "text": "no key", "labels": ["L0"]}]
        _write_lines(folder / f"{split}.jsonl", records)


def _write_beir(folder: Path, points: dict[str, list[dict[str, Any]]], names: list[dict[str, Any]]) -> None:
    _write_lines(folder / "corpus.jsonl", ({"_id": record["uid"], "text": text_of(record)} for record in names))
    records = [*points["trn"], *points["tst"]]
    _write_lines(folder / "queries.jsonl", ({"_id": record["uid"], "text": text_of(record)} for record in records))
    (folder / "qrels").mkdir(exist_ok=True)
    for name, split in (("trn", "train"), ("tst", "test")):
        pairs = [f"{record['uid']}\tL{label}\t1\n" for record in points[name] for label in record["target_ind"]]
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(pairs))


def _write_sparse(folder: Path, points: dict[str, list[dict[str, Any]]], labels: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in points.items():
        rows = [{sum(word.encode()) % FEATURES for word in text_of(record).lower().split()} for record in records]
        features = [" ".join(f"{i}:{1 / (1 + i % 7):.4g}" for i in sorted(row)) for row in rows]
        (folder / f"{name}_X_Xf.txt").write_text("\n".join([f"{len(rows)} {FEATURES}", *features]) + "\n")
        matrix = [" ".join(f"{label}:1" for label in record["target_ind"]) for record in records]
        (folder / f"{name}_X_Y.txt").write_text("\n".join([f"{len(rows)} {labels}", *matrix]) + "\n")


def _write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def _write_bert(folder: Path, vocabulary: int) -> None:
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
