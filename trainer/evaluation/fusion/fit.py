"""Fitting of a run's tree on queries that it was not trained on (NGAME, appendix C)."""

import numpy as np
import pyarrow as pa
import torch

from schemas import PAD
from schemas.layout import DataLayout
from schemas.manifest import Manifest
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of, list_column
from trainer.evaluation.evaluate import label_statistics
from trainer.evaluation.fusion.files import TREE, publish_fusion
from trainer.evaluation.fusion.ranking import Ranking, embed_label_texts
from trainer.evaluation.fusion.scored import score_pairs
from trainer.evaluation.fusion.tree import DEPTH, Fusion
from trainer.evaluation.fusion.validation_rows import DEFAULT, FitOptions, open_validation
from trainer.model import Model


def fit_fusion(data: str, run: str, options: FitOptions = DEFAULT) -> Manifest:
    """Fit the tree for a checkpoint: on the `shortlist` best labels of each query, and on its own.

    A fusion that is there already is replaced.
    Raises InputError: no such split or device, no texts, no classifier; TableError, StorageError.
    """
    layout = DataLayout(data)
    _, model, checkpoint, split, groups = open_validation(data, run, options)
    texts, frequency = embed_label_texts(model, layout), label_statistics(layout).frequency
    parts = [_score_shortlist(model, texts, rows, options.shortlist) for rows in groups]
    label_scores, scores, ids, relevant = map(np.concatenate, zip(*parts, strict=True))
    tree = Fusion.fit(label_scores, scores, frequency[ids], relevant)
    facts = {
        "split": split,
        "queries": sum(rows.num_rows for rows in groups),
        "pairs": len(relevant),
        "positive_pairs": int(relevant.sum()),
        "shortlist": options.shortlist,
        "depth": DEPTH,
    }
    return publish_fusion(data, run, checkpoint, (TREE, tree.to_json()), facts)


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
