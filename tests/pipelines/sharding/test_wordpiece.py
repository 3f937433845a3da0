import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sharding import wordpiece

# Many words of equal frequency: every merge is a tie that the library could break by its hash order.
WORDS = [a + b + c for a in "abcdefgh" for b in "ijklmnop" for c in "qrst"]
TRAIN = """
from tests.pipelines.sharding.test_wordpiece import texts
from pipelines.sharding import wordpiece
import hashlib
print(hashlib.sha256(wordpiece.train(texts, 300).to_str().encode()).hexdigest())
"""


def texts() -> Iterator[str]:
    for start in range(0, len(WORDS), 8):
        yield " ".join(WORDS[start : start + 8] * 3) + " Été, ##e!"


def test_training_is_the_same_in_every_process() -> None:
    made = {
        subprocess.run([sys.executable, "-c", TRAIN], capture_output=True, text=True, check=True).stdout for _ in "123"
    }
    assert len(made) == 1
    assert len(made.pop().strip()) == 64


def test_it_is_a_bert_like_wordpiece_without_added_specials() -> None:
    tokenizer = wordpiece.train(texts, 300)
    vocabulary = tokenizer.get_vocab()
    assert [tokenizer.id_to_token(i) for i in range(5)] == list(wordpiece.SPECIAL)
    assert len(vocabulary) <= 300
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert tokenizer.encode("ÉTÉ").tokens == tokenizer.encode("ete").tokens
    assert tokenizer.encode("##e").tokens == ["#", "#", "e"]
    assert tokenizer.encode("☃").tokens == ["[UNK]"]
    assert tokenizer.encode("").tokens == []


def test_the_alphabet_keeps_the_most_frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wordpiece, "ALPHABET", 3)
    tokenizer = wordpiece.train(lambda: ["ab ab abc abd"] * 5 + ["ddd"], 100)
    alphabet = {token.removeprefix("##") for token in tokenizer.get_vocab() if token not in wordpiece.SPECIAL}
    assert {c for c in alphabet if len(c) == 1} == {"a", "b", "d"}


LONG = st.integers(wordpiece.MAX_WORD + 1, 3000).flatmap(
    lambda size: st.text("abcdefghi0123\x00\x1c\u200bÉ", min_size=size, max_size=size)
)


@settings(max_examples=25)
@given(st.lists(LONG, min_size=1, max_size=3), st.integers(0, 20))
def test_nothing_is_learned_from_words_that_none_is_spelled_with(long: list[str], place: int) -> None:
    """The library's time is quadratic in a word's length, so longer ones do not reach it: the rest decides alone."""
    kept = [word for word in long if len(wordpiece.BertNormalizer().normalize_str(word)) > wordpiece.MAX_WORD]
    some = list(texts())
    with_long = [*some[:place], " ".join([some[place], *kept]), *some[place + 1 :]]
    assert wordpiece.train(lambda: with_long, 300).to_str() == wordpiece.train(lambda: some, 300).to_str()


def test_a_word_of_a_megabyte_among_others_takes_no_time() -> None:
    """A quadratic training would take hours."""
    tokenizer = wordpiece.train(lambda: [*texts(), "a" * 1_000_000 + " abi"] * 2, 300)
    assert tokenizer.encode("a" * 1_000_000).tokens == ["[UNK]"]
