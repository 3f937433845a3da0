"""Columns of every table, and the dense column with its model."""

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib.abc import MetaPathFinder
from typing import Any, NamedTuple

import pyarrow as pa

from schemas.errors import FRONT_END, InputError, TableError


class _NoPandas(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name, name=name)


if os.environ.get(FRONT_END) == "shell" and "pandas" not in sys.modules:
    # Arrow would load pandas for its first array, in 0.3 s. A command has no data frames; conversions still load it.
    sys.meta_path.insert(0, _NoPandas())
    pa.array([])
    del sys.meta_path[0]


def token_type(vocabulary: int) -> pa.DataType:
    """Return uint16 if every token id in [0, vocabulary) fits, else uint32."""
    return pa.uint16() if vocabulary <= 1 << 16 else pa.uint32()


def label_type(labels: int) -> pa.DataType:
    """Return int32 if every label id in [0, labels) fits, else int64."""
    return pa.int32() if labels <= 1 << 31 else pa.int64()


def queries(
    tokens: pa.DataType | None,
    labels: pa.DataType,
    *,
    text: bool = False,
    filters: bool = False,
    features: bool = False,
    dense: int = 0,
    titles: bool = False,
) -> pa.Schema:
    """One point per row. `filter_label_ids` are labels to remove from predictions before top-k; positives are kept.

    An encoder reads one or more of `input_ids` (absent if `tokens` is None), `features`, and the vector `dense` [d]
    (absent if 0). `titles`: with TITLES beside `input_ids`. Raises ValueError if a row would have no input.
    """
    inputs = _inputs(tokens, features, dense, titles)
    fields = {"query_id": pa.int64(), "key": pa.string(), **inputs, "label_ids": pa.list_(labels)}
    if filters:
        fields["filter_label_ids"] = pa.list_(labels)
    if text:
        fields["text"] = pa.string()
    return without_nulls(fields)


def labels(tokens: pa.DataType | None, *, features: bool = False, dense: int = 0, titles: bool = False) -> pa.Schema:
    """One label per row. The label ids are [0, L) without gaps; `frequency` counts the training points with the label.

    The other arguments mean the same as in `queries`. Raises ValueError if a row would have no input.
    """
    names = {"label_id": pa.int64(), "key": pa.string(), "text": pa.string()}
    return without_nulls({**names, **_inputs(tokens, features, dense, titles), "frequency": pa.int64()})


def rejects() -> pa.Schema:
    """One rejected input row: file, line (from 1), the reason, and the content."""
    return without_nulls({"source": pa.string(), "line": pa.int64(), "reason": pa.string(), "detail": pa.string()})


def embeddings(dimension: int, dtype: str = "float16") -> pa.Schema:
    """Embeddings, aligned with the queries: the same shards, row groups and rows. `vector` is [D]."""
    return _vectors("query_id", dimension, dtype)


def vectors(dimension: int, dtype: str = "float32") -> pa.Schema:
    """Classifier rows or label embeddings of labels [0, L), in blocks of rows. `vector` is [D]."""
    return _vectors("label_id", dimension, dtype)


def texts(dimension: int, dtype: str = "float16") -> pa.Schema:
    """Embedded texts with their keys; `query_id` is the row in [0, N), `vector` is [D]."""
    return without_nulls({"query_id": pa.int64(), "key": pa.string(), "text": pa.string()}).append(
        embeddings(dimension, dtype).field("vector")
    )


def negatives(width: int, labels: pa.DataType, *, teacher: bool = False) -> pa.Schema:
    """Negatives, aligned with the queries. `label_ids` [K] is best first, padded at the end with -1; `scores` is [K].

    With label ranges, the K columns form G equal groups, one per range. `teacher` [K] contains a cross-encoder's
    scores. Scores are float32: in float16, neighbours tie (docs/decisions/0048).
    """
    scores = pa.list_(pa.float32(), width)
    types = {"query_id": pa.int64(), "label_ids": pa.list_(labels, width), "scores": scores}
    return without_nulls(types | ({"teacher": scores} if teacher else {}))


def without_nulls(types: Mapping[str, pa.DataType]) -> pa.Schema:
    """Return a schema whose columns may not contain nulls."""
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in types.items()])


def dense_type(dimension: int) -> pa.DataType:
    """Return the type of a column of dense vectors [d]."""
    return pa.list_(pa.float16(), dimension)


def _inputs(tokens: pa.DataType | None, features: bool, dense: int, titles: bool) -> dict[str, pa.DataType]:
    """Return the input columns: token ids; sparse features (ids in [0, F), sorted and unique per row); a vector."""
    if tokens is None and not features and not dense:
        raise ValueError("a row needs token ids, features or a vector; got none of the three")
    types = {} if tokens is None else {"input_ids": pa.list_(tokens), **({TITLES: pa.int32()} if titles else {})}
    if features:
        types |= {"feature_ids": pa.list_(pa.int32()), "feature_values": pa.list_(pa.float32())}
    return types | ({"dense": dense_type(dense)} if dense else {})


def _vectors(key: str, dimension: int, dtype: str) -> pa.Schema:
    types = {"float16": pa.float16(), "float32": pa.float32()}
    if dtype not in types:
        raise InputError(f"expected a dtype of vectors among {sorted(types)}, got {dtype!r}.")
    return without_nulls({key: pa.int64(), "vector": pa.list_(types[dtype], dimension)})


TITLES = "title_tokens"  # how many of a row's `input_ids` belong to the first line of its text, which is its title
DENSE, DENSE_MODEL = "dense", "dense_model"  # parameters of DATA and of exports: the dimension d, and the model


class TextEmbedder(NamedTuple):
    """Specification of an embedder: a model's name for `TextFiles`, the digest of its files, a dtype, and a prompt."""

    name: str
    digest: str
    compute: str
    prompt: str


@dataclass(frozen=True)
class DenseModel:
    """Model that computed the dense vectors; `queries` and `labels`: the prompts for query texts and label texts."""

    name: str
    digest: str
    queries: str
    labels: str
    compute: str

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], url: str) -> "DenseModel | None":
        """Read the model from the manifest at `url`; None if the user supplied the vectors. Raises TableError."""
        stated = parameters.get(DENSE_MODEL)
        if stated is None:
            return None
        names = {field.name for field in fields(cls)}
        if not isinstance(stated, Mapping) or {*stated} != names or not {*map(type, stated.values())} <= {str}:
            raise TableError(f"{url}: the parameter {DENSE_MODEL!r} lacks {', '.join(sorted(names))}.")
        return cls(**stated)

    def as_json(self) -> dict[str, str]:
        """Return the fields for a manifest."""
        return asdict(self)

    def identity(self) -> dict[str, str]:
        """Return the fields that determine the vectors: all fields except the name."""
        return {name: value for name, value in self.as_json().items() if name != "name"}

    def embedder(self, what: str) -> TextEmbedder:
        """Return the embedder for the texts of `what`, which is queries or labels."""
        return TextEmbedder(self.name, self.digest, self.compute, getattr(self, what))
