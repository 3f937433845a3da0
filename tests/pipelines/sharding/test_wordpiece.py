import subprocess
import sys
from collections.abc import Iterator

import pytest

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
