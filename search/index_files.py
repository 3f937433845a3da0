"""Faiss indexes as files that outlive the process which built them."""

import faiss
import numpy as np

from schemas import storage
from schemas.errors import TableError
from schemas.manifest import Shard, check_shard, describe_file
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
        return describe_file(path, name, len(block.vectors))


def read_index(url: str, shard: Shard) -> faiss.Index:
    """Read the index in a file under `url` and compare its checksum. Raises TableError."""
    return faiss.deserialize_index(np.frombuffer(check_shard(url, shard), np.uint8))


def load_index(path: str) -> faiss.Index:
    """Read the index in a local file, whose checksum was compared. Raises TableError."""
    try:
        return faiss.read_index(path)
    except RuntimeError as error:
        raise TableError(f"{path}: not an index that this Faiss reads: {error}. Export the run again.") from None
