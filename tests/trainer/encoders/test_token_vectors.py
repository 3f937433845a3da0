"""Tokens that begin at the vectors of a pretrained model: its forms, its tokenizer, and what becomes of its columns."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import wordllama
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch.nn.functional import normalize

from pipelines.options import ShardOptions
from pipelines.shard import shard
from pipelines.sharding.tokenizer import train_wordpiece
from schemas.errors import InputError
from schemas.layout import DataLayout, find_tokenizer
from tests.bert import write_bert
from trainer.encoders.bag_encoder import fit_columns, read_token_vectors
from trainer.group import ALONE
from trainer.model import DataSizes, Model
from trainer.recipe_files import load_recipe
from trainer.setup import open_stream
from trainer.stream import open_sources

TEXTS = ["a ship in a storm", "the calm sea", "a harbour with boats", "storm over the sea"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_wordpiece(pa.chunked_array([TEXTS * 3]), 80)


def written(form: str, folder: Path, tokenizer: Tokenizer) -> torch.Tensor:
    """Write a model of this form, and return the vectors of its tokens."""
    count = tokenizer.get_vocab_size()
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(count, 6, generator=draw)
    place = folder / ("tokenizers/some_tokenizer_config.json" if form == "wordllama" else "tokenizer.json")
    place.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(place))
    if form == "wordllama":
        (folder / "weights").mkdir()
        save_file({"embedding.weight": rows.half()}, folder / "weights/some_6.safetensors")
        return rows.half().float()
    if form == "model2vec":
        mapping, weights = torch.randint(0, 5, (count,), generator=draw), torch.rand(count, generator=draw)
        save_file(
            {"embeddings": rows[:5].clone(), "mapping": mapping, "weights": weights}, folder / "model.safetensors"
        )
        return rows[mapping] * weights[:, None]
    if form == "sentence-transformers":
        save_file({"embedding.weight": rows}, folder / "model.safetensors")
        module = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.StaticEmbedding"}
        (folder / "modules.json").write_text(json.dumps([module]))
        return rows
    write_bert(folder, count + 3)  # rows of no token, as models pad their tables
    return load_file(folder / "model.safetensors")["embeddings.word_embeddings.weight"][:count]


def sharded(folder: Path, tokenizer: str) -> DataLayout:
    """Shard TEXTS, each with a label of its own, by the tokenizer of a model."""
    (folder / "raw").mkdir(parents=True)
    rows = [json.dumps({"key": f"q{i}", "text": text, "labels": [f"l{i}"]}) for i, text in enumerate(TEXTS[:3])]
    (folder / "raw/train.jsonl").write_text("\n".join(rows))
    labels = [json.dumps({"key": f"l{i}", "text": f"label {i}"}) for i in range(3)]
    (folder / "raw/labels.jsonl").write_text("\n".join(labels))
    shard(str(folder / "raw"), str(folder / "data"), ShardOptions(tokenizer=tokenizer))
    return DataLayout(str(folder / "data"))


def test_the_package_of_wordllama_is_a_model(tmp_path: Path) -> None:
    model = str(Path(wordllama.__file__).parent)
    rows = read_token_vectors(model, sharded(tmp_path, model))
    assert rows.shape == (32_000, 256)
    tokens = Tokenizer.from_file(str(find_tokenizer(Path(model))))
    ship, boat, paper = (normalize(rows[tokens.token_to_id(f"▁{word}")], dim=0) for word in ("ship", "boat", "paper"))
    assert ship @ boat > ship @ paper + 0.2


@pytest.mark.parametrize("form", ["wordllama", "model2vec", "sentence-transformers", "bert"])
def test_a_model_of_any_form_gives_the_rows_of_its_tokens(form: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = written(form, tmp_path / "model", tokenizer)
    data = sharded(tmp_path, str(tmp_path / "model"))
    assert torch.equal(read_token_vectors(str(tmp_path / "model"), data), rows)


def test_a_model_of_another_tokenizer_is_refused_with_the_command(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = tmp_path / "model"
    written("model2vec", model, tokenizer)
    data = sharded(tmp_path, "train:100")
    with pytest.raises(
        InputError, match=rf"have the same id in the model.*extremis shard INPUT DATA --tokenizer {model}"
    ):
        read_token_vectors(str(model), data)
    (model / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no token vectors found"):
        read_token_vectors(str(model), sharded(tmp_path / "same", str(model)))


@pytest.mark.parametrize("harm", ["cut", "nan", "flat"])
def test_a_damaged_model_is_one_message(harm: str, tmp_path: Path, tokenizer: Tokenizer) -> None:
    model = tmp_path / "model"
    rows = written("model2vec", model, tokenizer)
    data, file = sharded(tmp_path, str(model)), model / "model.safetensors"
    if harm == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        save_file({"embeddings": rows * math.nan if harm == "nan" else rows.flatten()}, file)
    expected = {"cut": "damaged", "nan": "NaN", "flat": "no token vectors"}[harm]
    with pytest.raises(InputError, match=rf"encoder\.pretrained = '{model}': .*{expected}"):
        read_token_vectors(str(model), data)


@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 1000))
def test_columns_are_an_orthonormal_map_of_all_or_the_principal_ones(width: int, dimension: int, seed: int) -> None:
    rows = torch.randn(40, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows[[3, 7]] = 0
    known = rows.any(1)
    made = fit_columns(rows.float(), dimension, 2.5, seed).double()
    assert made.shape == (40, dimension)
    assert not made[~known].any()
    assert made[known].square().sum(1).mean().sqrt() == pytest.approx(2.5, rel=1e-4)
    centred = rows[known] - rows[known].mean(0)
    spectrum = torch.linalg.svdvals(centred)[:dimension]  # what the best map to so many columns keeps
    kept = torch.linalg.svdvals(made[known])[: len(spectrum)]
    np.testing.assert_allclose(kept / kept[0], spectrum / spectrum[0], atol=1e-4)


def test_a_bag_begins_at_them_and_counts_tokens_that_no_row_has(tmp_path: Path, tokenizer: Tokenizer) -> None:
    model_at = str(tmp_path / "model")
    written("model2vec", Path(model_at), tokenizer)
    data = sharded(tmp_path, model_at)
    settings = ["encoder.dimension=4", "encoder.hidden=8", "encoder.buckets=64", "order.batch=8", "negatives.hard=0"]
    stated = ["encoder.lr=0.1", "encoder.dense_lr=0.001", "data.label_texts=false"]
    recipe = load_recipe("decoupled", [*settings, *stated, f"encoder.pretrained={model_at}"])
    sizes = DataSizes.of(data)
    model = Model.build(recipe, sizes.vocabulary, sizes.labels)
    model.encoder.begin(data)
    batches = open_stream(recipe, open_sources(data, "train", False), sizes.labels, group=ALONE)
    model.encoder.fit(batch.inputs for batch in batches)
    tensors = model.encoder.tensors()
    begun = fit_columns(read_token_vectors(model_at, data), 4, recipe.encoder.initial_scale, recipe.train.seed)
    torch.testing.assert_close(tensors["embedding"][: sizes.vocabulary], begun)
    assert not tensors["embedding"][sizes.vocabulary :].any()  # n-grams
    unseen = tokenizer.token_to_id("over")
    assert tensors["feature_weights"][unseen] > tensors["feature_weights"].median()
