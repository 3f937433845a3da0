"""Predictions and scores of named labels, against a matrix product."""

import numpy as np
import pytest
import torch

from schemas.table import Table
from tests.builders import build_data
from trainer.config.load import validate
from trainer.evaluation.ranking import score_rows
from trainer.model import Model


def test_scores_are_inner_products_and_predictions_the_best_of_them() -> None:
    small = build_data("memory://closely/data", labels=12)
    recipe = validate({"method": "astra", "encoder": {"dimension": 8, "buckets": 64}}, "test")
    model = Model.build(recipe, small.vocabulary, small.labels)
    model.head.vectors.copy_(torch.as_tensor(np.random.default_rng(0).normal(size=model.head.vectors.shape)))
    url = small.layout.queries("test")
    rows = next(Table.open(url, "queries").batches())
    named = [[3, 5], [], *([[row % 12] for row in range(2, rows.num_rows)])]
    scores, ids, of_named = score_rows(model, rows, named, 4)
    whole = model.embed_table(rows) @ model.head.vectors.T
    for row, labels in enumerate(named):
        assert of_named[row] == pytest.approx(whole[row, labels].tolist(), rel=1e-5)
        assert ids[row].tolist() == whole[row].argsort(descending=True)[:4].tolist()
        assert scores[row].tolist() == pytest.approx(whole[row].sort(descending=True).values[:4].tolist(), rel=1e-5)
    assert of_named[1] == []
