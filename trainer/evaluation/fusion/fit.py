"""Fitting of a run's tree on a split that it was not trained on (NGAME, appendix C)."""

import numpy as np
import pyarrow as pa
import torch

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, is_published, open_manifest, publish, unpublish, write_file
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of, list_column
from schemas.shard_files.shards import iterate
from schemas.storage import join
from schemas.tables import PAD
from trainer.checkpoints.checkpoint import Checkpoint
from trainer.evaluation.evaluate import label_statistics
from trainer.evaluation.fusion.fused import score_pairs
from trainer.evaluation.fusion.ranking import Ranking, embed_label_texts
from trainer.evaluation.fusion.tree import DEPTH, Fusion
from trainer.inputs import scored_columns
from trainer.model import Model, load_model
from trainer.stream import Table, open_queries

KIND, TREE = "fusion", "tree.json"
SHORTLIST, QUERIES = 100, 10_000


def fit_fusion(
    data: str, run: str, split: str = "val", step: int | None = None, shortlist: int = SHORTLIST, queries: int = QUERIES
) -> Manifest:
    """Fit the tree for a checkpoint on the first `queries` of `split`: on their `shortlist` best labels and their own.

    A tree that is there already is replaced.
    Raises InputError: no such split, no texts, no classifier; TableError, StorageError.
    """
    layout = DataLayout(data)
    table = _open(layout, split)
    _, model, checkpoint = load_model(layout, RunLayout(run), step)
    texts, frequency = embed_label_texts(model, layout), label_statistics(layout).frequency
    parts, seen = [], 0
    for group in iterate(table.url, table.manifest, scored_columns(table.manifest, model.columns)):
        rows = group.slice(0, queries - seen)
        parts.append(_score_shortlist(model, texts, rows, shortlist))
        seen += rows.num_rows
        if seen >= queries:
            break
    label_scores, scores, ids, relevant = map(np.concatenate, zip(*parts, strict=True))
    tree = Fusion.fit(label_scores, scores, frequency[ids], relevant)
    url = RunLayout(run).fusion(checkpoint.step)
    if is_published(url):
        unpublish(url)
    return publish(
        url,
        Manifest(
            kind=KIND,
            shards=(write_file(url, TREE, tree.to_json()),),
            parents={"data": open_manifest(data, "data").digest, "checkpoint": checkpoint.manifest.digest},
            parameters={
                "split": split,
                "queries": seen,
                "pairs": len(relevant),
                "positive_pairs": int(relevant.sum()),
                "shortlist": shortlist,
                "depth": DEPTH,
            },
        ),
    )


def open_fusion(data: str, run: str, checkpoint: Checkpoint) -> tuple[Fusion, Manifest]:
    """Open the tree of `checkpoint`. Raises InputError where `extremis fuse` made none, TableError."""
    url, step = RunLayout(run).fusion(checkpoint.step), checkpoint.step
    if not is_published(url):
        raise InputError(f"{run}: no tree is fitted for step {step:,}. `extremis fuse {data} {run}` fits one.")
    manifest = open_manifest(url, KIND)
    if manifest.parents["checkpoint"] != checkpoint.manifest.digest:
        raise InputError(
            f"{url}: fitted to another checkpoint of step {step:,} than the one that is there now. "
            f"`extremis fuse {data} {run}` fits one anew."
        )
    return Fusion.load(join(url, TREE)), manifest


def _open(data: DataLayout, split: str) -> Table:
    try:
        table = open_queries(data, split)
    except InputError as error:
        raise InputError(
            f"{error} A tree is fitted on queries that the run was not trained on: `extremis shard --validation 0.05` "
            "cuts some out of train as split val; --split names another."
        ) from None
    if not table.manifest.rows:
        raise InputError(f"{table.url}: has no queries to fit a tree on. Name another split with --split.")
    return table


def _score_shortlist(
    model: Model, texts: torch.Tensor, rows: pa.Table, shortlist: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return (E(z).x, w.x, label, relevant bool), [n] each, of all pairs of some queries with their labels."""
    x = model.embed_table(rows)
    positives = list_column(rows, "label_ids")
    filters = filters_of(rows)
    scores, ids = Ranking.of(model).top_k(x, shortlist, filters)
    # Positives that the shortlist lacks, though no filter removes them.
    missing = positives.padded()
    listed = Ragged.from_matrix(ids).contains(missing)
    missing = np.where(listed | filters.contains(missing), PAD, missing)
    vectors = model.head.vectors
    scores = np.concatenate([scores, score_pairs(x, vectors, missing)], axis=1)
    ids = np.concatenate([ids, missing], axis=1)
    text_scores, relevant, listed = score_pairs(x, texts, ids), positives.contains(ids), ids != PAD
    return text_scores[listed], scores[listed], ids[listed], relevant[listed]
