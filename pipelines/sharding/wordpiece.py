"""WordPiece vocabulary learned from the data's own texts, to the same bytes every time."""

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
MIN_FREQUENCY = 2  # a piece seen once cannot be learned from
_PREFIX = "##"
_CHUNK_TEXTS = 1024


def train(texts: Callable[[], Iterable[str]], size: int) -> Tokenizer:
    """Train a WordPiece tokenizer of at most `size` tokens; `texts` is read twice. The same texts give the same bytes.

    The library meets words in the random order of a hash map, numbers continuing characters (`##e`) as they come, and
    merges equally frequent pairs in the order of those numbers. Given all of them beforehand, it has no choice left.
    """
    normalizer = BertNormalizer(lowercase=True, strip_accents=True)
    words = BertPreTokenizer()
    alphabet = _alphabet(normalizer, texts())
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
    learner.train_from_iterator(texts(), trainer)
    # Only the true specials stay special: a text that spells "##e" must not be cut there.
    tokenizer = Tokenizer(WordPiece(learner.get_vocab(), unk_token=SPECIAL[1]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, words
    tokenizer.add_special_tokens(special)
    return tokenizer


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
