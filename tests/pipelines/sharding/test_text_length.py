"""The length at which texts are cut is that of nearly all texts."""

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sharding import tokenizer
from pipelines.sharding.tokenizer import LEAST_TOKENS, MOST_TOKENS, choose_length, encode_texts, open_tokenizer

FROZEN = tokenizer.freeze(tokenizer.train_wordpiece(pa.chunked_array([["a word or two"] * 5]), 100), {}, 8)
WHOLE = open_tokenizer(FROZEN.files[tokenizer.FILE], "here")
WHOLE.no_truncation()


def texts(lengths: list[int]) -> pa.ChunkedArray:
    """Texts of so many words, each of which is a token."""
    return pa.chunked_array([["two " * length for length in lengths]], pa.string())


@given(st.lists(st.lists(st.integers(0, 700), max_size=40), min_size=1, max_size=3))
def test_it_covers_nearly_all_texts_of_each_table(tables: list[list[int]]) -> None:
    limit = choose_length(FROZEN, map(texts, tables))
    assert LEAST_TOKENS <= limit <= MOST_TOKENS
    for lengths in tables:
        tokens = [len(WHOLE.encode("two " * length).ids) for length in lengths]
        if limit < MOST_TOKENS:
            assert sum(count > limit for count in tokens) <= 0.01 * len(tokens) + 1
    shorter = limit - 32
    if limit > LEAST_TOKENS:
        assert any(sum(length + 2 > shorter for length in lengths) > 0.01 * len(lengths) for lengths in tables)


def test_a_model_that_reads_less_says_so() -> None:
    frozen = tokenizer.freeze(WHOLE, {tokenizer.CONFIG: b'{"model_max_length": 256}'}, LEAST_TOKENS)
    assert choose_length(frozen, [texts([600] * 9)]) == 256
    endless = tokenizer.freeze(WHOLE, {tokenizer.CONFIG: b'{"model_max_length": 1e30}'}, LEAST_TOKENS)
    assert choose_length(endless, [texts([600] * 9)]) == MOST_TOKENS


def test_a_tokenizer_that_is_cut_elsewhere_is_otherwise_the_same() -> None:
    longer = FROZEN.with_max_tokens(300)
    assert longer.max_tokens == 300
    assert longer.vocabulary == FROZEN.vocabulary
    _, offsets, cut, _ = encode_texts(open_tokenizer(longer.files[tokenizer.FILE], "here"), ["two " * 600, "two"])
    assert list(cut) == [True, False]
    assert offsets[1] == 300
    assert longer.with_max_tokens(8).files == FROZEN.files


def test_very_long_texts_are_not_encoded_whole() -> None:
    assert choose_length(FROZEN, [pa.chunked_array([["two " * 1_000_000]])]) == MOST_TOKENS
