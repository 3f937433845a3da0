"""Faiss indexes as files that outlive the process which built them."""

from pathlib import Path

import faiss
import numpy as np

from schemas import storage
from schemas.errors import TableError
from schemas.manifest import Shard, check_shard
from schemas.storage import join
from search.block import Block


def write_index(url: str, name: str, block: Block) -> Shard:
    """Write the block's index, a flat one where it has none, as the file `name` under `url`. Raises StorageError."""
    index = block.index
    if index is None:
        index = faiss.IndexFlatIP(block.vectors.shape[1])
        index.add(block.vectors)
    with storage.writing(join(url, name)) as path:
        faiss.write_index(index, path)
        digest, size = storage.file_sha256(path), Path(path).stat().st_size
    return Shard(path=name, rows=len(block.vectors), bytes=size, sha256=digest)


def read_index(url: str, shard: Shard) -> faiss.Index:
    """Read the index in a file under `url` and compare its checksum. Raises TableError."""
    return faiss.deserialize_index(np.frombuffer(check_shard(join(url, shard.path), shard), np.uint8))


def load_index(path: str) -> faiss.Index:
    """Read the index in a local file, whose checksum was compared. Raises TableError."""
    try:
        return faiss.read_index(path)
    except RuntimeError as error:
        raise TableError(f"{path}: not an index that this Faiss reads: {error}. Export the run again.") from None
