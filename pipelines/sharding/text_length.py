"""Length at which texts are cut, from a sample of them."""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.sharding.tokenizer import FILE, FrozenTokenizer, open_tokenizer
from pipelines.sharding.words import Encoder

LEAST, MOST = 128, 512  # tokens: what a text of any data may have, and what encoders with positions have
SAMPLED = 4096  # texts of a table
_COVERED = 0.99  # of the sampled texts are whole
_STEP = 32
_CHARACTERS = 16  # a token, at the very most


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
