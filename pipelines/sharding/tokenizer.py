"""Tokenizer of a data set: from a directory, the hub or the data's own texts, frozen to files."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from schemas import storage
from schemas.errors import InputError, TableError
from schemas.waits import Wait

FILE = "tokenizer.json"
CONFIG = "tokenizer_config.json"
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
