"""Text embedding models, which workers load once per process."""

import functools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from pipelines.runners.local import for_workers
from schemas.arrow import DenseModel, TextEmbedder, dense_type
from schemas.errors import InputError
from schemas.process import cores
from schemas.shard_files.parquet import matrix_array
from trainer.device import open_device
from trainer.encoders.texts import TextFiles, TextModel, choose_compute

T = TypeVar("T")
_AUTO = "auto"  # device and number type for dense vectors


def once_a_process(load: Callable[..., T]) -> Callable[..., T]:
    """Wrap `load` so that a process loads a model once for all threads and shards, and releases the previous model."""
    lock, loaded = threading.Lock(), dict[tuple[Any, ...], T]()

    @functools.wraps(load)
    def shared(*named: Any) -> T:
        with lock:
            if named not in loaded:
                loaded.clear()
                loaded[named] = load(*named)
            return loaded[named]

    return shared


@once_a_process
def load_texts_model(name: str, digest: str, device: str, compute: str, prompt: str) -> TextModel:
    """Open a text model. Raises InputError if the model does not have this digest."""
    files = TextFiles.find(name)
    if files.digest != digest:
        raise InputError(
            f"{name}: the model's files differ between a worker and the launching process. Give all machines the same "
            "files."
        )
    return files.open(open_device(device), compute, prompt)


def find_dense_model(name: str, beam_options: Sequence[str] = ()) -> DenseModel:
    """Return the text model `name` in the form that a data set records, with its own prompts. Raises InputError."""
    name = for_workers(beam_options, name) if os.path.isdir(name) else name
    files = TextFiles.find(name)
    queries, labels = (files.prompt(what, None) for what in ("queries", "documents"))
    return DenseModel(name, files.digest, queries, labels, choose_compute(_AUTO, open_device(_AUTO)))


def dimension_of(model: DenseModel) -> int:
    """Return d, the dimension of the model's vectors. Raises InputError."""
    return int(_embed(model.embedder("queries"), [""]).shape[1])


def dense_column(embedder: TextEmbedder, texts: pa.Array, dimension: int, threads: int = 0) -> pa.Array:
    """Return the dense vectors [d] of `texts`, computed on `threads` threads (0: one per core). Raises InputError."""
    x = _embed(embedder, texts.to_pylist(), threads or cores()) if len(texts) else np.empty((0, dimension), np.float32)
    vectors = narrow(x, "float16", f"{embedder.name}: the vector of a text", "Choose another model.")
    return matrix_array(vectors, dense_type(dimension).value_type)


def narrow(x: np.ndarray, dtype: str, what: str, remedy: str) -> np.ndarray:
    """Return x [B, D] as `dtype`. Raises InputError that names `what` if a value does not fit."""
    with np.errstate(over="ignore"):
        narrowed = x.astype(dtype)
    if not np.isfinite(narrowed).all():
        raise InputError(f"{what} has a value of {np.abs(x).max():g}, which does not fit into {dtype}. {remedy}")
    return narrowed


def _embed(by: TextEmbedder, texts: list[str], threads: int = 1) -> np.ndarray:
    return load_texts_model(by.name, by.digest, _AUTO, by.compute, by.prompt).embed(texts, threads)
