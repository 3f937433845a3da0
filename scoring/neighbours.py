"""Nearest training texts by TF-IDF of words, whose labels get votes; without the model, and without PyTorch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from schemas.arrow import DENSE
from schemas.layout import DataLayout
from schemas.manifest import Shard
from schemas.mapped import MappedFile
from schemas.ragged import Ragged, SparseRows
from schemas.table import Table
from scoring.memory import NEIGHBOURS, count_votes
from scoring.words import (
    BUDGET,
    Points,
    RowFeatures,
    best_labels,
    join_points,
    open_vocabulary,
    read_points,
    reading_arrays,
    write_arrays,
)
from trainer.inputs import Inputs, open_queries

if TYPE_CHECKING:
    from trainer.methods.sections import Data

FILE = "neighbours.safetensors"
TEMPERATURE = 0.1  # of words: texts that share a few words have smaller cosines than embeddings have
TITLE = 0.5  # weight of the words of titles


@dataclass(frozen=True, eq=False)
class Neighbours:
    """N training texts by words: `texts` lists the texts of each word, with weights; `labels`: of each text.

    The first `trained` texts are training rows of the run, the other texts are held-out rows.
    """

    words: RowFeatures
    texts: SparseRows
    labels: Ragged
    trained: int
    file: MappedFile | None = None  # the file that contains the arrays

    @classmethod
    def of(
        cls, data: DataLayout, training_data: "Data", columns: Sequence[str], budget: int = BUDGET
    ) -> "Neighbours | None":
        """Read the training rows of a run, then the held-out rows, as far as they fit into `budget` bytes.

        Returns None if no training rows fit, or if rows have only dense vectors. Raises TableError.
        """
        columns, table = [name for name in columns if name != DENSE], open_queries(data, training_data.split)
        vocabulary = open_vocabulary(data, columns)
        shares = (training_data.training_rows, training_data.held_out_rows) if columns else ()
        parts = [read_points(table, [share], columns, vocabulary, budget // 2, pairs=False) for share in shares]
        if not columns or not any(len(part.rows.ids) for part in parts[0]):
            return None
        trained = sum(part.rows.rows for part in parts[0])
        return cls.index(join_points([*parts[0], *parts[1]]), trained, vocabulary)

    @classmethod
    def index(cls, points: Points, trained: int, vocabulary: int) -> "Neighbours":
        """Index `points`, of which the first `trained` are training rows: only their words count."""
        from trainer.rows.numba_kernels import by_row

        words = RowFeatures.of(points.rows.slice(0, trained), vocabulary, title=TITLE, pairs=False)
        rows = words.weigh(points.rows)
        texts = SparseRows(*by_row(rows.ids, rows.row_of().astype(np.int32), rows.values, len(words.seen)))
        labels = points.labels._replace(values=points.labels.values.astype(np.int32))
        return cls(words, texts, labels, trained)

    def rank(self, inputs: Inputs, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the labels with the most votes of training rows: votes [B, k], ids [B, k], padded with -inf and -1."""
        return self.votes(inputs, trained_only=True).best(k)

    def votes(self, inputs: Inputs, trained_only: bool = False) -> SparseRows:
        """Return the labels of the nearest texts, with votes in (0, 1]; `trained_only`: no held-out rows vote."""
        return count_votes(*self.nearest(inputs, trained_only), self.labels, TEMPERATURE)

    def nearest(self, inputs: Inputs, trained_only: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Return the similarities [B, K] of the texts that share words with each row, best first, and their numbers."""
        rows = self.trained if trained_only else self.labels.rows
        return best_labels(self.words(inputs), self.texts, rows, NEIGHBOURS)

    @classmethod
    def read(cls, table: Table) -> "Neighbours | None":
        """Read the file that `write` wrote; None if the table has none. Raises TableError."""
        with reading_arrays(table, FILE, "an index of texts") as opened:
            if opened is None:
                return None
            arrays, file = opened
            vocabulary, trained = arrays["sizes"].tolist()
            words = RowFeatures(vocabulary, arrays["seen"], arrays["factors"], TITLE, pairs=False)
            texts = SparseRows(arrays["texts"], arrays["weights"], arrays["offsets"])
            labels = Ragged(arrays["labels"], arrays["label_offsets"])
            if not (len(words.seen) == texts.rows and 0 <= trained <= labels.rows > texts.ids.max(initial=-1)):
                raise ValueError("the arrays are inconsistent")
            return cls(words, texts, labels, trained, file)

    def write(self, url: str) -> Shard:
        """Write the file under `url`, and return its manifest entry."""
        texts, weights, offsets = self.texts
        arrays = {"texts": texts, "weights": weights, "offsets": offsets, "label_offsets": self.labels.offsets}
        sizes = np.array([self.words.vocabulary, self.trained])
        words = {"seen": self.words.seen, "factors": self.words.factors, "labels": self.labels.values}
        return write_arrays(url, FILE, {"sizes": sizes, **arrays, **words})
