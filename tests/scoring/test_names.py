"""Names in texts: stems and scores against plain Python over strings, Numba against NumPy, and the file."""

import math
import unicodedata
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save
from tokenizers import Tokenizer
from tokenizers.models import BPE, Unigram
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.trainers import BpeTrainer

from pipelines.sharding.tokenizer import encode_texts, train_wordpiece
from schemas import PAD
from schemas.errors import TableError
from schemas.manifest import Manifest, publish, write_file
from schemas.ragged import Ragged
from schemas.table import Table
from scoring import words
from scoring.names import FILE, HASH, LETTERS, Names, Stems

WORDS = ["Straße", "STRASSE", "naïve", "Čapek", "ΟΔΟΣ", "Жизнь", "中文", "ﬁnanzmathematik", "2024", "a", "of", "İzmir"]
WORDS += ["Donaudampfschifffahrt", "donaudampfmaschine", "１２", "unbelievably", "unbelief"]
RARE = ["ქართული", "q\U00010348"]
SEPARATORS = [" ", ", ", "-", "  ", "\n", " (", "€ ", "!"]
texts = st.lists(st.tuples(st.sampled_from([*WORDS, *RARE]), st.sampled_from(SEPARATORS)), max_size=9).map(
    lambda pairs: "".join(word + mark for word, mark in pairs)
)


def wordpiece() -> tuple[Tokenizer, Callable[[str], list[str]]]:
    tokenizer = train_wordpiece(pa.chunked_array([[word for word in WORDS for _ in range(3)]]), 120)

    def split(text: str) -> list[str]:
        words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))]
        return [word for word in words if "[UNK]" not in tokenizer.encode(word).tokens]

    return tokenizer, split


def byte_level() -> tuple[Tokenizer, Callable[[str], list[str]]]:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(vocab_size=600, special_tokens=["[PAD]"], initial_alphabet=ByteLevel.alphabet())
    # Characters alone are frequent: all their bytes are merged before other pairs.
    tokenizer.train_from_iterator(
        [*"".join([*WORDS, *RARE, *SEPARATORS])] * 50 + [f" {word}" for word in WORDS] * 2, trainer
    )

    def split(text: str) -> list[str]:
        return [text[slice(*place)] for _, place in tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    return tokenizer, split


TOKENIZERS = {"WordPiece": wordpiece(), "byte-level": byte_level()}
KINDS = st.sampled_from([*TOKENIZERS])


def encode(tokenizer: Tokenizer, rows: list[str]) -> Ragged:
    return Ragged(*encode_texts(tokenizer, rows)[:2])


def stems_of(words: list[str]) -> set[str]:
    folded = (unicodedata.normalize("NFKC", word).casefold() for word in words)
    return {"".join([c for c in word if unicodedata.category(c)[0] in "LMN"])[:LETTERS] for word in folded} - {""}


def number(stem: str) -> int:
    total = 0
    for place, letter in enumerate(stem):
        value = (ord(letter) + 1) * HASH % 2**64
        total += (value ^ value >> 32) * HASH**place
    return total % 2**64


@settings(max_examples=30, deadline=None)
@given(kind=KINDS, rows=st.lists(texts, max_size=5))
def test_stems_are_those_of_the_words_of_the_text(kind: str, rows: list[str]) -> None:
    tokenizer, split = TOKENIZERS[kind]
    found = Stems.of(tokenizer.to_str().encode())(encode(tokenizer, rows))
    assert found.rows == len(rows)
    for row, text in enumerate(rows):
        assert found.slice(row, row + 1).values.tolist() == sorted(map(number, stems_of(split(text))))


def test_bytes_of_a_character_and_punctuation_of_sentencepiece() -> None:
    """A character that no token has whole is a letter; a comma ends a word, though no mark begins the next one."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(["a b"], BpeTrainer(initial_alphabet=ByteLevel.alphabet()))
    found = Stems.of(tokenizer.to_str().encode())(encode(tokenizer, ["äb b", "ä b", "b äb"]))
    assert found.counts.tolist() == [2, 2, 2]
    assert found.slice(0, 1).values.tolist() == found.slice(2, 3).values.tolist()
    scores = [("<unk>", 0.0), *((text, -1.0) for text in ("▁", "▁red", "red", "dish", ",", "▁(", "!"))]
    tokenizer = Tokenizer(Unigram(scores, unk_id=0))
    tokenizer.pre_tokenizer = Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    found = Stems.of(tokenizer.to_str().encode())(encode(tokenizer, ["reddish,red", "(red!dish", "dish", "(!,"]))
    expected = [["reddish", "red"], ["red", "dish"], ["dish"], []]
    assert [found.slice(i, i + 1).values.tolist() for i in range(4)] == [sorted(map(number, row)) for row in expected]


def build(kind: str, names: list[str], training: list[str]) -> tuple[Names | None, Callable[[list[str]], Ragged]]:
    tokenizer, _ = TOKENIZERS[kind]
    stems = Stems.of(tokenizer.to_str().encode())
    batches = [encode(tokenizer, training[start : start + 2]) for start in range(0, len(training), 2)]
    return Names.of(stems, encode(tokenizer, names), batches), lambda rows: encode(tokenizer, rows)


@settings(max_examples=30, deadline=None)
@given(
    kind=KINDS,
    names=st.lists(texts, max_size=12),
    training=st.lists(texts, max_size=5),
    asked=st.lists(texts, min_size=1, max_size=4),
    k=st.integers(1, 8),
)
def test_scores_are_those_of_the_strings(
    kind: str, names: list[str], training: list[str], asked: list[str], k: int
) -> None:
    index, tokens = build(kind, names, training)
    split = TOKENIZERS[kind][1]
    own, seen = [stems_of(split(name)) for name in names], [stems_of(split(text)) for text in training]
    assert (index is None) == (not any(own))
    if index is None:
        return
    idf = {s: math.log((1 + len(seen)) / (1 + sum(s in text for text in seen))) for name in own for s in name}
    ids = np.array([[*range(len(names)), PAD]] * len(asked))
    scores, (best, found) = index.score(tokens(asked), ids), index.candidates(tokens(asked), k)
    assert np.isnan([part[:, -1] for part in scores]).all()
    for row, text in enumerate(asked):
        has, expected = stems_of(split(text)), np.zeros(len(names))
        for label, name in enumerate(own):
            total, common = sum(idf[s] for s in name), sum(idf[s] for s in name & has)
            share = math.nan if not name else common / total if total else 0
            exact = (share, total if name else math.nan, len(name) or math.nan)
            np.testing.assert_allclose([part[row, label] for part in scores], exact, atol=1e-5)
            norm = math.sqrt(sum(idf[s] ** 2 for s in name))
            expected[label] = sum(idf[s] ** 2 for s in name & has) / norm if norm else 0
        order = np.sort(-expected)[:k]
        np.testing.assert_allclose(best[row, : len(order)], -order, atol=1e-5)
        assert np.array_equal(found[row] == PAD, best[row] == 0)
        np.testing.assert_allclose(expected[found[row][best[row] > 0]], best[row][best[row] > 0], atol=1e-5)
        alone = index.candidates(tokens([text]), k), index.score(tokens([text]), ids[:1])
        np.testing.assert_array_equal(alone[0][0][0], best[row])
        np.testing.assert_array_equal(alone[0][1][0], found[row])
        np.testing.assert_array_equal(np.stack(alone[1])[:, 0], np.stack(scores)[:, row])


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), k=st.sampled_from([1, 4, 30]))
def test_many_texts_are_ranked_as_one(seed: int, k: int) -> None:
    """With Numba and without: the same numbers, and equal scores in the order of ids."""
    random = np.random.default_rng(seed)
    draw: Callable[[int, int], list[str]] = lambda rows, most: [  # noqa: E731
        " ".join(random.choice(WORDS, random.integers(0, most))) for _ in range(rows)
    ]
    index, tokens = build("WordPiece", draw(60, 3), draw(30, 9))
    assert index is not None
    asked = tokens(draw(words._MANY, 9))
    scores, ids = index.candidates(asked, k)
    for row in range(asked.rows):
        (alone,), (found,) = index.candidates(asked.slice(row, row + 1), k)
        assert np.array_equal(alone, scores[row])
        assert np.array_equal(found, ids[row])
    tied = (scores[:, 1:] == scores[:, :-1]) & (ids[:, 1:] != PAD)
    assert (ids[:, 1:] > ids[:, :-1])[tied].all()


def test_names_come_back_from_their_file_and_others_are_refused(tmp_path: Path) -> None:
    index, tokens = build("byte-level", ["Straße", "", "unbelievably naïve", "naïve"], WORDS)
    assert index is not None
    url, asked = str(tmp_path), tokens(["a naïve strasse", ""])
    table = Table(url, publish(url, Manifest(kind="fusion", shards=(index.write(url),))))
    read = Names.read(table)
    assert read is not None
    for one, other in zip(read.candidates(asked, 3), index.candidates(asked, 3), strict=True):
        np.testing.assert_array_equal(one, other)
    assert read.candidates(asked, 3)[1].tolist() == [[3, 0, 2], [PAD] * 3]  # two training texts have label 0's stem
    assert read.score(asked, np.empty((2, 0), np.int64)).share.shape == (2, 0)
    arrays = load((tmp_path / FILE).read_bytes())
    for name, changed in (("codes", arrays["codes"][1:]), ("labels", arrays["labels"] + 9), ("seen", np.empty(0))):
        damaged = write_file(url, FILE, save({**arrays, name: changed}))
        with pytest.raises(TableError, match="not an index of names"):
            Names.read(Table(url, publish(url, Manifest(kind="fusion", shards=(damaged,)))))
    assert Names.read(Table(url, publish(url, Manifest(kind="fusion")))) is None
