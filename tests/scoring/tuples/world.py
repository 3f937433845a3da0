"""A small DATA with texts, as mining of arrays leaves it, its table of negatives, and the examples by definition."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipelines.arrays import ColumnNames, open_mined
from schemas import PAD, arrow
from schemas.layout import DataLayout
from schemas.manifest import Manifest, publish
from schemas.shard_files.parquet import list_array, matrix_array
from schemas.shard_files.shards import write_table
from tests.builders import cut, ragged

WORDS = ["ship", "sea", "Öl", "a\nline", '"quoted"', "𝄞", "storm"]


@dataclass(frozen=True)
class World:
    """A mining of arrays at `root`: positives and negatives of each row, and their scores."""

    root: Path
    positives: list[list[int]]
    negatives: np.ndarray
    scores: np.ndarray
    positive_scores: list[list[float]]
    queries: list[str]
    labels: list[str]

    @property
    def data(self) -> str:
        return str(self.root / "data")

    @property
    def table(self) -> str:
        return str(self.root / "queries")

    def found(self, row: int) -> list[int]:
        return [label for label in self.negatives[row].tolist() if label != PAD]


def build(root: Path, *, rows: int = 60, labels: int = 30, width: int = 5, seed: int = 0, ranges: int = 1) -> World:
    """Publish OUT of a mining of arrays; some rows have no positive, and some fewer negatives."""
    draw, layout = np.random.default_rng(seed), DataLayout(str(root / "data"))
    positives = [np.sort(draw.choice(labels, draw.integers(0, 4), replace=False)).tolist() for _ in range(rows)]
    negatives = np.full((rows, width), PAD, np.int64)
    for row, some in enumerate(positives):
        others = draw.permutation(np.setdiff1d(np.arange(labels), some))[: draw.choice([0, width - 1, width, width])]
        negatives[row, : len(others)] = others
    texts = {
        name: [f"{name} {i} {draw.choice(WORDS)}" for i in range(n)] for name, n in (("query", rows), ("label", labels))
    }
    vectors = {"query": draw.normal(size=(rows, 4)), "label": draw.normal(size=(labels, 4))}
    vectors = {name: matrix.astype(np.float32) for name, matrix in vectors.items()}
    dots = vectors["query"] @ vectors["label"].T
    scores = np.where(negatives == PAD, -np.inf, np.take_along_axis(dots, negatives, axis=1)).astype(np.float16)
    kind = arrow.label_type(labels)
    table = {
        "query_id": pa.array(np.arange(rows)),
        "key": pa.array([f"q{i}" for i in range(rows)]),
        "label_ids": list_array(*ragged(positives), kind),
        "text": pa.array(texts["query"]),
    }
    queries = write_table(layout.queries("train"), "queries", cut(_plain(table), 3), 7)
    columns = {
        "label_id": pa.array(np.arange(labels)),
        "key": pa.array([f"d{i}" for i in range(labels)]),
        "text": pa.array(texts["label"]),
        "frequency": pa.array(np.zeros(labels, np.int64)),
    }
    known = write_table(layout.labels, "labels", cut(_plain(columns), 2), 5)
    places = {"queries": root / "vectors/queries.npy", "labels": root / "vectors/labels.npy"}
    for place, matrix in zip(places.values(), vectors.values(), strict=True):
        place.parent.mkdir(parents=True, exist_ok=True)
        np.save(place, matrix)
    arrays = dict.fromkeys(("fields", "fields_of_labels"), vars(ColumnNames()))
    arrays |= {"metric": "inner", "places": {name: str(place) for name, place in places.items()}}
    made = {"queries/train": queries.digest, "labels": known.digest}
    publish(layout.root, Manifest(kind="data", parents=made, parameters={"arrays": arrays}))
    parents = {"queries": queries.digest} | {table.kind: table.digest for table in open_mined(str(root))}
    mined = {
        "query_id": pa.array(np.arange(rows)),
        "label_ids": matrix_array(negatives, kind),
        "scores": matrix_array(scores, pa.float16()),
    }
    mined["teacher"] = matrix_array((scores * np.float16(2)).astype(np.float16), pa.float16())
    parameters = {"ranges": [[0, labels]] * ranges}
    write_table(str(root / "queries"), "negatives", cut(_plain(mined), 3), 7, parents=parents, parameters=parameters)
    if ranges > 1:
        best = np.argsort(-scores.astype(np.float32), axis=1, kind="stable")
        negatives, scores = (np.take_along_axis(each, best, axis=1) for each in (negatives, scores))
    of_positives = [[float(dots[row, label]) for label in some] for row, some in enumerate(positives)]
    return World(root, positives, negatives, scores, of_positives, texts["query"], texts["label"])


def _plain(columns: dict[str, Any]) -> pa.Table:
    return pa.table(columns, schema=arrow.without_nulls({name: column.type for name, column in columns.items()}))


def expected(world: World, form: str, n: int) -> Counter:
    """All examples of the rows, each for each of its positives, by definition, as `frozen` has them."""
    examples: list[dict] = []
    for row, positives in enumerate(world.positives):
        anchor, found = world.queries[row], world.found(row)[:n]
        texts = [world.labels[label] for label in found]
        if form == "pairs" and positives:
            labelled = [(world.labels[label], 1) for label in positives] + [(text, 0) for text in texts]
            examples += [{"anchor": anchor, "other": text, "label": label} for text, label in labelled]
        if not positives or not found:
            continue
        passages = {
            name: [{"docid": f"d{label}", "title": "", "text": world.labels[label]} for label in some]
            for name, some in (("positive_passages", positives), ("negative_passages", found))
        }
        if form == "tevatron":
            examples.append({"query_id": f"q{row}", "query": anchor, **passages})
        if form == "flagembedding":
            examples.append({"query": anchor, "pos": [world.labels[label] for label in positives], "neg": texts})
        for label in positives:
            positive = {"anchor": anchor, "positive": world.labels[label]}
            if form == "triplets":
                examples += [{**positive, "negative": text} for text in texts]
            if form == "tuples" and len(texts) == n:
                examples.append(positive | {f"negative_{i}": text for i, text in enumerate(texts, 1)})
            if form == "lists":
                documents = [world.labels[label], *texts]
                examples.append({"anchor": anchor, "documents": documents, "labels": [1, *([0] * len(texts))]})
    return Counter(map(frozen, examples))


def frozen(example: dict) -> str:
    return repr(sorted(example.items()))
