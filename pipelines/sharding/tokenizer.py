"""A data set's tokenizer: loaded from a directory or the hub, or trained on the data's texts; columns of texts encoded.

A tokenizer like BERT's never looks across a space: it normalises one character at a time, splits words at white space
and punctuation, and splits each word into pieces separately. So texts can be split at spaces and newlines, and their
parts tokenized separately. Only about a tenth of the words in a block are distinct, and each distinct word is encoded
once.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pydantic import Base64Bytes
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer

from schemas import storage
from schemas.errors import InputError, TableError, failure_of_hub
from schemas.layout import find_tokenizer
from schemas.ragged import offsets_of
from schemas.waits import Wait

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ALPHABET = 1000  # characters in the vocabulary; a word with a rarer character becomes [UNK]
MAX_WORD = 100  # characters of a word; a longer word becomes [UNK], so training ignores it
MIN_FREQUENCY = 2  # training cannot use a piece that occurs only once
_PREFIX = "##"
# Tokens: the smallest limit for texts, and the usual limit of encoders with positions.
LEAST_TOKENS, MOST_TOKENS = 128, 512
SAMPLE_TEXTS = 4096  # number of texts per table
_COVERED = 0.99  # share of the sampled texts that are not cut
_STEP = 32
_CHARACTERS = 16  # per token, at most
_UNKNOWN = "\N{UGARITIC LETTER ALPA}"  # a letter that is in no vocabulary
SPECIAL = {
    "pad_token": ("[PAD]", "<pad>"),
    "unk_token": ("[UNK]", "<unk>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
_BATCH_TEXTS = 2048
_SLICE_BYTES = 4 << 20  # bytes of texts whose words are compared together
_PROBE = "a"


@dataclass(frozen=True)
class FrozenTokenizer:
    """Files of a tokenizer by name, and the size of its vocabulary: token ids are in [0, vocabulary).

    The tokenizer truncates texts to `max_tokens` tokens. `kept`: the files that are unchanged copies from the source.
    """

    files: Mapping[str, Base64Bytes]
    vocabulary: int
    max_tokens: int
    kept: Mapping[str, Base64Bytes]

    def with_max_tokens(self, max_tokens: int) -> "FrozenTokenizer":
        """Return the same tokenizer with a limit of `max_tokens` tokens per text."""
        if max_tokens == self.max_tokens:
            return self
        return freeze(Tokenizer.from_str(self.files[FILE].decode()), self.kept, max_tokens)


def load_directory(name: str, max_tokens: int) -> FrozenTokenizer | None:
    """Load a tokenizer from a local directory; None if `name` is no directory. Raises InputError if loading fails."""
    if not os.path.isdir(name):
        return None
    place, config = find_tokenizer(Path(name)), os.path.join(name, CONFIG)
    others = {CONFIG: storage.read_bytes(config)} if os.path.isfile(config) else {}
    try:
        if place is not None:
            return freeze(Tokenizer.from_file(str(place)), others, max_tokens)
        # Only the conversion of the slow formats (vocab.txt, sentencepiece) needs transformers.
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(name, local_files_only=True)
        return freeze(slow.backend_tokenizer, others, max_tokens)
    except Exception as error:
        raise InputError(
            f"{name}: cannot load the tokenizer: {error}. Expected a directory with {FILE}, or a directory that "
            "AutoTokenizer of transformers can load."
        ) from None


def load_hub(name: str, max_tokens: int) -> FrozenTokenizer:
    """Load the tokenizer `name` from the hub or its local cache. Raises InputError, PeerError."""
    try:
        with Wait(f"the hub to send the tokenizer {name}"):
            return freeze(Tokenizer.from_pretrained(name), {}, max_tokens)
    except Exception as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise failure_of_hub(error)(
            f"tokenizer {name!r}: not a local directory, and not available from the hub ({cause}). Give a local "
            "directory, a hub name, or train:SIZE."
        ) from None


def freeze(tokenizer: Tokenizer, others: Mapping[str, bytes], max_tokens: int) -> FrozenTokenizer:
    """Write a tokenizer that truncates to `max_tokens` and never pads, as files for `tokenizers` and `transformers`.

    Raises the library's error if the vocabulary has no token for unknown words.
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
    """Open a tokenizer from `data`, the content of the FILE at `place`. Raises TableError if that is not possible."""
    try:
        return Tokenizer.from_str(data.decode())
    except Exception as error:  # the library does not define its own error
        raise TableError(
            f"{place}: this version of Extremis cannot read the tokenizer: {error}. Create the tokenizer again."
        ) from None


class _NormalizedTexts(NamedTuple):
    """Texts in the form in which the library's trainer counts words: normalised, and split only at spaces.

    distinct: the normalised form of each distinct word, which can consist of several words. counts: how often each
    distinct word occurs, int64. texts: for each slice of texts, the indices of the words, and offsets.
    """

    distinct: pa.StringArray
    counts: np.ndarray
    texts: list[tuple[np.ndarray, np.ndarray]]

    def iterate(self) -> Iterator[str]:
        import pyarrow.compute as pc

        for index, offsets in self.texts:
            lists = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), self.distinct.take(pa.array(index)))
            yield from pc.binary_join(lists, " ").to_pylist()


def train_wordpiece(texts: pa.ChunkedArray, size: int) -> Tokenizer:
    """Train a WordPiece tokenizer with at most `size` tokens. The same texts always give exactly the same tokenizer.

    The library's running time is quadratic in the length of a word. Words longer than MAX_WORD are ignored, so that the
    time is linear in the size of the texts. The library iterates over words in the random order of
    a hash map, and assigns ids to continuing characters (`##e`) in that order. These ids break ties between equally
    frequent pairs. To make the result reproducible, all continuing characters get their ids beforehand.
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
    # Only the real special tokens stay special: a text that contains "##e" must not be cut there.
    tokenizer = Tokenizer(
        WordPiece(learner.get_vocab(), unk_token=WORDPIECE_SPECIAL[1], max_input_chars_per_word=MAX_WORD)
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, words
    tokenizer.add_special_tokens(special)
    return tokenizer


def _normalise(texts: pa.ChunkedArray, normalizer: BertNormalizer, words: BertPreTokenizer) -> _NormalizedTexts:
    """Normalise the words of texts, and remove words with more than MAX_WORD characters."""
    places: dict[str, int] = {}
    cut = []
    for some in (some for chunk in texts.chunks for some in split_words(chunk)):
        numbers = [places.setdefault(word, len(places)) for word in some.distinct.to_pylist()]
        cut.append((np.array(numbers, np.int32)[some.positions], some.offsets))
    counts = np.zeros(len(places), np.int64)
    for index, _ in cut:
        counts += np.bincount(index, minlength=len(places))
    parted = (words.pre_tokenize_str(normalizer.normalize_str(word)) for word in places)
    normal = [" ".join(word for word, _ in some if len(word) <= MAX_WORD) for some in parted]
    return _NormalizedTexts(pa.array(normal, pa.string()), counts, cut)


def _alphabet(normal: _NormalizedTexts) -> list[str]:
    """Return the most frequent characters of the texts in code point order; ties go to the lower code point."""
    words = normal.distinct.to_pylist()
    points = np.frombuffer("".join(words).encode("utf-32-le"), np.uint32)
    of_word = np.repeat(normal.counts, [len(word) for word in words])
    points, place = np.unique(points, return_inverse=True)
    counts = np.bincount(place, of_word, len(points)).astype(np.int64)
    ranked = sorted((-n, point) for point, n in zip(points.tolist(), counts.tolist(), strict=True) if point != ord(" "))
    return sorted(chr(point) for _, point in ranked[:ALPHABET])


def choose_length(frozen: FrozenTokenizer, tables: Iterable[pa.ChunkedArray], name: str = FILE) -> int:
    """Choose the maximum length in tokens: a multiple of 32 in [LEAST, MOST] that fits 99 % of each table's texts.

    The length never exceeds the limit of the tokenizer's model. Raises InputError with the tokenizer's `name`.
    """
    import pyarrow.compute as pc

    limit = json.loads(frozen.files[CONFIG]).get("model_max_length") if CONFIG in frozen.kept else None
    most = min(MOST_TOKENS, limit) if isinstance(limit, int) and limit > 0 else MOST_TOKENS
    tokenizer = open_tokenizer(frozen.files[FILE], FILE)
    tokenizer.no_truncation()
    encoder, longest = ColumnTokenizer(tokenizer, name), 0.0
    for table in tables:
        texts = pc.utf8_slice_codeunits(table.combine_chunks(), 0, most * _CHARACTERS)
        if len(texts):
            longest = max(longest, np.quantile(np.diff(encoder.encode(texts).offsets), _COVERED))
    return min(most, max(LEAST_TOKENS, -(-int(np.ceil(longest)) // _STEP) * _STEP))


class Words(NamedTuple):
    """Words of texts [B]: the distinct words, a position in these for each word int [W], and offsets int [B + 1]."""

    distinct: pa.StringArray
    positions: np.ndarray
    offsets: np.ndarray
    titles: np.ndarray  # words of the first line, int [B]


class Encoded(NamedTuple):
    """Tokens of texts [B]: values uint32 [T], offsets int64 [B + 1], and whether each text was truncated, bool [B]."""

    values: np.ndarray
    offsets: np.ndarray
    truncated: np.ndarray
    titles: np.ndarray  # tokens of the first line, int32 [B]; special tokens after a text belong to its last line


class ColumnTokenizer:
    """Tokenizer for text columns. It must be the only user of `tokenizer`. Error messages contain `name`."""

    def __init__(self, tokenizer: Tokenizer, name: str = "") -> None:
        self._tokenizer, self._name = tokenizer, name
        self._around = special_tokens(tokenizer) if ends_at_spaces(tokenizer) else None
        self._limit: int | None = None  # token limit of a text, without special tokens
        if self._around is not None and (cut := tokenizer.truncation) is not None:
            self._limit = cut["max_length"] - sum(map(len, self._around))
            tokenizer.no_truncation()

    def encode(self, texts: pa.StringArray) -> Encoded:
        """Encode a column of texts without nulls. Raises InputError."""
        if self._around is None:
            return encode_texts(self._tokenizer, texts.to_pylist(), self._name)
        parts = [self._encode_words(some, *self._around) for some in split_words(texts)]
        own = ((p.values, np.diff(p.offsets), *p[2:]) for p in parts or [encode_texts(self._tokenizer, [])])
        values, lengths, truncated, titles = map(np.concatenate, zip(*own, strict=True))
        return Encoded(values, offsets_of(lengths), truncated, titles)

    def _encode_words(self, words: Words, before: Sequence[int], after: Sequence[int]) -> Encoded:
        """Encode texts word by word, and add the special tokens `before` and `after` to each text."""
        pieces, index = encode_texts(self._tokenizer, words.distinct.to_pylist(), self._name, False), words.positions
        counts = np.diff(pieces.offsets)[index]  # tokens of each word
        ends = offsets_of(counts)
        offsets = ends[words.offsets]
        lengths = np.diff(offsets)
        places = np.repeat(pieces.offsets[index] - ends[:-1], counts) + np.arange(ends[-1])
        limit = lengths.max(initial=0) if self._limit is None else self._limit
        titles = np.minimum(ends[words.offsets[:-1] + words.titles] - offsets[:-1], limit) + len(before)
        truncated = lengths > limit
        if truncated.any():
            places = places[np.arange(ends[-1]) - np.repeat(offsets[:-1], lengths) < limit]
            lengths = np.minimum(lengths, limit)
            offsets = offsets_of(lengths)
        values = pieces.values[places]
        if before or after:
            around = np.repeat(np.stack([offsets[:-1], offsets[1:]], 1), (len(before), len(after)), axis=1)
            values = np.insert(values, around.ravel(), np.tile(np.array([*before, *after], np.uint32), len(lengths)))
            offsets = offsets + np.arange(len(offsets)) * (len(before) + len(after))
        titles = np.where(words.titles < np.diff(words.offsets), titles, np.diff(offsets))
        return Encoded(values, offsets, truncated, titles.astype(np.int32))


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], name: str = "", special: bool = True) -> Encoded:
    """Encode each text in `texts` separately. `special`: add the tokenizer's special tokens around each text.

    Raises InputError with the tokenizer's `name` if the tokenizer cannot encode a text.
    """
    values: list[np.ndarray] = []
    lengths: list[int] = []
    truncated: list[bool] = []
    # An encoding has far more than its ids. Few encodings are made at a time, so memory does not grow with the block.
    for start in range(0, len(texts), _BATCH_TEXTS):
        try:
            encodings = tokenizer.encode_batch_fast(texts[start : start + _BATCH_TEXTS], add_special_tokens=special)
        except BaseException as error:  # a Rust panic is not an Exception
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise InputError(f"the tokenizer {name} cannot encode a text: {error}. Give another tokenizer.") from None
        ids = [encoding.ids for encoding in encodings]
        counts = [len(row) for row in ids]
        values.append(np.fromiter(chain.from_iterable(ids), np.uint32, sum(counts)))
        lengths += counts
        truncated += [bool(encoding.overflowing) for encoding in encodings]
    offsets, titles = offsets_of(np.asarray(lengths, np.int64)), np.asarray(lengths, np.int32)
    first = {row: text.partition("\n")[0] for row, text in enumerate(texts) if "\n" in text}
    if first:
        alone = np.diff(encode_texts(tokenizer, [*first.values()], name, special).offsets)
        around = special_tokens(tokenizer) if special else None
        titles[[*first]] = np.minimum(alone - (len(around[1]) if around else 0), titles[[*first]])
    return Encoded(np.concatenate([np.zeros(0, np.uint32), *values]), offsets, np.asarray(truncated, bool), titles)


def ends_at_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether a text can be split at spaces and newlines, and the words tokenized alone, to the same result."""
    cut = tokenizer.truncation
    return (
        isinstance(tokenizer.normalizer, BertNormalizer)
        and isinstance(tokenizer.pre_tokenizer, BertPreTokenizer)
        and isinstance(tokenizer.model, WordPiece)
        and tokenizer.padding is None
        and (cut is None or (cut["direction"], cut["stride"]) == ("right", 0))
        and not any(
            token.normalized or token.lstrip or token.rstrip or token.single_word or {" ", "\n"} & {*token.content}
            for token in tokenizer.get_added_tokens_decoder().values()
        )
    )


def special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the special tokens before and after every text; None if they are not the same for every text."""
    post, bare = tokenizer.post_processor, tokenizer.encode(_PROBE, add_special_tokens=False)
    whole = bare if post is None else post.process(bare)
    own = np.flatnonzero(np.array(whole.special_tokens_mask) == 0)
    if not len(own):
        return None
    before, after = whole.ids[: own[0]], whole.ids[own[-1] + 1 :]
    return (before, after) if [*before, *bare.ids, *after] == whole.ids else None


def split_words(texts: pa.StringArray) -> Iterator[Words]:
    """Split texts into words at spaces and newlines, in slices of at most _SLICE_BYTES, or of one longer text."""
    import pyarrow.compute as pc  # serving does not need it

    ends = offsets_of(pc.binary_length(texts).to_numpy())
    start = 0
    while start < len(texts):
        stop = max(int(np.searchsorted(ends, ends[start] + _SLICE_BYTES, side="right")) - 1, start + 1)
        some = texts.slice(start, stop - start)
        first = pc.list_element(pc.split_pattern(some, "\n", max_splits=1), 0)
        parted = pc.split_pattern(pc.replace_substring(some, "\n", " "), " ")
        words, offsets = parted.flatten().dictionary_encode(), parted.offsets.to_numpy()
        titles = pc.count_substring(first, " ").to_numpy() + 1
        yield Words(words.dictionary, words.indices.to_numpy(), offsets - offsets[0], titles)
        start = stop
