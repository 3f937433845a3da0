"""Nearest training texts by words: against every pair of texts, with few rows and many, and as a file."""

import itertools
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from schemas.errors import TableError
from schemas.manifest import Manifest, publish, write_file
from schemas.table import Table
from scoring import words
from scoring.memory import NEIGHBOURS
from scoring.neighbours import FILE, TEMPERATURE, TITLE, Neighbours
from scoring.words import PAIR_BUCKETS, Points, count_features
from tests.builders import Rows, build_data, ragged
from trainer.inputs import Inputs
from trainer.methods.sections import Data

VOCABULARY = 9
some_texts = st.lists(st.lists(st.integers(0, VOCABULARY - 1), max_size=6), min_size=1, max_size=12)


def index(texts: Rows, titles: list[int], labels: Rows, trained: int) -> Neighbours:
    counted = count_features(Inputs(ragged(texts), titles=np.array(titles)), VOCABULARY, pairs=False)
    return Neighbours.index(Points(counted, ragged(labels)), trained, VOCABULARY)


def similarities(query: list[int], title: int, texts: Rows, titles: list[int], trained: int) -> list[float]:
    """The products of a text with each text: of unit vectors of words, and of words of titles with weight TITLE."""

    def weigh(text: list[int], documents: Rows) -> dict[int, float]:
        frequency = Counter(itertools.chain.from_iterable({*document} for document in documents[:trained]))
        weights = {
            word: (1 + math.log(count)) * (math.log((1 + trained) / (1 + frequency[word])) + 1)
            for word, count in Counter(text).items()
            if word in frequency
        }
        norm = math.sqrt(sum(weight**2 for weight in weights.values())) or 1
        return {word: weight / norm for word, weight in weights.items()}

    bodies, firsts = texts, [text[:length] for text, length in zip(texts, titles, strict=True)]
    found = []
    for text, first in zip(bodies, firsts, strict=True):
        total = 0.0
        for own, other, documents, weight in ((query, text, bodies, 1), (query[:title], first, firsts, TITLE**2)):
            one, two = weigh(own, documents), weigh(other, documents)
            total += weight * sum(value * two.get(word, 0) for word, value in one.items())
        found.append(total)
    return found


@settings(deadline=None)
@given(some_texts, some_texts, st.integers(1, 12), st.randoms(use_true_random=False))
def test_near_texts_vote_as_every_pair_says(texts: Rows, queries: Rows, trained: int, random: object) -> None:
    draw = np.random.default_rng(random.randrange(1 << 32))  # type: ignore[attr-defined]
    trained = min(trained, len(texts))
    titles, of_queries = ([int(draw.integers(0, len(row) + 1)) for row in rows] for rows in (texts, queries))
    labels = [[number % 5, 5 + number] for number in range(len(texts))]
    built, asked = index(texts, titles, labels, trained), Inputs(ragged(queries), titles=np.array(of_queries))
    for trained_only, rows in ((False, len(texts)), (True, trained)):
        similar, numbers = built.nearest(asked, trained_only)
        votes = built.votes(asked, trained_only)
        for row, (query, title) in enumerate(zip(queries, of_queries, strict=True)):
            every = similarities(query, title, texts, titles, trained)[:rows]
            best = sorted((s for s in every if s > 0), reverse=True)[:NEIGHBOURS]
            found = numbers[row][numbers[row] >= 0]
            np.testing.assert_allclose(similar[row, : len(best)], best, atol=1e-5)
            assert len(found) == len(best)
            assert (numbers[row] < rows).all()
            np.testing.assert_allclose([every[n] for n in found.tolist()], similar[row, : len(found)], atol=1e-5)
            shares = {n: math.exp((every[n] - max(every)) / TEMPERATURE) for n in found.tolist()}
            expected = Counter[int]()
            for n, share in shares.items():
                expected.update(dict.fromkeys(labels[n], share / sum(shares.values())))
            of_row = slice(votes.offsets[row], votes.offsets[row + 1])
            assert votes.ids[of_row].tolist() == sorted(expected)
            np.testing.assert_allclose(votes.values[of_row], [expected[x] for x in sorted(expected)], atol=1e-3)
    of_trained = index(texts[:trained], titles[:trained], labels[:trained], trained).nearest(asked)
    for one, other in zip(of_trained, built.nearest(asked, trained_only=True), strict=True):  # others do not count
        np.testing.assert_array_equal(one, other)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 32), st.booleans())
def test_many_rows_have_the_neighbours_of_few(seed: int, trained_only: bool) -> None:
    """With Numba and without, equal texts in the order of the table."""
    draw = np.random.default_rng(seed)
    texts = [draw.integers(0, VOCABULARY, draw.integers(0, 4)).tolist() for _ in range(60)]
    titles = [int(draw.integers(0, len(text) + 1)) for text in texts]
    built = index(texts, titles, [[number] for number in range(60)], 40)
    asked = Inputs(ragged(texts + texts[:10]), titles=np.array(titles + titles[:10]))
    assert asked.rows >= words._MANY
    many = built.nearest(asked, trained_only)
    for row in range(0, asked.rows, 7):
        for one, of_all in zip(built.nearest(asked.slice(row, row + 1), trained_only), many, strict=True):
            np.testing.assert_array_equal(one[0], of_all[row])
    similar, numbers = many
    tied = (similar[:, 1:] == similar[:, :-1]) & (numbers[:, 1:] >= 0)
    assert (numbers[:, 1:] > numbers[:, :-1])[tied].all()


def test_they_come_back_from_their_file_and_others_are_refused(tmp_path: Path) -> None:
    data = build_data(str(tmp_path / "data"), rows={"train": 60, "val": 4, "test": 4})
    rows = Data(holdout=0.3)
    built = Neighbours.of(data.layout, rows, ["input_ids"])
    assert built is not None
    held_out = rows.held_out_rows.rows(Table.open(data.layout.queries("train"), "queries"))
    assert (built.labels.rows, built.trained) == (60, 60 - held_out)
    url, asked = str(tmp_path / "out"), Inputs(ragged(data.points["test"].tokens))
    table = Table(url, publish(url, Manifest(kind="fusion", shards=(built.write(url),))))
    read = Neighbours.read(table)
    assert read is not None
    for one, other in zip(read.votes(asked), built.votes(asked), strict=True):
        np.testing.assert_array_equal(one, other)
    arrays = load((tmp_path / "out" / FILE).read_bytes())
    for name, changed in (("texts", arrays["texts"] + 60), ("seen", arrays["seen"][:-1]), ("sizes", np.array([9]))):
        damaged = write_file(url, FILE, save({**arrays, name: changed}))
        with pytest.raises(TableError, match="not an index of texts"):
            Neighbours.read(Table(url, publish(url, Manifest(kind="fusion", shards=(damaged,)))))
    assert Neighbours.read(Table(url, publish(url, Manifest(kind="fusion")))) is None
    assert Neighbours.of(data.layout, rows, ["input_ids"], budget=0) is None
    assert Neighbours.of(data.layout, rows, ["dense"]) is None
    few = Neighbours.of(data.layout, rows, ["input_ids"], budget=1 << 12)
    assert few is not None
    assert 0 < few.trained <= few.labels.rows < 60


def test_words_of_titles_are_features_of_their_own() -> None:
    counted = count_features(Inputs(ragged([[1, 2, 3], [2]]), titles=np.array([1, 0])), VOCABULARY, pairs=False)
    own = VOCABULARY + PAIR_BUCKETS
    assert counted.ids.tolist() == [1, 2, 3, own + 1, 2]
