"""Fragments: unknown tokens, tokens that continue a word, single letters. Words that training lacks fall into these."""

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.table import Table

FILE = "tokenizer.json"
_STARTS = "\u0120\u2581"  # the first character of a word's first token in a byte-level BPE, and in SentencePiece


def fragments_of(tokenizer: bytes) -> np.ndarray:
    """Return which tokens are fragments, bool [V]. `tokenizer`: the content of a tokenizer.json."""
    opened = Tokenizer.from_str(tokenizer.decode())
    vocabulary, unknown = opened.get_vocab(), getattr(opened.model, "unk_token", None)
    marks_starts = any(token[:1] in _STARTS for token in vocabulary if token)
    fragments = np.zeros(max(vocabulary.values()) + 1, bool)
    for token, number in vocabulary.items():
        word = token.lstrip(_STARTS)
        continues = word == token if marks_starts else token.startswith("##")
        fragments[number] = continues or token == unknown or (len(word) == 1 and word.isalnum())
    return fragments


def open_fragments(data: DataLayout, columns: Sequence[str]) -> np.ndarray | None:
    """Return `fragments_of` DATA's tokenizer; None for an encoder that reads `columns` without tokens."""
    if "input_ids" not in columns:
        return None
    return fragments_of(Table.open(data.tokenizer, "tokenizer").read_files()[FILE])


def share_of_fragments(tokens: Ragged | None, fragments: np.ndarray | None) -> np.ndarray | float:
    """Return the share of `fragments` [V] among the `tokens` of B texts, [B]; 0 if either is None."""
    if tokens is None or fragments is None:
        return 0.0
    return np.bincount(tokens.row_of(), fragments[tokens.entries], tokens.rows) / np.maximum(tokens.counts, 1)
