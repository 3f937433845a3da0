"""A small DATA and RUN as the sharder and the trainer leave them, and brute force over the arrays behind them."""

import bisect
import itertools
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipelines.mining.inputs import open_inputs
from pipelines.mining.plan import MinePlan, make_plan
from pipelines.options import MineOptions
from schemas import arrow
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest
from schemas.shard_files.parquet import list_array, matrix_array, matrix_column
from schemas.shard_files.shards import write_table
from schemas.storage import join
from schemas.table import Table

TOKENS = pa.uint16()


def ragged(rows: list[list[int]], type: pa.DataType) -> pa.ListArray:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
    return list_array(np.asarray([value for row in rows for value in row], np.int64), offsets, type)


def random_rows(generator: np.random.Generator, rows: int, labels: int, most: int) -> list[list[int]]:
    """Distinct sorted labels a row, from none to `most`."""
    sizes = generator.integers(0, min(most, labels) + 1, rows)
    return [sorted(generator.choice(labels, size, replace=False).tolist()) for size in sizes]


@dataclass
class World:
    """Arrays in memory: queries [N, D] (stored as float16), vectors [L, D], positives and filters a row."""

    data: str
    run: str
    queries: np.ndarray
    vectors: np.ndarray
    positives: list[list[int]]
    filters: list[list[int]] | None = None
    shards: int = 2
    row_group_rows: int = 8
    epoch: int = 3
    width: int = 5
    with_labels: bool = False
    step: int = 77
    texts: list[str] | None = None  # of the labels
    query_texts: list[str] | None = None

    @property
    def layout(self) -> RunLayout:
        return RunLayout(self.run)

    def edges(self, rows: int) -> list[tuple[int, int]]:
        cuts = [rows * i // self.shards for i in range(self.shards + 1)]
        return list(itertools.pairwise(cuts))

    def write_data(self) -> dict[str, Manifest]:
        count, labels = len(self.queries), len(self.vectors)
        label_type = arrow.label_type(labels)
        schema = arrow.queries(TOKENS, label_type, filters=self.filters is not None, text=self.query_texts is not None)
        columns = {
            "query_id": pa.array(np.arange(count)),
            "key": pa.array([f"q{i}" for i in range(count)]),
            "input_ids": ragged([[i % 7] for i in range(count)], TOKENS),
            "label_ids": ragged(self.positives, label_type),
        }
        if self.filters is not None:
            columns["filter_label_ids"] = ragged(self.filters, label_type)
        if self.query_texts is not None:
            columns["text"] = pa.array(self.query_texts)
        table = pa.table(columns, schema=schema)
        names = pa.array([f"label {i}" for i in range(labels)])
        label_table = pa.table(
            {
                "label_id": pa.array(np.arange(labels)),
                "key": names,
                "text": names if self.texts is None else pa.array(self.texts),
                "input_ids": ragged([[i % 7] for i in range(labels)], TOKENS),
                "frequency": pa.array(np.ones(labels, np.int64)),
            },
            schema=arrow.labels(TOKENS),
        )
        data = DataLayout(self.data)
        return {
            "queries": self._write(data.queries("train"), "queries", table),
            "labels": self._write(data.labels, "labels", label_table),
        }

    def write_dump(self, parents: dict[str, Manifest] | None = None, vectors: bool = True, **requested: object) -> None:
        """The dump of `epoch`, vectors last."""
        parents = self.write_data() if parents is None else parents
        dimension = self.vectors.shape[1]
        sources = {"queries": self.queries, **({"labels": self.label_embeddings} if self.with_labels else {})}
        for name, embeddings in sources.items():
            ids = pa.array(np.arange(len(embeddings)))
            table = pa.table(
                {"query_id": ids, "vector": matrix_array(embeddings.astype(np.float16), pa.float16())},
                schema=arrow.embeddings(dimension),
            )
            url = self.layout.embeddings(self.epoch, name)
            self._write(url, "embeddings", table, parents={"queries": parents[name].digest})
        if vectors:
            self.write_vectors(sources=list(sources), **requested)

    def write_vectors(self, sources: list[str], **requested: object) -> Manifest:
        labels, dimension = self.vectors.shape
        table = pa.table(
            {
                "label_id": pa.array(np.arange(labels)),
                "vector": matrix_array(self.vectors.astype(np.float32), pa.float32()),
            },
            schema=arrow.vectors(dimension),
        )
        parameters = {
            "sources": sources,
            "epoch": self.epoch,
            "step": self.step,
            "use_from": self.epoch + 2,
            "table_width": self.width,
            "index": "auto",
            **requested,
        }
        return self._write(
            self.layout.vectors(self.epoch), "vectors", table, id_range=(0, labels), parameters=parameters
        )

    def _write(self, url: str, kind: str, table: pa.Table, **fields: object) -> Manifest:
        shards = [table.slice(low, high - low) for low, high in self.edges(table.num_rows)]
        fields.setdefault("id_range", (0, table.num_rows))
        return write_table(url, kind, shards, self.row_group_rows, **fields)

    @property
    def label_embeddings(self) -> np.ndarray:
        return np.roll(self.vectors, 1, axis=1)

    def excluded(self, source: str) -> list[set[int]]:
        if source == "labels":
            return [{label} for label in range(len(self.vectors))]
        filters = self.filters or [[] for _ in self.positives]
        return [set(a) | set(b) for a, b in zip(self.positives, filters, strict=True)]

    def scores(self, source: str) -> np.ndarray:
        """Every score of every row, in float64: [N, L]."""
        queries = self.label_embeddings if source == "labels" else self.queries
        return queries.astype(np.float16).astype(np.float64) @ self.vectors.astype(np.float32).astype(np.float64).T


def brute_force(scores: np.ndarray, excluded: list[set[int]], width: int) -> np.ndarray:
    """The table that exact mining makes: label ids [N, K], score down, then id up, -1 at the end."""
    table = np.full((len(scores), width), -1)
    for row, (line, gone) in enumerate(zip(scores, excluded, strict=True)):
        left = [label for label in range(len(line)) if label not in gone]
        best = sorted(left, key=lambda label: (-line[label], label))[:width]
        table[row, : len(best)] = best
    return table


def random_world(root: str, rows: int, labels: int, dimension: int, seed: int = 0, most: int = 6, **fields) -> World:
    generator = np.random.default_rng(seed)
    return World(
        data=join(root, "data"),
        run=join(root, "run"),
        queries=generator.standard_normal((rows, dimension)),
        vectors=generator.standard_normal((labels, dimension)).astype(np.float32),
        positives=random_rows(generator, rows, labels, most),
        **fields,
    )


def read_negatives(url: str, manifest: Manifest) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(query_id [N], label_ids [N, K], scores [N, K]) of a whole table."""
    table = Table(url, manifest).read()
    return table.column("query_id").to_numpy(), matrix_column(table, "label_ids"), matrix_column(table, "scores")


def plan_of(world: World, options: MineOptions) -> MinePlan:
    return make_plan(open_inputs(world.data, world.run, world.epoch, options), options, {})


def apart(world: World, options: MineOptions, blocks: int = 1) -> MineOptions:
    """The options with a memory that `blocks` blocks fit into together, and no more."""
    inputs = open_inputs(world.data, world.run, world.epoch, options)

    def at_once(memory: int) -> int:
        try:
            plan = make_plan(inputs, options.model_copy(update={"memory": memory}), {})
        except InputError:
            return 0
        return max(stop - first for first, stop in plan.groups)

    least = bisect.bisect_left(range(1 << 30), 1, key=at_once)
    block = max(stop - start for start, stop in make_plan(inputs, options, {}).bounds)
    return options.model_copy(update={"memory": least + 4 * world.vectors.shape[1] * block * (blocks - 1)})
