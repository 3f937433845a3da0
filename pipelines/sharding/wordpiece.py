"""WordPiece vocabulary learned from the data's own texts, to the same bytes every time."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
ALPHABET = 1000  # characters that words are spelled with; a word with a rarer one becomes [UNK]
MAX_WORD = 100  # characters of a word; a longer one becomes [UNK], so nothing is learned from it
MIN_FREQUENCY = 2  # a piece seen once cannot be learned from
_PREFIX = "##"
_CHUNK_TEXTS = 1024
# No word is longer than such a run: whatever else a word ends at is looked for only where there is one.
_LONG_RUN = re.compile(rf"[^ \t\r\n]{{{MAX_WORD + 1}}}")


def train(texts: Callable[[], Iterable[str]], size: int) -> Tokenizer:
    """Train a WordPiece tokenizer of at most `size` tokens; `texts` is read twice. The same texts give the same bytes.

    The library's time is quadratic in the length of a word: without those beyond MAX_WORD it is linear in the texts.
    The library meets words in the random order of a hash map, numbers continuing characters (`##e`) as they come, and
    merges equally frequent pairs in the order of those numbers. Given all of them beforehand, it has no choice left.
    """
    normalizer = BertNormalizer(lowercase=True, strip_accents=True)
    words = BertPreTokenizer()
    alphabet = _alphabet(normalizer, _without_long_words(normalizer, words, texts()))
    continuing = [_PREFIX + c for c in alphabet if len(words.pre_tokenize_str(f"a{c}a")) == 1]
    special = list(SPECIAL)
    learner = Tokenizer(WordPiece(unk_token=SPECIAL[1]))
    learner.normalizer, learner.pre_tokenizer = normalizer, words
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=special + continuing,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix=_PREFIX,
        show_progress=False,
    )
    learner.train_from_iterator(_without_long_words(normalizer, words, texts()), trainer)
    # Only the true specials stay special: a text that spells "##e" must not be cut there.
    tokenizer = Tokenizer(WordPiece(learner.get_vocab(), unk_token=SPECIAL[1], max_input_chars_per_word=MAX_WORD))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, words
    tokenizer.add_special_tokens(special)
    return tokenizer


def _without_long_words(normalizer: BertNormalizer, words: BertPreTokenizer, texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts; one with a word of more than MAX_WORD characters without such words."""
    for text in texts:
        if _LONG_RUN.search(text) and _LONG_RUN.search(normal := normalizer.normalize_str(text)):
            yield " ".join(word for word, _ in words.pre_tokenize_str(normal) if len(word) <= MAX_WORD)
        else:
            yield text


def _alphabet(normalizer: BertNormalizer, texts: Iterable[str]) -> list[str]:
    """Return the most frequent characters of the texts in code point order; ties go to the lower code point."""
    counts: Counter[int] = Counter()
    for some in _chunks(texts):
        normal = normalizer.normalize_str(" ".join(some))
        points, n = np.unique(np.frombuffer(normal.encode("utf-32-le"), np.uint32), return_counts=True)
        counts.update(dict(zip(points.tolist(), n.tolist(), strict=True)))
    ranked = sorted((-n, point) for point, n in counts.items() if not chr(point).isspace())
    return sorted(chr(point) for _, point in ranked[:ALPHABET])


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(texts)
    while some := list(islice(rest, _CHUNK_TEXTS)):
        yield some
