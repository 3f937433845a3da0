"""Labels' names in texts: the stems of a name's words, looked for among the stems of a text's words.

A word's stem is its first LETTERS letters, marks (vowel signs of many scripts) and digits after NFKC and case folding,
whatever the language. A word is put together from its tokens; each token is normalised by itself. A stem is a 64-bit
sum over its letters, to which each token of the word adds a part.
"""

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pipelines.sharding.tokenizer import FILE as TOKENIZER
from schemas.layout import DataLayout
from schemas.manifest import Shard
from schemas.mapped import MappedFile
from schemas.ragged import Ragged, SparseRows, is_first_key, offsets_of
from schemas.shard_files.parquet import list_column
from schemas.table import Table
from scoring.calibration import BYTE_LEVEL, pieces_of
from scoring.memory import votes_of
from scoring.words import best_labels, find_features, reading_arrays, titles_of, write_arrays
from trainer.encoders.bag import normalize_rows
from trainer.inputs import Inputs, open_queries, with_titles

if TYPE_CHECKING:
    from trainer.methods.sections import Data

FILE, TOKENS = "names.safetensors", "input_ids"
_ARRAYS = ("codes", "lengths", "kinds", "seen", "idf", "stems", "label_offsets", "labels", "weights", "stem_offsets")
LETTERS = 7
HASH = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio
_CONTINUES, _BEGINS, _NO_WORD = range(3)  # a token continues a word, begins a word, or is not in a word
_KEPT = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that byte-level BPE writes as their own character
_BYTES = {256 + n: byte for n, byte in enumerate(sorted({*range(256)} - {*_KEPT}))}  # and the characters of the others
IN_OTHERS = ("words", "neighbours")
_TEXTS = 200_000  # training texts from which the frequencies of stems are counted
_PARTS = 0x3400  # the first of the rare letters that stand for the bytes of an incomplete character


@dataclass(frozen=True, eq=False)
class Stems:
    """Maps tokens to the stems of their words: `codes` uint64 [V, LETTERS + 1], `lengths` and `kinds` int32 [V].

    A token that begins after n letters of its word adds `codes[:, n]` to the stem, and `lengths` letters to the word.
    """

    codes: np.ndarray
    lengths: np.ndarray
    kinds: np.ndarray

    @classmethod
    def of(cls, tokenizer: bytes) -> "Stems":
        """Make the table of `tokenizer`, the content of a tokenizer.json; special tokens have no letters."""
        pieces = pieces_of(tokenizer)
        texts = [*map(_decode, pieces.texts)] if pieces.mark == BYTE_LEVEL else pieces.texts
        left_out = pieces.special | {pieces.unknown}
        texts = ["" if number in left_out else text for number, text in enumerate(texts)]
        texts = [unicodedata.normalize("NFKC", text).casefold() for text in texts]
        letters = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
        points, place = np.unique(letters, return_inverse=True)
        kept = np.array([unicodedata.category(chr(point))[0] in "LMN" for point in points.tolist()], bool)
        rows = Ragged.from_counts(letters, np.array([*map(len, texts)])).keep(kept[place])
        lengths, row = rows.counts, rows.row_of()
        place = np.arange(len(row)) - rows.offsets[row]
        hashes = np.zeros((len(texts), LETTERS), np.uint64)
        kept = place < LETTERS
        hashes[row[kept], place[kept]] = (rows.values[kept].astype(np.uint64) + np.uint64(1)) * np.uint64(HASH)
        hashes ^= hashes >> np.uint64(32)
        powers = np.uint64(HASH) ** np.arange(LETTERS, dtype=np.uint64)
        codes = np.stack([hashes[:, : LETTERS - n] @ powers[n:] for n in range(LETTERS + 1)], axis=1)
        kinds = np.where(pieces.continues, _CONTINUES, _BEGINS)
        # Without a mark within words, only a token without letters, like a comma, tells that the word has ended.
        kinds[(lengths == 0) & (bool(pieces.mark) | (kinds == _BEGINS))] = _NO_WORD
        return cls(codes, lengths.astype(np.int32), kinds.astype(np.int32))

    def __call__(self, rows: Ragged) -> Ragged:
        """Return the stems of the words of B texts, uint64, ascending and unique in each row; `rows`: token ids."""
        tokens, first = rows.entries, offsets_of(rows.counts)[:-1]
        if not len(tokens):
            return Ragged(np.empty(0, np.uint64), offsets_of(rows.counts))
        kinds, lengths = self.kinds[tokens], self.lengths[tokens]
        begins = kinds != _CONTINUES
        begins[1:] |= kinds[:-1] == _NO_WORD
        begins[first[rows.counts > 0]] = True
        words = np.flatnonzero(begins)
        before = np.cumsum(lengths) - lengths
        before -= np.repeat(before[words], np.diff(words, append=len(tokens)))
        stems = np.add.reduceat(self.codes[tokens, np.minimum(before, LETTERS)], words)
        has_letters = np.add.reduceat(lengths, words) > 0
        stems, row = stems[has_letters], rows.row_of()[words[has_letters]]
        order = np.lexsort((stems, row))
        stems, row = stems[order], row[order]
        unique = is_first_key(stems) | is_first_key(row)
        return Ragged.from_counts(stems[unique], np.bincount(row[unique], minlength=rows.rows))


def _decode(piece: str) -> str:
    """Return the text of a token of byte-level BPE; each byte of an incomplete character counts as a letter."""
    if piece.isascii():
        return piece
    try:
        content = piece.translate(_BYTES).encode("latin-1")
    except UnicodeEncodeError:  # an added token
        return piece
    try:
        return content.decode()
    except UnicodeDecodeError:
        return "".join(chr(_PARTS + byte) for byte in content)


class NameScores(NamedTuple):
    """Scores float32 [B, S] of labels for texts; NaN for padding and for a label without a stem.

    `share`: fraction of `weight` in the text, in [0, 1]. `weight`: sum of the IDF of the name's stems. `stems`: their
    number.
    """

    share: np.ndarray
    weight: np.ndarray
    stems: np.ndarray


@dataclass(frozen=True, eq=False)
class Names:
    """Index of the names of L labels: `of_labels` lists the numbers of each name's stems, in [0, F).

    `seen` uint64 [F]: all stems of names, ascending; `idf` float32 [F]: ln((1 + N) / (1 + df)) in N training texts.
    `weights` lists the labels of each stem with the stem's entry in the unit vector of the name.
    """

    stems: Stems
    seen: np.ndarray
    idf: np.ndarray
    of_labels: Ragged
    weights: SparseRows
    file: MappedFile | None = None  # the file that contains the arrays

    @classmethod
    def of(cls, stems: Stems, names: Ragged, texts: Iterable[Ragged]) -> "Names | None":
        """Index the `names` of L labels; `texts`: the training texts in batches. None if no label has a stem."""
        from trainer.rows.numba_kernels import by_row

        found = stems(names)
        seen, place = np.unique(found.values, return_inverse=True)
        if not len(seen):
            return None
        frequency, documents = np.zeros(len(seen), np.int64), 0
        for batch in texts:
            frequency += np.bincount(find_features(seen, stems(batch).values)[0], minlength=len(seen))
            documents += batch.rows
        idf = np.log((1 + documents) / (1 + frequency)).astype(np.float32)
        units = normalize_rows(SparseRows(place.astype(np.int32), idf[place], found.offsets))
        weights = SparseRows(*by_row(units.ids, units.row_of().astype(np.int32), units.values, len(seen)))
        return cls(stems, seen, idf, Ragged(units.ids, units.offsets), weights)

    @classmethod
    def of_data(cls, data: DataLayout, training_data: "Data") -> "Names | None":
        """Index the names of DATA's labels, the titles of their texts; None without token ids. Raises TableError."""
        labels, queries = Table.open(data.labels, "labels"), open_queries(data, training_data.split)
        if not {TOKENS} <= {*labels.columns} & {*queries.columns}:
            return None
        names = [Ragged.empty(0)]
        for rows in map(Inputs.of, labels.batches(with_titles(labels, [TOKENS]))):
            assert rows.tokens is not None, "labels have token ids"
            names.append(rows.tokens if rows.titles is None else titles_of(rows.tokens, rows.titles))
        groups = training_data.training_rows.batches(queries, [TOKENS], _TEXTS)
        stems = Stems.of(Table.open(data.tokenizer, "tokenizer").read_files()[TOKENIZER])
        return cls.of(stems, Ragged.join(names), (list_column(rows, TOKENS) for rows in groups))

    def rank(self, inputs: Inputs, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `candidates` for the texts of B rows."""
        assert inputs.tokens is not None, "names are looked for in texts"
        return self.candidates(inputs.tokens, k)

    def candidates(self, texts: Ragged, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels whose names are best in B texts: scores float32 [B, k], ids [B, k], padded with 0 and -1.

        A score is the product of the name's unit vector and the text's vector, each with the IDF of its stems. Whole,
        long and rare names are first; labels with equal scores are in the order of their ids.
        """
        found = self._find(texts)
        x = SparseRows(found.values, self.idf[found.values], found.offsets)
        return best_labels(x, self.weights, self.of_labels.rows, k)

    def score(self, texts: Ragged, ids: np.ndarray) -> NameScores:
        """Score labels `ids` [B, S] for B texts; a negative id is padding."""
        found = self._find(texts)
        return self._score(SparseRows(found.values, np.ones(len(found.values), np.float32), found.offsets), ids)

    def columns(self, inputs: Inputs, ids: np.ndarray, votes: Mapping[str, SparseRows]) -> dict[str, np.ndarray]:
        """Return scores of labels `ids` [B, S] by name, as in `score`, and the share in the title if texts have one.

        The scores "name in ..." of `votes`, labels that other scorers found, are the mean of what other labels got for
        each stem of the name: a label without training points has only these.
        """
        assert inputs.tokens is not None, "names are looked for in texts"
        whole = self.score(inputs.tokens, ids)
        columns = {"name": whole.share, "name weight": whole.weight, "name stems": whole.stems}
        if inputs.titles is not None:
            columns["name in title"] = self.score(titles_of(inputs.tokens, inputs.titles), ids).share
        for name in (name for name in IN_OTHERS if name in votes):
            of_labels = votes[name]
            names, stride = self.of_labels.take(of_labels.ids), len(self.seen)
            owner = names.row_of()
            keys, place = np.unique(of_labels.row_of()[owner] * stride + names.values, return_inverse=True)
            row, stem = np.divmod(keys, stride)
            sums = np.bincount(place, of_labels.values[owner], len(keys)).astype(np.float32)
            of_stems = SparseRows(stem, sums, offsets_of(np.bincount(row, minlength=len(ids))))
            columns[f"name in {name}"] = self._score(of_stems, ids).share - votes_of(of_labels, ids)
        return columns

    def _score(self, of_stems: SparseRows, ids: np.ndarray) -> NameScores:
        """Score labels `ids` [B, S] by the values of the stems of B rows, ascending in each row."""
        names = self.of_labels.take(np.maximum(ids, 0).ravel())
        pair, stride = names.row_of(), len(self.seen)
        # Row and stem form one number. Both parts are ascending.
        sought = pair // max(1, ids.shape[1]) * stride + names.values
        keys = np.append(of_stems.row_of() * stride + of_stems.ids, of_stems.rows * stride)
        place, idf = np.searchsorted(keys, sought), self.idf[names.values]
        value = np.where(keys[place] == sought, np.append(of_stems.values, 0)[place], 0)
        weight, of_found = (np.bincount(pair, each, names.rows) for each in (idf, idf * value))
        counts = np.where((ids.ravel() >= 0) & (names.counts > 0), names.counts, np.nan)
        each = (of_found / np.maximum(weight, 1e-12) + 0 * counts, weight + 0 * counts, counts)
        return NameScores(*(scores.astype(np.float32).reshape(ids.shape) for scores in each))

    def _find(self, texts: Ragged) -> Ragged:
        """Return the numbers of the stems of names in each text, ascending."""
        found = self.stems(texts)
        numbers, known = find_features(self.seen, found.values)
        return Ragged(numbers, offsets_of(known)[found.offsets])

    @classmethod
    def read(cls, table: Table) -> "Names | None":
        """Read the file of `table` that `write` wrote; None if the table has no names. Raises TableError."""
        with reading_arrays(table, FILE, "an index of names") as opened:
            if opened is None:
                return None
            codes, lengths, kinds, seen, idf, *indexes = (opened[0][name] for name in _ARRAYS)
            of_labels, weights = Ragged(*indexes[:2]), SparseRows(*indexes[2:])
            if not (
                (*lengths.shape, LETTERS + 1) == (*kinds.shape, LETTERS + 1) == codes.shape
                and len(seen) == len(idf) == weights.rows
                and 0 <= weights.ids.min(initial=0) <= weights.ids.max(initial=0) < of_labels.rows
                and 0 <= of_labels.values.min(initial=0) <= of_labels.values.max(initial=0) < weights.rows
            ):
                raise ValueError("the arrays are inconsistent")
            stems = Stems(codes.view(np.uint64), lengths, kinds)
            return cls(stems, seen.view(np.uint64), idf, of_labels, weights, opened[1])

    def write(self, url: str) -> Shard:
        """Write the file under `url`, and return its manifest entry."""
        codes, seen = self.stems.codes.view(np.int64), self.seen.view(np.int64)  # other types cannot be mapped
        arrays = (codes, self.stems.lengths, self.stems.kinds, seen, self.idf, *self.of_labels, *self.weights)
        return write_arrays(url, FILE, dict(zip(_ARRAYS, arrays, strict=True)))
