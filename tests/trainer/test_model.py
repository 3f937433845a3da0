"""Encoder and classifier as one: what is embedded, saved, loaded, and refused."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import open_manifest
from schemas.table import Table
from tests.builders import SmallData, build_data, ragged, tokens_of
from trainer.checkpoints import CheckpointContents, CheckpointWriter
from trainer.methods.recipe import Recipe
from trainer.model import DataSizes, Model, load_model
from trainer.recipe_files import dump_config

RECIPE = Recipe.model_validate(
    {
        "encoder": {"dimension": 4, "buckets": 64},
        "classifier": {"bias": True, "initial_bias": -3.0, "initial_scale": 1.0},
    }
)


@pytest.fixture(scope="module")
def data() -> SmallData:
    return build_data("memory://model/data")


def model_of(data: SmallData, seed: int = 0) -> Model:
    recipe = RECIPE.model_copy(update={"train": RECIPE.train.model_copy(update={"seed": seed})})
    return Model.build(recipe, data.vocabulary, data.labels)


def save(data: SmallData, run: RunLayout, step: int, seed: int, digest: str | None = None) -> None:
    model = model_of(data, seed)
    data_digest = digest or open_manifest(data.layout.root, "data").digest
    storage.write_bytes(run.config, dump_config(RECIPE, data={"digest": data_digest}))
    parts, rows = {"encoder": model.encoder.tensors()}, {"weight": model.head.vectors}
    CheckpointWriter(run, background=False).save(
        CheckpointContents(step, parts, rows, 0, data.labels, {"progress": {"global_step": step}}, {})
    )


def test_a_table_is_embedded_row_by_row_whatever_the_slices(data: SmallData) -> None:
    url = data.layout.queries("train")
    table = pa.concat_tables(Table.open(url).batches())
    model = model_of(data)
    whole = model.embed_table(table)
    assert whole.shape == (64, 5)
    assert (whole[:, -1] == 1).all()  # meets the bias
    torch.testing.assert_close(model.embed_table(table, batch=7), whole)
    torch.testing.assert_close(model.embed(tokens_of(ragged(data.points["train"].tokens, np.uint16))), whole)
    assert model.embed_table(table.slice(0, 0)).shape == (0, 5)


def test_the_newest_or_a_given_checkpoint_is_loaded(data: SmallData) -> None:
    run = RunLayout("memory://model/run")
    save(data, run, 5, seed=5)
    save(data, run, 9, seed=9)
    tokens = ragged(data.points["test"].tokens, np.uint16)
    for step, seed in ((None, 9), (5, 5), (9, 9)):
        recipe, model, checkpoint = load_model(data.layout, run, step)
        assert recipe == RECIPE
        assert checkpoint.table.url == run.checkpoint(seed)
        assert torch.equal(model.embed(tokens_of(tokens)), model_of(data, seed).embed(tokens_of(tokens)))
        assert torch.equal(model.head.vectors, model_of(data, seed).head.vectors)


def test_a_run_of_other_data_names_both_digests(data: SmallData) -> None:
    run = RunLayout("memory://model/foreign")
    save(data, run, 1, seed=0, digest="f" * 64)
    with pytest.raises(InputError, match=r"different data \(digest ffffffffffff…\), not on memory://model/data"):
        load_model(data.layout, run)


def test_a_run_without_a_checkpoint_says_so(data: SmallData) -> None:
    run = RunLayout("memory://model/fresh")
    save(data, run, 1, seed=0)
    storage.remove(run.checkpoints, recursive=True)
    with pytest.raises(InputError, match="no checkpoint yet"):
        load_model(data.layout, run)


def test_the_facts_of_data(data: SmallData) -> None:
    facts = DataSizes.of(data.layout)
    assert (facts.labels, facts.vocabulary, facts.features) == (data.labels, data.vocabulary, 0)
    assert facts.manifest.kind == "data"
    sparse = DataSizes.of(build_data("memory://model/sparse", features=12, with_tokens=False).layout)
    assert (sparse.vocabulary, sparse.features) == (0, 12)
    with pytest.raises(TableError, match="no table here"):
        DataSizes.of(DataLayout("memory://model/nothing"))
