"""Labels with equal texts: a label with the same text as a positive of a row is not used as a negative for this row.

The launching process hashes the normalised text of each label to 64 bits, and needs 16 bytes per label to search for
repeated hashes. The file for workers contains only labels with repeated texts: 12 bytes per label and 4 bytes per text.
"""

import functools
import re
import unicodedata
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from schemas import storage
from schemas.errors import StorageError
from schemas.hashing import hash_strings
from schemas.ragged import Ragged, offsets_of
from schemas.table import Table
from search.exclusions import Exclusions

_AT_ONCE = 1 << 20
_OF_NAMES = "#%&*@"  # characters that stay: C# is not C


class Aliases(NamedTuple):
    """M labels that share their text with another label, and their G texts; all arrays are uint32.

    `labels` [M] are in ascending order, and `texts` [M] are the numbers of the labels' texts, in [0, G). `members` [M]
    are the same labels ordered by (text, label): the labels of text g are members[edges[g] : edges[g + 1]].
    """

    labels: np.ndarray
    texts: np.ndarray
    members: np.ndarray
    edges: np.ndarray

    def add_to(self, exclusions: Exclusions) -> Exclusions:
        """Add every label with the same text as a positive, including the positive itself, to the exclusions."""
        positives, ids = exclusions.positives, exclusions.positives.entries
        at = np.minimum(np.searchsorted(self.labels, ids.astype(np.uint32)), len(self.labels) - 1)
        hits = self.labels[at] == ids
        groups = len(self.edges) - 1
        rows, texts = np.divmod(np.unique(positives.row_of()[hits] * groups + self.texts[at[hits]]), groups)
        same = Ragged(self.members, self.edges).take(texts)
        counts = np.bincount(rows, same.counts, positives.rows).astype(np.int64)
        return exclusions._replace(same_text=Ragged.from_counts(same.values.astype(np.int64), counts))

    @property
    def bytes(self) -> int:
        """Memory, in bytes, that a worker needs to read the file: twice the size of the content."""
        return 2 * sum(part.nbytes for part in self)

    def write(self, url: str) -> None:
        """Write the aliases for `read_aliases`. Raises StorageError."""
        sizes = np.array([len(self.labels), len(self.edges)], "<u4")
        storage.write_sealed(url, np.concatenate([sizes, *self]).astype("<u4").tobytes())


@functools.lru_cache(maxsize=1)
def read_aliases(url: str) -> Aliases:
    """Read a file written by `Aliases.write`, once per process. Raises StorageError."""
    try:
        content = np.frombuffer(storage.read_sealed(url), "<u4")
    except FileNotFoundError:
        raise StorageError(
            f"{url}: the file of labels with equal texts is missing. Run the same command again."
        ) from None
    return Aliases(*np.split(content[2:], np.arange(1, 4) * int(content[0])))


def find_aliases(labels: Table | None, rule: str) -> Aliases | None:
    """Return the labels with equal texts according to `rule` (equal, near or off), or None if there are none.

    Raises TableError, StorageError.
    """
    return None if labels is None or rule == "off" else _find(labels.url, labels.digest, rule)


@functools.lru_cache(maxsize=1)
def _find(url: str, digest: str, rule: str) -> Aliases | None:
    """Find the aliases once per process: a miner that runs alongside a trainer needs the aliases for each dump."""
    table, normal = Table.open(url, "labels"), near if rule == "near" else normalized
    hashes = np.zeros(table.rows, np.uint64)
    for rows in table.batches(["label_id", "text"]):
        texts = pa.array([normal(text) for text in rows.column("text").to_pylist()], pa.string())
        hashes[rows.column("label_id").to_numpy()] = hash_strings(texts, 0)
    ordered = np.sort(hashes)
    twice = np.unique(ordered[1:][ordered[1:] == ordered[:-1]])
    twice = twice[twice != hash_strings(pa.array([""]), 0)[0]]  # except the empty text
    del ordered
    if not len(twice):
        return None
    found = []
    for first in range(0, len(hashes), _AT_ONCE):
        some = hashes[first : first + _AT_ONCE]
        at = np.minimum(np.searchsorted(twice, some), len(twice) - 1)
        hits = np.flatnonzero(twice[at] == some)
        found.append(np.stack([hits + first, at[hits]]).astype(np.uint32))
    ids, groups = np.concatenate(found, axis=1)
    edges = offsets_of(np.bincount(groups, minlength=len(twice))).astype(np.uint32)
    return Aliases(ids, groups, ids[np.argsort(groups, kind="stable")], edges)


def normalized(text: str) -> str:
    """Return a text in NFKC form, case-folded, with single spaces and without leading or trailing punctuation.

    The characters # % & * @ are not removed, and a text that consists only of punctuation keeps its punctuation.
    """
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
    text = text.casefold() if text.isascii() else unicodedata.normalize("NFKC", text.casefold())
    words = " ".join(text.split())
    return words.strip(_surrounding()) or words


def near(text: str) -> str:
    """Return the distinct words of a text, sorted; a word consists of letters and digits."""
    text = normalized(text)
    return " ".join(sorted({*re.findall(r"[^\W_]+", text)})) or text


@functools.cache
def _surrounding() -> str:
    characters = (chr(code) for code in range(1 << 16))
    return " " + "".join(c for c in characters if unicodedata.category(c)[0] == "P" and c not in _OF_NAMES)
