"""Tokenizer of a data set: from a directory, the hub or the data's own texts; frozen to files, and its longest text."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer

from pipelines.sharding.words import Encoder, cut_words
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.waits import Wait

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ALPHABET = 1000  # characters that words are spelled with; a word with a rarer one becomes [UNK]
MAX_WORD = 100  # characters of a word; a longer one becomes [UNK], so nothing is learned from it
MIN_FREQUENCY = 2  # a piece seen once cannot be learned from
_PREFIX = "##"
LEAST, MOST = 128, 512  # tokens: what a text of any data may have, and what encoders with positions have
SAMPLED = 4096  # texts of a table
_COVERED = 0.99  # of the sampled texts are whole
_STEP = 32
_CHARACTERS = 16  # a token, at the very most
_UNKNOWN = "\N{UGARITIC LETTER ALPA}"  # a letter of no vocabulary
SPECIAL = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}


@dataclass(frozen=True)
class FrozenTokenizer:
    """Files of the tokenizer by name, and its vocabulary: token ids are in [0, vocabulary).

    It cuts texts at `max_tokens`. `kept`: those of the files that were taken as they are.
    """

    files: Mapping[str, bytes]
    vocabulary: int
    max_tokens: int
    kept: Mapping[str, bytes]

    @property
    def sha256(self) -> str:
        """Digest of the file that decides the tokens."""
        return storage.sha256(self.files[FILE])

    @property
    def longest(self) -> int | None:
        """Tokens that the model behind it reads at most, where its files say."""
        limit = json.loads(self.files[CONFIG]).get("model_max_length") if CONFIG in self.kept else None
        return limit if isinstance(limit, int) and limit > 0 else None

    def cut_at(self, max_tokens: int) -> "FrozenTokenizer":
        """Return the same tokenizer that cuts texts at another length."""
        if max_tokens == self.max_tokens:
            return self
        return freeze(Tokenizer.from_str(self.files[FILE].decode()), self.kept, max_tokens)


def load_directory(name: str, max_tokens: int) -> FrozenTokenizer | None:
    """Load the tokenizer of a local directory; None where `name` is none. Raises InputError: nothing loadable in it."""
    if not os.path.isdir(name):
        return None
    place = os.path.join(name, FILE)
    config = os.path.join(name, CONFIG)
    others = {CONFIG: storage.read_bytes(config)} if os.path.isfile(config) else {}
    try:
        if os.path.isfile(place):
            return freeze(Tokenizer.from_file(place), others, max_tokens)
        # Only the slow formats (vocab.txt, sentencepiece) need transformers to convert them.
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(name, local_files_only=True)
        return freeze(slow.backend_tokenizer, others, max_tokens)
    except Exception as error:
        raise InputError(
            f"{name}: no tokenizer could be loaded: {error}. Expected a directory with {FILE}, or one that "
            "transformers' AutoTokenizer loads."
        ) from None


def load_hub(name: str, max_tokens: int) -> FrozenTokenizer:
    """Load the tokenizer `name` from the hub or its local cache. Raises InputError."""
    try:
        with Wait(f"the hub to give the tokenizer {name}"):
            return freeze(Tokenizer.from_pretrained(name), {}, max_tokens)
    except Exception as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"tokenizer {name!r}: no such directory, and not to be had from the hub ({cause}). "
            "Give a local directory, a hub name, or train:SIZE."
        ) from None


def freeze(tokenizer: Tokenizer, others: Mapping[str, bytes], max_tokens: int) -> FrozenTokenizer:
    """Make the files that `tokenizers` and `transformers` load, truncating to `max_tokens` and never padding.

    Raises what the library does for a vocabulary that lacks the token of unknown words.
    """
    tokenizer.encode(_UNKNOWN)
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_tokens)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    special = {role: next((t for t in names if t in vocabulary), None) for role, names in SPECIAL.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_tokens}
    config |= {role: token for role, token in special.items() if token}
    files = {
        FILE: json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False, indent=1).encode(),
        CONFIG: (json.dumps(config, indent=1) + "\n").encode(),
    }
    return FrozenTokenizer({**files, **others}, max(vocabulary.values()) + 1, max_tokens, others)


def open_tokenizer(data: bytes, place: str) -> Tokenizer:
    """Open the content of a FILE, which lies at `place`. Raises TableError where it is none."""
    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # the library has no error of its own
        raise TableError(f"{place}: no tokenizer that this version reads: {error}. Make it again.") from None


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


def train_wordpiece(texts: pa.ChunkedArray, size: int) -> Tokenizer:
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
    special = list(WORDPIECE_SPECIAL)
    learner = Tokenizer(WordPiece(unk_token=WORDPIECE_SPECIAL[1]))
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
    tokenizer = Tokenizer(
        WordPiece(learner.get_vocab(), unk_token=WORDPIECE_SPECIAL[1], max_input_chars_per_word=MAX_WORD)
    )
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


def choose_length(frozen: FrozenTokenizer, tables: Iterable[pa.ChunkedArray], name: str = FILE) -> int:
    """Return what 99 % of the texts of each table have at most: a multiple of 32 tokens in [LEAST, MOST].

    Never more than the model behind the tokenizer reads. Raises InputError with the tokenizer's `name`.
    """
    most = min(MOST, frozen.longest or MOST)
    tokenizer = open_tokenizer(frozen.files[FILE], FILE)
    tokenizer.no_truncation()
    encoder, longest = Encoder(tokenizer, name), 0.0
    for table in tables:
        texts = pc.utf8_slice_codeunits(table.combine_chunks(), 0, most * _CHARACTERS)
        if len(texts):
            longest = max(longest, np.quantile(np.diff(encoder.encode(texts).offsets), _COVERED))
    return min(most, max(LEAST, -(-int(np.ceil(longest)) // _STEP) * _STEP))
