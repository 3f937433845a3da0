"""Collision probe: the share of a query's best labels found by hash tables, and by equally many uniform draws."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from schemas.layout import DataLayout, RunLayout
from schemas.ragged import Ragged
from schemas.shard_files.parquet import list_column
from trainer.evaluation.evaluate import open_split
from trainer.methods.recipe import Recipe
from trainer.model import load_model
from trainer.negatives.lsh import HashedNegatives
from trainer.negatives.lsh_section import LshSection

FIRST = 200


@dataclass(frozen=True)
class Probe:
    """A classifier `vectors` [L, D] and queries x [B, D] with their positives."""

    vectors: np.ndarray
    x: np.ndarray
    positives: Ragged


def clustered_probe(labels: int, queries: int, dimension: int = 128, size: int = FIRST, seed: int = 0) -> Probe:
    """Draw vectors around the centres of clusters of `size` labels, and queries around the centres of their positives.

    Vectors of one cluster have a cosine of 1/2, others of 0: a stand-in for a trained classifier.
    """
    draw = np.random.default_rng(seed)
    centres = draw.standard_normal((-(-labels // size), dimension), np.float32)
    vectors = np.repeat(centres, size, axis=0)[:labels] + draw.standard_normal((labels, dimension), np.float32)
    positives = draw.integers(0, labels, queries)
    x = centres[positives // size] + draw.standard_normal((queries, dimension), np.float32)
    return Probe(vectors, x, Ragged.from_matrix(positives[:, None]))


def load_probe(data: str, run: str, split: str, queries: int, step: int | None = None) -> tuple[Probe, Recipe]:
    """Load a run's classifier at `step` (default: its newest checkpoint), its recipe, and the first rows of a split.

    Raises InputError, TableError.
    """
    recipe, model, _ = load_model(DataLayout(data), RunLayout(run), step)
    table, part = open_split(DataLayout(data), split, recipe.data)
    groups = list[pa.Table]()
    for group in part.batches(table, [*model.columns, "label_ids"]):
        groups.append(group)
        if sum(each.num_rows for each in groups) >= queries:
            break
    rows = pa.concat_tables(groups).slice(0, queries)
    x = model.embed_table(rows).float().numpy()
    return Probe(model.head.vectors.float().numpy(), x, list_column(rows, "label_ids")), recipe


def measure(probe: Probe, options: LshSection) -> dict[str, Any]:
    """Return facts about the hashed negatives by kind of query, averaged over queries.

    `labels`: number of negatives. `found`: share of the FIRST labels by inner product with x, without positives, that
    are negatives; `uniform`: the same share for equally many uniform draws.
    """
    best = _best(probe)
    sampler = HashedNegatives(options, ProbedVectors(probe))
    sampler.start()
    figures = {}
    for query in ("embedding", "label"):
        sampler.options = options.model_copy(update={"query": query})
        sampled = sampler.sample(probe.x, probe.positives, epoch=0, step=0)
        figures[query] = {
            "labels": round(float(sampled.counts.mean()), 1),
            "found": round(float(sampled.contains(best).mean()), 5),
            "uniform": round(float((sampled.counts / (len(probe.vectors) - probe.positives.counts)).mean()), 5),
        }
    return figures


def _best(probe: Probe) -> np.ndarray:
    """Return the FIRST labels of each query by inner product, without its positives, [B, FIRST]."""
    scores = torch.from_numpy(probe.x) @ torch.from_numpy(probe.vectors).T
    scores[probe.positives.row_of(), probe.positives.values.astype(np.int64)] = -torch.inf
    return scores.topk(min(FIRST, scores.shape[1]), dim=1).indices.numpy()


class ProbedVectors:
    """Vectors of the probe, with the interface for sources of negatives."""

    def __init__(self, probe: Probe) -> None:
        self.start, self.stop = 0, len(probe.vectors)
        self.vectors = torch.from_numpy(probe.vectors)

    def read(self, rows: np.ndarray) -> np.ndarray:
        return self.vectors.numpy()[rows]
