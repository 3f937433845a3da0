"""Named tensors in a safetensors file, written as they lie in memory: no second copy, whatever their dtype."""

import hashlib
import json
import struct
from collections.abc import Mapping

import torch
from safetensors.torch import load

from schemas import storage
from schemas.manifest import Shard, check_shard
from schemas.storage import join

_PIECE = 1 << 26  # bytes written and hashed at a time
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(url: str, name: str, rows: int, tensors: Mapping[str, torch.Tensor]) -> Shard:
    """Publish `tensors` as the file `name` under the prefix `url`; its entry says that it holds `rows`.

    The format of safetensors: the length of a JSON header in 8 bytes, the header, padded to 8, and the values of one
    tensor after the other, the widest dtype first. Raises StorageError.
    """
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {}, 0
    for key, value in ordered:
        size = value.numel() * value.element_size()
        header[key] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with storage.writing(join(url, name)) as path, open(path, "wb") as out:

        def write(data: bytes | memoryview) -> None:
            digest.update(data)
            out.write(data)

        write(struct.pack("<Q", len(text)) + text)
        for _, value in ordered:
            data = _bytes_of(value)
            for start in range(0, len(data), _PIECE):
                write(data[start : start + _PIECE])
    return Shard(path=name, rows=rows, bytes=8 + len(text) + end, sha256=digest.hexdigest())


def read_tensors(url: str, shard: Shard, remedy: str) -> dict[str, torch.Tensor]:
    """Read the tensors of one file under the prefix `url`. Raises TableError, which ends with `remedy`."""
    return load(check_shard(join(url, shard.path), shard, remedy))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the values of `tensor`, row by row."""
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return values.view(torch.uint8).numpy().data if len(values) else memoryview(b"")
