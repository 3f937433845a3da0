"""Token ids of texts by their words: a word that comes again and again is encoded once.

A tokenizer of BERT's kind, ours among them, looks at nothing beyond a space: it normalises one character at a time,
parts words at white space and punctuation, and cuts each word into pieces by itself. So the tokens of a text are those
of what is between its spaces, one after the other; and a block of texts has a tenth as many different words as words.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from schemas.errors import InputError
from schemas.ragged import offsets_of

_BATCH_TEXTS = 2048
_SLICE_BYTES = 4 << 20  # of texts whose words are looked at together
_PROBE = "a"


class Words(NamedTuple):
    """Words of texts [B]: the different ones, the place of each word among these, int [W], offsets int [B + 1]."""

    different: pa.StringArray
    places: np.ndarray
    offsets: np.ndarray


class Encoded(NamedTuple):
    """Tokens of texts [B]: values uint32 [T], offsets int64 [B + 1], and whether a text was cut, bool [B]."""

    values: np.ndarray
    offsets: np.ndarray
    truncated: np.ndarray

    @staticmethod
    def empty() -> "Encoded":
        """Return the tokens of no text."""
        return Encoded(np.zeros(0, np.uint32), np.zeros(1, np.int64), np.zeros(0, bool))


class Encoder:
    """Encoder of text columns into what `tokenizer`, its own from now on, makes of each text; errors have `name`."""

    def __init__(self, tokenizer: Tokenizer, name: str = "") -> None:
        self._tokenizer, self._name = tokenizer, name
        self._around: tuple[list[int], list[int]] | None = None
        self._limit: int | None = None  # tokens of a text, without the special ones around it
        if not _ends_at_spaces(tokenizer):
            return
        cut = tokenizer.truncation
        tokenizer.no_truncation()
        self._around = _special_tokens(tokenizer)
        if cut is not None and self._around is not None:
            self._limit = cut["max_length"] - sum(map(len, self._around))
        elif cut is not None:
            tokenizer.enable_truncation(**cut)

    def encode(self, texts: pa.StringArray) -> Encoded:
        """Encode a column of texts without nulls. Raises InputError."""
        if self._around is None:
            return encode_whole(self._tokenizer, texts.to_pylist(), self._name)
        parts = [Encoded.empty(), *(self._encode_words(some, *self._around) for some in cut_words(texts))]
        values, lengths, truncated = zip(*((p.values, np.diff(p.offsets), p.truncated) for p in parts), strict=True)
        return Encoded(np.concatenate(values), offsets_of(np.concatenate(lengths)), np.concatenate(truncated))

    def _encode_words(self, words: Words, before: Sequence[int], after: Sequence[int]) -> Encoded:
        """Encode some texts by their words, with the special tokens `before` and `after` each."""
        pieces, index = encode_whole(self._tokenizer, words.different.to_pylist(), self._name, False), words.places
        counts = np.diff(pieces.offsets)[index]  # tokens of each word
        ends = offsets_of(counts)
        offsets = ends[words.offsets]
        lengths = np.diff(offsets)
        places = np.repeat(pieces.offsets[index] - ends[:-1], counts) + np.arange(ends[-1])
        limit = lengths.max(initial=0) if self._limit is None else self._limit
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
        return Encoded(values, offsets, truncated)


def encode_whole(tokenizer: Tokenizer, texts: Sequence[str], name: str = "", special: bool = True) -> Encoded:
    """Encode each of `texts` by itself; `special` puts the tokenizer's special tokens around it.

    Raises InputError with the tokenizer's `name` where it gives a text up.
    """
    values: list[np.ndarray] = []
    lengths: list[int] = []
    truncated: list[bool] = []
    # An encoding holds far more than its ids: few at a time, so that memory does not grow with the block.
    for start in range(0, len(texts), _BATCH_TEXTS):
        try:
            encodings = tokenizer.encode_batch_fast(texts[start : start + _BATCH_TEXTS], add_special_tokens=special)
        except BaseException as error:  # a panic of Rust is no Exception
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            raise InputError(f"the tokenizer {name} cannot encode a text: {error}. Give another tokenizer.") from None
        ids = [encoding.ids for encoding in encodings]
        counts = [len(row) for row in ids]
        values.append(np.fromiter(chain.from_iterable(ids), np.uint32, sum(counts)))
        lengths += counts
        truncated += [bool(encoding.overflowing) for encoding in encodings]
    offsets = offsets_of(np.asarray(lengths, np.int64))
    return Encoded(np.concatenate([np.zeros(0, np.uint32), *values]), offsets, np.asarray(truncated, bool))


def _ends_at_spaces(tokenizer: Tokenizer) -> bool:
    """Tell whether a text's tokens are those of what lies between its spaces, one after the other."""
    cut = tokenizer.truncation
    return (
        isinstance(tokenizer.normalizer, BertNormalizer)
        and isinstance(tokenizer.pre_tokenizer, BertPreTokenizer)
        and isinstance(tokenizer.model, WordPiece)
        and tokenizer.padding is None
        and (cut is None or (cut["direction"], cut["stride"]) == ("right", 0))
        and not any(
            token.normalized or token.lstrip or token.rstrip or token.single_word or " " in token.content
            for token in tokenizer.get_added_tokens_decoder().values()
        )
    )


def _special_tokens(tokenizer: Tokenizer) -> tuple[list[int], list[int]] | None:
    """Return the special tokens before and after every text; None where it is not so simple."""
    whole, bare = tokenizer.encode(_PROBE), tokenizer.encode(_PROBE, add_special_tokens=False)
    first = next((place for place, special in enumerate(whole.special_tokens_mask) if not special), None)
    if first is None or len(bare.ids) != 1:
        return None
    before, after = whole.ids[:first], whole.ids[first + 1 :]
    return (before, after) if [*before, *bare.ids, *after] == whole.ids else None


def cut_words(texts: pa.StringArray) -> Iterator[Words]:
    """Cut texts at spaces, in order, as many at a time as are _SLICE_BYTES, or one."""
    ends = offsets_of(pc.binary_length(texts).to_numpy())
    start = 0
    while start < len(texts):
        stop = max(int(np.searchsorted(ends, ends[start] + _SLICE_BYTES, side="right")) - 1, start + 1)
        parted = pc.split_pattern(texts.slice(start, stop - start), " ")
        words, offsets = parted.flatten().dictionary_encode(), parted.offsets.to_numpy()
        yield Words(words.dictionary, words.indices.to_numpy(), offsets - offsets[0])
        start = stop
