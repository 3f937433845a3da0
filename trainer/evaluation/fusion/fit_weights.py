"""Fitting of the weights of a run's fusion, and making of its memory."""

import time
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa

from schemas import PAD
from schemas.layout import DataLayout
from schemas.manifest import Manifest
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of, list_column
from schemas.table import Table
from trainer.evaluation.fusion.files import TRAINED, WEIGHTS, publish_fusion
from trainer.evaluation.fusion.ranking import embed_label_texts
from trainer.evaluation.fusion.scored import Scored, Scorers
from trainer.evaluation.fusion.validation_rows import DEFAULT, FitOptions, open_validation
from trainer.evaluation.fusion.weights import Weights
from trainer.evaluation.memory.memory import BUDGET, Memory
from trainer.evaluation.search import LabelRows, filtered_top_k
from trainer.model import Model

_TIMED = 256  # queries


def fit_weights(data: str, run: str, options: FitOptions = DEFAULT, budget: int = BUDGET) -> Manifest:
    """Fit weights for a checkpoint: of labels' texts, and of a memory.

    The memory of the training points is kept beside the weights, in `budget` bytes at most, if it has a weight; points
    that the run held out come to it then, which the weights were fitted without. A fusion that is there already is
    replaced. Raises InputError: no such split or device; TableError, StorageError.
    """
    layout = DataLayout(data)
    recipe, model, checkpoint, split, groups = open_validation(data, run, options)
    built = None if recipe.data.mix else Memory.build(model, layout, recipe.data, budget)
    readable = set(model.columns) <= {*Table.open(layout.labels, "labels").columns}
    texts = embed_label_texts(model, layout) if model.head.has_rows and readable else None
    scorers = Scorers(texts, built and built.to(model.device))
    scored, relevant = score_shortlists(model, scorers, groups, options.shortlist)
    weights = Weights.fit(scored, relevant, logistic=recipe.loss.kind == "bce")
    memory = built.with_held_out(model, layout, recipe.data, budget) if built and weights.votes else None
    facts = {
        "split": split,
        "queries": relevant.rows,
        "shortlist": options.shortlist,
        "texts": weights.texts,
        "votes": weights.votes,
        "unit": weights.unit,
        TRAINED: len(built.vectors) if built and memory else 0,
        "memory_bytes": memory.bytes if memory else 0,
        "memory_ms": _milliseconds(memory, model, groups[0]) if memory else 0.0,
    }
    return publish_fusion(data, run, checkpoint, (WEIGHTS, weights.to_json()), facts, memory)


def describe_weights(facts: dict[str, Any]) -> str:
    """Describe fitted weights, and what their memory takes."""
    memory = f"{facts['memory_bytes'] / 2**20:,.1f} MiB, {facts['memory_ms']:.2f} ms a query" if facts["votes"] else ""
    return (
        f"fitted on {facts['queries']:,} queries of {facts['split']}: {facts['texts']:g} x labels' texts + "
        f"{facts['votes']:g} x votes of training points{f' ({memory})' if memory else ''}"
    )


def score_shortlists(
    model: Model, scorers: Scorers, groups: Iterable[pa.Table], shortlist: int
) -> tuple[Scored, Ragged]:
    """Score the shortlists of queries by all scorers, [B, S], and return them with the queries' labels."""
    labels, parts, relevant = LabelRows(model.head.vectors, model.head.start), [], []
    for rows in groups:
        x, filters = model.embed_table(rows), filters_of(rows)
        shortlisted = filtered_top_k(x, labels, shortlist, filters)
        parts.append(scorers.score(x, labels, shortlisted, filters))
        relevant.append(list_column(rows, "label_ids"))
    width = max(part.ids.shape[1] for part in parts)
    names = (field.name for field in fields(Scored))
    columns = {
        name: np.concatenate([_widened(getattr(part, name), width, PAD if name == "ids" else 0) for part in parts])
        for name in names
    }
    return Scored(**columns), Ragged.join(relevant)


def _milliseconds(memory: Memory, model: Model, rows: pa.Table) -> float:
    """Measure what the memory takes a query, of a batch."""
    x = model.embed_table(rows.slice(0, _TIMED))
    began = time.perf_counter()
    memory.votes(x)
    return round((time.perf_counter() - began) / len(x) * 1e3, 3)


def _widened(rows: np.ndarray, width: int, fill: int) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=fill)
