"""Other loaders, which read the same rows with negatives included: writes their files, and runs the loaders.

Each loader shuffles in its usual way, within `buffer` samples if it has a buffer, and makes batches in its workers.
A record contains one row, in the library's own array types, or as raw bytes that a collate function parses, which is
more work for a user and less for the library.
"""

import importlib.machinery
import itertools
import os
import sys
import tarfile
import types
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DataLoader

from benchmarks.common.joined_tables import JoinedTables
from benchmarks.common.training_batch import SIZE, TensorBatch, assemble
from schemas.shard_files import webdataset as tars
from schemas.shard_files.parquet import list_array, list_column, matrix_column

FILES = 8
_GROUP = 1024
_HEAD = 4  # bytes of a raw record's head: numbers of positives and negatives, uint16 each; ids and tokens follow


class Peer(Protocol):
    def write(self, folder: Path, tables: JoinedTables, rows: int) -> None:
        """Write the first `rows` rows."""

    def load(self, folder: Path, workers: int, buffer: int) -> Iterable[TensorBatch]:
        """Return shuffled batches."""


@dataclass(frozen=True)
class WebDataset:
    """Tars with three .npy members per sample, as from our own tar sink, or with one member of raw bytes."""

    raw: bool

    def write(self, folder: Path, tables: JoinedTables, rows: int) -> None:
        for number, piece in enumerate(_pieces(tables, rows)):
            with (folder / f"part-{number:05d}.tar").open("wb") as out:
                if self.raw:
                    _write_tar(out, piece)
                else:
                    out.writelines(tars.encode(piece, _GROUP))

    def load(self, folder: Path, workers: int, buffer: int) -> Iterable[TensorBatch]:
        import webdataset

        files = sorted(map(str, folder.glob("*.tar")))
        samples = webdataset.WebDataset(files, shardshuffle=len(files), seed=0, empty_check=False).shuffle(buffer)
        if not self.raw:
            samples = samples.decode()
        batches = samples.batched(SIZE, collation_fn=self.collate)
        return webdataset.WebLoader(batches, batch_size=None, num_workers=workers)

    def collate(self, samples: Sequence[dict[str, Any]]) -> TensorBatch:
        rows = [int(sample["__key__"]) for sample in samples]
        if self.raw:
            return _of_bytes(rows, [sample["bin"] for sample in samples])
        names = ("input_ids.npy", "label_ids.npy", "hard.npy")
        return _of_arrays(rows, *([sample[name] for sample in samples] for name in names))


@dataclass(frozen=True)
class MosaicML:
    """MDS shards with the row's number and three columns of arrays, or one column of raw bytes."""

    raw: bool

    def write(self, folder: Path, tables: JoinedTables, rows: int) -> None:
        _stand_in_for_torchvision()
        from streaming import MDSWriter

        arrays = {"tokens": "ndarray:uint16", "positives": "ndarray:int32", "hard": f"ndarray:int32:{tables.width}"}
        columns = {"row": "int", **({"record": "bytes"} if self.raw else arrays)}
        with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 22) as out:
            for piece in _pieces(tables, rows):
                for row, record in _records(piece):
                    values = _open(record)
                    content = {"record": record} if self.raw else dict(zip(arrays, values, strict=True))
                    out.write({"row": row, **content})

    def load(self, folder: Path, workers: int, buffer: int) -> Iterable[TensorBatch]:
        _stand_in_for_torchvision()
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        samples = StreamingDataset(local=str(folder), shuffle=True, batch_size=SIZE)
        return DataLoader(samples, batch_size=SIZE, num_workers=workers, collate_fn=self.collate)

    def collate(self, samples: Sequence[dict[str, Any]]) -> TensorBatch:
        rows = [sample["row"] for sample in samples]
        if self.raw:
            return _of_bytes(rows, [sample["record"] for sample in samples])
        return _of_arrays(rows, *([sample[name] for sample in samples] for name in ("tokens", "positives", "hard")))


@dataclass(frozen=True)
class HuggingFace:
    """Parquet files with the row's number and list columns, or one column of raw bytes."""

    raw: bool

    def write(self, folder: Path, tables: JoinedTables, rows: int) -> None:
        for number, piece in enumerate(_pieces(tables, rows)):
            if self.raw:
                some, raw = zip(*_records(piece), strict=True)
                piece = pa.table({"row": list(some), "record": pa.array(raw, pa.binary())})
            pq.write_table(piece, folder / f"part-{number:05d}.parquet", row_group_size=_GROUP)

    def load(self, folder: Path, workers: int, buffer: int) -> Iterable[TensorBatch]:
        return DataLoader(self._open(folder, buffer), batch_size=SIZE, num_workers=workers, collate_fn=self.collate)

    def collate(self, samples: Sequence[dict[str, Any]]) -> TensorBatch:
        if self.raw:
            return _of_bytes([sample["row"] for sample in samples], [sample["record"] for sample in samples])
        lists = ([sample[name] for sample in samples] for name in ("input_ids", "label_ids", "hard"))
        return _of_lists([sample["query_id"] for sample in samples], *lists)

    @staticmethod
    def _open(folder: Path, buffer: int) -> Any:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import datasets

        files = sorted(map(str, folder.glob("*.parquet")))
        cache = str(folder / "cache")
        samples = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=cache)
        return samples.shuffle(seed=0, buffer_size=buffer)


class HuggingFaceArrow(HuggingFace):
    """The same files with list columns, read as one Arrow table per batch, without records."""

    def load(self, folder: Path, workers: int, buffer: int) -> Iterable[TensorBatch]:
        batches = self._open(folder, buffer).with_format("arrow").batch(SIZE)
        return DataLoader(batches, batch_size=None, num_workers=workers, collate_fn=self.collate_table)

    @staticmethod
    def collate_table(table: pa.Table) -> TensorBatch:
        rows = pa.table({name: table[name].combine_chunks().flatten() for name in table.column_names})
        (tokens, positives), hard = (list_column(rows, name) for name in ("input_ids", "label_ids")), rows["hard"]
        matrix = hard.combine_chunks().flatten().to_numpy().reshape(len(rows), -1)
        return assemble(rows["query_id"].to_numpy(), tokens, positives, matrix)


PEERS: dict[str, Peer] = {
    "webdataset": WebDataset(raw=False),
    "webdataset, raw bytes": WebDataset(raw=True),
    "mosaicml-streaming": MosaicML(raw=False),
    "mosaicml-streaming, raw bytes": MosaicML(raw=True),
    "HF datasets": HuggingFace(raw=False),
    "HF datasets, raw bytes": HuggingFace(raw=True),
    "HF datasets, Arrow batches": HuggingFaceArrow(raw=False),
}


def _pieces(tables: JoinedTables, rows: int) -> Iterator[pa.Table]:
    """Yield the first `rows` rows, one table per file: `query_id` and lists of tokens, positives, negatives."""
    each = -(-rows // FILES)
    for start in range(0, rows, each):
        parts = []
        for points, mined in tables.pieces(start, min(start + each, rows)):
            hard = matrix_column(mined, "label_ids")
            lists = list_array(hard.reshape(-1), np.arange(len(hard) + 1) * hard.shape[1], pa.int32())
            parts.append(points.drop_columns("key").append_column("hard", lists))
        yield pa.concat_tables(parts).combine_chunks()


def _records(piece: pa.Table) -> Iterator[tuple[int, bytes]]:
    """Yield (row number, raw bytes) of each row."""
    columns = [list_column(piece, name) for name in ("label_ids", "hard", "input_ids")]
    for number, row in enumerate(piece["query_id"].to_pylist()):
        lists = [values[offsets[number] : offsets[number + 1]] for values, offsets in columns]
        head = np.array([len(lists[0]), len(lists[1])], np.uint16)
        yield row, b"".join([head.tobytes(), *(values.tobytes() for values in lists)])


def _open(record: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tokens, positives and negatives of a raw record."""
    positives, tokens = _edges(record)
    labels = np.frombuffer(record[_HEAD:tokens], np.int32)
    count = (positives - _HEAD) // 4
    return np.frombuffer(record[tokens:], np.uint16), labels[:count], labels[count:]


def _edges(record: bytes) -> tuple[int, int]:
    """Return the ends of the positives and of the negatives in a raw record."""
    end = _HEAD + 4 * (record[0] + 256 * record[1])
    return end, end + 4 * (record[2] + 256 * record[3])


def _of_bytes(rows: list[int], records: list[bytes]) -> TensorBatch:
    """Return the batch of raw records, which are cut, joined and decoded together."""
    edges = [_edges(record) for record in records]
    together = list(zip(records, edges, strict=True))
    positives, positive_offsets = _joined([record[_HEAD:end] for record, (end, _) in together], np.int32)
    tokens, token_offsets = _joined([record[end:] for record, (_, end) in together], np.uint16)
    hard, _ = _joined([record[start:stop] for record, (start, stop) in together], np.int32)
    return assemble(np.array(rows), (tokens, token_offsets), (positives, positive_offsets), hard.reshape(len(rows), -1))


def _of_arrays(
    rows: list[int], tokens: list[np.ndarray], positives: list[np.ndarray], hard: list[np.ndarray]
) -> TensorBatch:
    ragged = ((np.concatenate(arrays), _offsets([len(row) for row in arrays])) for arrays in (tokens, positives))
    token_lists, positive_lists = ragged
    return assemble(np.array(rows), token_lists, positive_lists, np.stack(hard))


def _of_lists(
    rows: list[int], tokens: list[list[int]], positives: list[list[int]], hard: list[list[int]]
) -> TensorBatch:
    flat = itertools.chain.from_iterable
    ragged = (
        (np.fromiter(flat(lists), kind), _offsets([len(row) for row in lists]))
        for lists, kind in ((tokens, np.uint16), (positives, np.int32))
    )
    token_lists, positive_lists = ragged
    return assemble(np.array(rows), token_lists, positive_lists, np.array(hard, np.int32))


def _joined(pieces: list[bytes], kind: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    values = np.frombuffer(bytearray().join(pieces), kind)
    return values, _offsets([len(piece) for piece in pieces]) // values.itemsize


def _offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _write_tar(out: Any, piece: pa.Table) -> None:
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for row, record in _records(piece):
            entry = tarfile.TarInfo(f"{row:012d}.bin")
            entry.size = len(record)
            tar.addfile(entry, BytesIO(record))


def _stand_in_for_torchvision() -> None:
    """Define the names that mosaicml-streaming imports from torchvision, and only uses for images.

    The package index has no torchvision for a torch without CUDA; the torchvision there fails at import.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        pass
    else:
        return
    names: dict[str, dict[str, Any]] = {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": object},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
    }
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(content)
        sys.modules[name] = module
