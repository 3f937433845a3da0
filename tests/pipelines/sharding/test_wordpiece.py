import subprocess
import sys
from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.trainers import WordPieceTrainer

from pipelines.sharding import tokenizer

# Many words of equal frequency: every merge is a tie that the library could break by its hash order.
WORDS = [a + b + c for a in "abcdefgh" for b in "ijklmnop" for c in "qrst"]
TRAIN = """
from tests.pipelines.sharding.test_wordpiece import texts
from pipelines.sharding import tokenizer
import hashlib
print(hashlib.sha256(tokenizer.train_wordpiece(texts(), 300).to_str().encode()).hexdigest())
"""


def texts() -> pa.ChunkedArray:
    rows = [" ".join(WORDS[start : start + 8] * 3) + " Été, ##e!" for start in range(0, len(WORDS), 8)]
    return pa.chunked_array([rows[:5], [], rows[5:]], pa.string())


def test_training_is_the_same_in_every_process() -> None:
    made = {
        subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True).stdout for _ in "123"
    }
    assert len(made) == 1
    assert len(made.pop().strip()) == 64


def test_it_is_a_bert_like_wordpiece_without_added_specials() -> None:
    trained = tokenizer.train_wordpiece(texts(), 300)
    vocabulary = trained.get_vocab()
    assert [trained.id_to_token(i) for i in range(5)] == list(tokenizer.WORDPIECE_SPECIAL)
    assert len(vocabulary) <= 300
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert trained.encode("ÉTÉ").tokens == trained.encode("ete").tokens
    assert trained.encode("##e").tokens == ["#", "#", "e"]
    assert trained.encode("☃").tokens == ["[UNK]"]
    assert trained.encode("").tokens == []


def test_the_alphabet_keeps_the_most_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "ALPHABET", 3)
    trained = tokenizer.train_wordpiece(pa.chunked_array([["ab ab abc abd"] * 5 + ["ddd"]]), 100)
    alphabet = {token.removeprefix("##") for token in trained.get_vocab() if token not in tokenizer.WORDPIECE_SPECIAL}
    assert {c for c in alphabet if len(c) == 1} == {"a", "b", "d"}


SOME = st.text("aábcdé ,-☃海\n\t\u00a0\u0301", max_size=40)


@given(st.lists(SOME, max_size=20))
def test_words_that_are_normalised_once_count_as_in_whole_texts(rows: list[str]) -> None:
    rows += texts().to_pylist()
    made = tokenizer.train_wordpiece(pa.chunked_array([rows]), 200)
    library = Tokenizer(WordPiece(unk_token="[UNK]"))
    library.normalizer, library.pre_tokenizer = made.normalizer, made.pre_tokenizer
    vocabulary = made.get_vocab()
    given = [token for token in sorted(vocabulary, key=vocabulary.__getitem__) if len(token.removeprefix("##")) == 1]
    alphabet = [token for token in given if len(token) == 1]
    characters = Counter(c for row in rows for c in made.normalizer.normalize_str(row) if not c.isspace())
    assert sorted(characters) == alphabet
    trainer = WordPieceTrainer(
        vocab_size=200,
        min_frequency=tokenizer.MIN_FREQUENCY,
        special_tokens=[*tokenizer.WORDPIECE_SPECIAL, *(token for token in given if len(token) > 1)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    library.train_from_iterator(rows, trainer)
    assert library.get_vocab() == vocabulary


LONG = st.integers(tokenizer.MAX_WORD + 1, 3000).flatmap(
    lambda size: st.text("abcdefghi0123\x00\x1c\u200bÉ", min_size=size, max_size=size)
)


@settings(max_examples=25)
@given(st.lists(LONG, min_size=1, max_size=3), st.integers(0, 20))
def test_nothing_is_learned_from_words_that_none_is_spelled_with(long: list[str], place: int) -> None:
    """The library's time is quadratic in a word's length, so longer ones do not reach it: the rest decides alone."""
    kept = [word for word in long if len(BertNormalizer().normalize_str(word)) > tokenizer.MAX_WORD]
    some = texts().to_pylist()
    with_long = [*some[:place], " ".join([some[place], *kept]), *some[place + 1 :]]
    made, expected = (tokenizer.train_wordpiece(pa.chunked_array([rows]), 300).to_str() for rows in (with_long, some))
    assert made == expected


def test_a_word_of_a_megabyte_among_others_takes_no_time() -> None:
    """A quadratic training would take hours."""
    trained = tokenizer.train_wordpiece(pa.chunked_array([[*texts().to_pylist(), "a" * 1_000_000 + " abi"] * 2]), 300)
    assert trained.encode("a" * 1_000_000).tokens == ["[UNK]"]
