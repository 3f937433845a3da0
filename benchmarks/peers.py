"""Stock loaders that read the same rows as records with their negatives inside: what they are given, how they run.

Each shuffles as it does by itself, within `buffer` samples where it has a buffer, and makes batches in its worker
processes, with a collate function that joins the bytes of all samples and decodes them at once.
"""

import importlib.machinery
import os
import sys
import tarfile
import types
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DataLoader

from benchmarks.batches import SIZE, Ready, assemble
from benchmarks.rows import World
from schemas.parquet import list_column, matrix_column

FILES = 8
_FIELDS = ("tokens", "positives", "hard")
Record = tuple[int, bytes, bytes, bytes]


class WebDataset:
    """A tar of three members a sample, raw bytes."""

    module = "webdataset"

    @staticmethod
    def write(folder: Path, records: Iterator[Record], count: int) -> None:
        for path, some in _files(folder, "tar", records, count):
            with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as out:
                for row, *values in some:
                    for field, value in zip(_FIELDS, values, strict=True):
                        entry = tarfile.TarInfo(f"{row:010d}.{field}")
                        entry.size = len(value)
                        out.addfile(entry, BytesIO(value))

    @staticmethod
    def load(folder: Path, workers: int, buffer: int) -> Iterable[Ready]:
        import webdataset

        files = sorted(map(str, folder.glob("*.tar")))
        samples = webdataset.WebDataset(files, shardshuffle=len(files), seed=0, empty_check=False)
        batches = samples.shuffle(buffer).batched(SIZE, collation_fn=WebDataset.collate)
        return webdataset.WebLoader(batches, batch_size=None, num_workers=workers)

    @staticmethod
    def collate(samples: Sequence[dict[str, Any]]) -> Ready:
        return _collate([int(one["__key__"]) for one in samples], *([one[f] for one in samples] for f in _FIELDS))


class MosaicML:
    """MDS shards with three columns of raw bytes, and the row's number."""

    module = "streaming"

    @staticmethod
    def write(folder: Path, records: Iterator[Record], count: int) -> None:
        _stand_in_for_torchvision()
        from streaming import MDSWriter

        columns = {"row": "int", **dict.fromkeys(_FIELDS, "bytes")}
        with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 22) as out:
            for row, *values in records:
                out.write({"row": row, **dict(zip(_FIELDS, values, strict=True))})

    @staticmethod
    def load(folder: Path, workers: int, buffer: int) -> Iterable[Ready]:
        _stand_in_for_torchvision()
        from streaming import StreamingDataset
        from streaming.base.util import clean_stale_shared_memory

        clean_stale_shared_memory()
        samples = StreamingDataset(local=str(folder), shuffle=True, batch_size=SIZE)
        return DataLoader(samples, batch_size=SIZE, num_workers=workers, collate_fn=MosaicML.collate)

    @staticmethod
    def collate(samples: Sequence[dict[str, Any]]) -> Ready:
        return _collate([one["row"] for one in samples], *([one[f] for one in samples] for f in _FIELDS))


class HuggingFace:
    """Parquet files with three binary columns, and the row's number."""

    module = "datasets"

    @staticmethod
    def write(folder: Path, records: Iterator[Record], count: int) -> None:
        for path, some in _files(folder, "parquet", records, count):
            columns = zip(("row", *_FIELDS), zip(*some, strict=True), strict=True)
            pq.write_table(pa.table({name: list(values) for name, values in columns}), path, row_group_size=1024)

    @staticmethod
    def load(folder: Path, workers: int, buffer: int) -> Iterable[Ready]:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import datasets

        files = sorted(map(str, folder.glob("*.parquet")))
        cache = str(folder / "cache")
        samples = datasets.load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=cache)
        samples = samples.shuffle(seed=0, buffer_size=buffer)
        return DataLoader(samples, batch_size=SIZE, num_workers=workers, collate_fn=HuggingFace.collate)

    collate = MosaicML.collate


PEERS = {"webdataset": WebDataset, "mosaicml-streaming": MosaicML, "HF datasets": HuggingFace}


def records(world: World, count: int) -> Iterator[Record]:
    """The first `count` rows, each as its number and the bytes of its tokens, positives and negatives."""
    for points, mined in world.pieces(0, count):
        ids = points["query_id"].to_numpy()
        (tokens, starts), (positives, firsts) = list_column(points, "input_ids"), list_column(points, "label_ids")
        hard = matrix_column(mined, "label_ids")
        for number, row in enumerate(ids.tolist()):
            own = positives[firsts[number] : firsts[number + 1]]
            yield row, tokens[starts[number] : starts[number + 1]].tobytes(), own.tobytes(), hard[number].tobytes()


def _collate(rows: list[int], tokens: list[bytes], positives: list[bytes], hard: list[bytes]) -> Ready:
    """The batch of samples: all bytes joined and decoded at once, then planned and padded as ours are."""
    return assemble(
        np.array(rows),
        _ragged(tokens, np.uint16),
        _ragged(positives, np.int32),
        np.frombuffer(bytearray().join(hard), np.int32).reshape(len(rows), -1),
    )


def _ragged(pieces: list[bytes], type: type[np.generic]) -> tuple[np.ndarray, np.ndarray]:
    values = np.frombuffer(bytearray().join(pieces), type)
    return values, np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]) // values.itemsize


def _files(
    folder: Path, extension: str, records: Iterator[Record], count: int
) -> Iterator[tuple[Path, Iterator[Record]]]:
    """FILES paths, and the records of each."""
    folder.mkdir(parents=True, exist_ok=True)
    each = -(-count // FILES)
    for number in range(FILES):
        size = min(each, count - number * each)
        yield folder / f"part-{number:05d}.{extension}", (next(records) for _ in range(size))


def _stand_in_for_torchvision() -> None:
    """Names that mosaicml-streaming imports from torchvision and uses for images alone; it does not import without.

    A torchvision that fits a torch without CUDA is not on the package index: the one there fails at import.
    """
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        pass
    else:
        return
    names = {"torchvision": {}, "torchvision.datasets": {"VisionDataset": object}, "torchvision.transforms": {}}
    names["torchvision.transforms.functional"] = {"to_tensor": None}
    for name, content in names.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(content)
        sys.modules[name] = module
