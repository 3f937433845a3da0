"""Names of the page's labels, which tell them apart."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from extremis.inspecting.decode_text import TextDecoder, clean
from extremis.inspecting.examples import LONGEST_LABEL


class Label(NamedTuple):
    """A label's text (its key where it has none), key and training points; `shared`: others here have this text."""

    text: str
    key: str
    points: int
    shared: bool


def name_labels(decoder: TextDecoder, ids: Iterable[int]) -> dict[int, Label]:
    """Name labels by id: text and key differ for any two, the text alone unless it is shared. Raises TableError."""
    named = {row["label_id"]: (clean(str(row["key"])), row) for row in decoder.label_rows(ids)}
    texts = {label: clean(row["text"], LONGEST_LABEL) or key for label, (key, row) in named.items()}
    labels = Counter(texts.values())
    return {i: Label(texts[i], key, row["frequency"], labels[texts[i]] > 1) for i, (key, row) in named.items()}
