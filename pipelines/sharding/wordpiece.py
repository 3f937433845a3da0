"""WordPiece vocabulary learned from the data's own texts, to the same bytes every time."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer

from pipelines.sharding.words import cut_words

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ALPHABET = 1000  # characters that words are spelled with; a word with a rarer one becomes [UNK]
MAX_WORD = 100  # characters of a word; a longer one becomes [UNK], so nothing is learned from it
MIN_FREQUENCY = 2  # a piece seen once cannot be learned from
_PREFIX = "##"


class _Normal(NamedTuple):
    """Texts as the library's trainer counts their words: normalised, and parted by spaces alone.

    different: the normal form of each different word, which may be several words; counts: of these, int64.
    texts: places among them, and offsets, of some texts at a time.
    """

    different: pa.StringArray
    counts: np.ndarray
    texts: list[tuple[np.ndarray, np.ndarray]]

    def iterate(self) -> Iterator[str]:
        """Yield the normal forms of the texts."""
        for index, offsets in self.texts:
            lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), self.different.take(pa.array(index)))
            yield from pc.binary_join(lists, " ").to_pylist()


def train(texts: pa.ChunkedArray, size: int) -> Tokenizer:
    """Train a WordPiece tokenizer of at most `size` tokens. The same texts give the same bytes.

    The library's time is quadratic in the length of a word: without those beyond MAX_WORD it is linear in the texts.
    The library meets words in the random order of a hash map, numbers continuing characters (`##e`) as they come, and
    merges equally frequent pairs in the order of those numbers. Given all of them beforehand, it has no choice left.
    """
    normalizer = BertNormalizer(lowercase=True, strip_accents=True)
    words = BertPreTokenizer()
    normal = _normalise(texts, normalizer, words)
    alphabet = _alphabet(normal)
    continuing = [_PREFIX + c for c in alphabet if len(words.pre_tokenize_str(f"a{c}a")) == 1]
    special = list(SPECIAL)
    learner = Tokenizer(WordPiece(unk_token=SPECIAL[1]))
    learner.pre_tokenizer = WhitespaceSplit()
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=special + continuing,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=_PREFIX,
        show_progress=False,
    )
    learner.train_from_iterator(normal.iterate(), trainer)
    # Only the true specials stay special: a text that spells "##e" must not be cut there.
    tokenizer = Tokenizer(WordPiece(learner.get_vocab(), unk_token=SPECIAL[1], max_input_chars_per_word=MAX_WORD))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, words
    tokenizer.add_special_tokens(special)
    return tokenizer


def _normalise(texts: pa.ChunkedArray, normalizer: BertNormalizer, words: BertPreTokenizer) -> _Normal:
    """Normalise the words of texts, and leave out what has more than MAX_WORD characters."""
    places: dict[str, int] = {}
    cut = []
    for some in (some for chunk in texts.chunks for some in cut_words(chunk)):
        numbers = [places.setdefault(word, len(places)) for word in some.different.to_pylist()]
        cut.append((np.array(numbers, np.int32)[some.places], some.offsets))
    counts = np.zeros(len(places), np.int64)
    for index, _ in cut:
        counts += np.bincount(index, minlength=len(places))
    parted = (words.pre_tokenize_str(normalizer.normalize_str(word)) for word in places)
    normal = [" ".join(word for word, _ in some if len(word) <= MAX_WORD) for some in parted]
    return _Normal(pa.array(normal, pa.string()), counts, cut)


def _alphabet(normal: _Normal) -> list[str]:
    """Return the most frequent characters of the texts in code point order; ties go to the lower code point."""
    words = normal.different.to_pylist()
    points = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
    of_word = np.repeat(normal.counts, [len(word) for word in words])
    points, place = np.unique(points, return_inverse=True)
    counts = np.bincount(place, of_word, len(points)).astype(np.int64)
    ranked = sorted((-n, point) for point, n in zip(points.tolist(), counts.tolist(), strict=True) if point != ord(" "))
    return sorted(chr(point) for _, point in ranked[:ALPHABET])
