"""Fitting of the weights of a run's fusion, and making of its memory."""

import functools
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa

from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of, list_column
from schemas.tables import PAD
from trainer.evaluation.fusion.files import WEIGHTS, publish_fusion
from trainer.evaluation.fusion.ranking import embed_label_texts
from trainer.evaluation.fusion.scored import Scored, Scorers
from trainer.evaluation.fusion.validation_rows import open_validation
from trainer.evaluation.fusion.weights import Weights
from trainer.evaluation.held_out import HOLDOUT
from trainer.evaluation.memory.memory import BUDGET, Memory
from trainer.evaluation.search import LabelRows, filtered_top_k
from trainer.inputs import scored_columns
from trainer.model import Model, load_model
from trainer.stream.part import iterate_part

SHORTLIST, QUERIES = 100, 10_000


def fit_weights(
    data: str, run: str, split: str = HOLDOUT, step: int | None = None, queries: int = QUERIES, budget: int = BUDGET
) -> Manifest:
    """Fit weights for a checkpoint on the first `queries` of `split`: of labels' texts, and of a memory.

    The memory of the training points is kept beside the weights, in `budget` bytes at most, if it has a weight. A
    fusion that is there already is replaced. Raises InputError: no such split; TableError, StorageError.
    """
    layout = DataLayout(data)
    recipe, model, checkpoint = load_model(layout, RunLayout(run), step)
    table, part = open_validation(layout, split, recipe.data)
    built = Memory.build(model, layout, recipe.data, budget)
    scorers = Scorers(embed_label_texts(model, layout) if model.head.has_rows else None, built)
    scored, relevant = score_rows_of(
        model,
        scorers,
        iterate_part(table.url, table.manifest, part, scored_columns(table.manifest, model.columns), queries),
    )
    weights = Weights.fit(scored, relevant, logistic=recipe.loss.kind == "bce")
    memory = built if weights.votes else None
    facts: dict[str, Any] = {
        "shortlist": SHORTLIST,
        "texts": weights.texts,
        "votes": weights.votes,
        "unit": weights.unit,
    }
    facts |= {"split": split, "queries": relevant.rows, "memory_bytes": memory.bytes if memory else 0}
    return publish_fusion(data, run, checkpoint, (WEIGHTS, weights.to_json()), facts, memory)


def score_rows_of(model: Model, scorers: Scorers, groups: Iterable[pa.Table]) -> tuple[Scored, Ragged]:
    """Score the shortlists of queries by all scorers, [B, S], and return them with the queries' labels."""
    labels, parts, relevant = LabelRows(model.head.vectors, model.head.start), [], []
    for rows in groups:
        x, filters = model.embed_table(rows), filters_of(rows)
        shortlisted = filtered_top_k(x, labels, SHORTLIST, filters)
        parts.append(scorers.score(x, labels, *shortlisted, filters))
        relevant.append(list_column(rows, "label_ids"))
    width = max(part.ids.shape[1] for part in parts)
    names = (field.name for field in fields(Scored))
    columns = {
        name: np.concatenate([_widened(getattr(part, name), width, PAD if name == "ids" else 0) for part in parts])
        for name in names
    }
    joined = functools.reduce(Ragged.concat, relevant)
    return Scored(**columns), joined


def _widened(rows: np.ndarray, width: int, fill: int) -> np.ndarray:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=fill)
