"""Texts of rows: token ids decoded with the data's tokenizer, label ids replaced by their texts."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from extremis.console import without_controls
from schemas.layout import DataLayout
from schemas.table import Table

FEATURES_SHOWN = 12


def clean(text: str, longest: int | None = None) -> str:
    """Return `text` on one line, without control characters, cut to `longest` characters."""
    text = without_controls(" ".join(text.split()))
    return text if longest is None or len(text) <= longest else text[: longest - 1] + "…"


class TextDecoder:
    """Decoder of texts by the tokenizer and the labels of DATA. Raises TableError where DATA is not finished."""

    def __init__(self, data: DataLayout) -> None:
        self._data = data
        Table.open(data.root, "data")
        self._labels: Table | None = None
        self._tokenizer: Any = None

    def texts(self, rows: pa.Table, longest: int | None = None) -> list[str]:
        """Return the text of each of `rows` (queries or labels): the stored one, else that of its tokens."""
        names = rows.column_names
        if "text" in names:
            texts = rows.column("text").to_pylist()
        elif "input_ids" in names:
            texts = self._decode(rows.column("input_ids").to_pylist())
        elif "feature_ids" in names:
            pairs = zip(rows.column("feature_ids").to_pylist(), rows.column("feature_values").to_pylist(), strict=True)
            texts = [_format_features(ids, values) for ids, values in pairs]
        else:
            texts = [""] * rows.num_rows
        return [clean(text, longest) for text in texts]

    def labels(self, ids: Iterable[int] | np.ndarray, longest: int | None = None) -> dict[int, str]:
        """Map label ids to the labels' texts, or to keys where a text is empty. Ids below 0 are pads and left out."""
        return {
            row["label_id"]: clean(row["text"], longest) or clean(str(row["key"]), longest)
            for row in self.label_rows(ids)
        }

    def label_rows(self, ids: Iterable[int] | np.ndarray) -> list[dict[str, Any]]:
        """Read label_id, key, text and frequency of labels, ascending; ids below 0 are pads and left out."""
        if self._labels is None:
            self._labels = Table.open(self._data.labels, "labels")
        unique = np.unique(np.fromiter(ids, np.int64))
        unique = unique[(unique >= 0) & (unique < self._labels.rows)]
        rows: list[dict[str, Any]] = self._labels.rows_at(unique, ["label_id", "key", "text", "frequency"]).to_pylist()
        return rows

    def _decode(self, ids: list[list[int]]) -> list[str]:
        from pipelines.sharding.tokenizer import FILE, open_tokenizer

        if self._tokenizer is None:
            files = Table.open(self._data.tokenizer, "tokenizer").read_files()
            self._tokenizer = open_tokenizer(files[FILE], self._data.tokenizer)
            if self._tokenizer.decoder is None and type(self._tokenizer.model).__name__ == "WordPiece":
                from tokenizers.decoders import WordPiece

                self._tokenizer.decoder = WordPiece()  # puts the pieces of a word together
        return list(self._tokenizer.decode_batch(ids, skip_special_tokens=True))


def input_columns(names: Sequence[str]) -> list[str]:
    """Return the columns of a table that `TextDecoder.texts` needs."""
    if "text" in names:
        return ["text"]
    return ["input_ids"] if "input_ids" in names else [name for name in names if name.startswith("feature_")]


def _format_features(ids: list[int], values: list[float]) -> str:
    """List the features with the largest values: there is no text."""
    order = np.argsort(-np.abs(np.asarray(values, np.float64)), kind="stable")[:FEATURES_SHOWN]
    shown = " ".join(f"{ids[i]}:{values[i]:.3g}" for i in order.tolist())
    return f"features {shown}{' …' if len(ids) > FEATURES_SHOWN else ''}"
