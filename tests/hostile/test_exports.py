"""Exports whose author sealed what he liked: refused by name, and nothing of them is unpickled or predicted with."""

import hashlib
import json
import os
import pickle
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import extremis
from tests.hostile.outcome import check_message, listing, run
from tests.hostile.test_manifests import CHANGES, PARAMETERS, VALUES, Change, change, parameter

VECTORS, ENCODER, LABELS, TOKENIZER = "vectors/part", "encoder/", "labels/part", "encoder/tokenizer.json"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("bomb-went-off",)


def tensors(header: Any, data: bytes = b"") -> bytes:
    """A safetensors file with any header."""
    content = json.dumps(header).encode() if not isinstance(header, bytes) else header
    return struct.pack("<Q", len(content)) + content + data


def table(**columns: Any) -> bytes:
    out = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), out)
    return out.getvalue().to_pybytes()


FLOATS = np.zeros((4, 8), np.float32).tobytes()
FILES: dict[str, tuple[str, bytes | Callable[[bytes], bytes]]] = {
    "vectors: a pickle": (VECTORS, pickle.dumps(Bomb())),
    "vectors: nothing": (VECTORS, b""),
    "vectors: a header of 2^63 bytes": (VECTORS, struct.pack("<Q", 1 << 63)),
    "vectors: a header of 99 MB": (VECTORS, struct.pack("<Q", 99_000_000) + b" " * 1000),
    "vectors: a header of brackets": (VECTORS, tensors(b"[" * 100_000)),
    "vectors: a header of numbers": (VECTORS, tensors(b"1" * 100_000)),
    "vectors: no header": (VECTORS, tensors({})),
    "vectors: past the end": (
        VECTORS,
        tensors({"weight": {"dtype": "F32", "shape": [9, 9], "data_offsets": [0, 324]}}),
    ),
    "vectors: a shape of 2^60": (
        VECTORS,
        tensors({"weight": {"dtype": "F32", "shape": [1 << 60, 8], "data_offsets": [0, 128]}}, FLOATS),
    ),
    "vectors: fewer rows": (
        VECTORS,
        tensors({"weight": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}, FLOATS),
    ),
    "vectors: one dimension": (
        VECTORS,
        tensors({"weight": {"dtype": "F32", "shape": [32], "data_offsets": [0, 128]}}, FLOATS),
    ),
    "vectors: another type": (
        VECTORS,
        tensors({"weight": {"dtype": "I64", "shape": [2, 8], "data_offsets": [0, 128]}}, FLOATS),
    ),
    "vectors: another name": (
        VECTORS,
        tensors({"w": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}, FLOATS),
    ),
    "vectors: cut": (VECTORS, lambda whole: whole[:-7]),
    "encoder: a pickle": ("encoder/model", pickle.dumps(Bomb())),
    "encoder: nothing": ("encoder/model", b""),
    "encoder: no tensors": ("encoder/model", tensors({})),
    "encoder: another shape": (
        "encoder/model",
        tensors({"weight": {"dtype": "F32", "shape": [4, 8], "data_offsets": [0, 128]}}, FLOATS),
    ),
    "tokenizer: nothing": (TOKENIZER, b""),
    "tokenizer: no JSON": (TOKENIZER, b"{"),
    "tokenizer: an empty object": (TOKENIZER, b"{}"),
    "tokenizer: not UTF-8": (TOKENIZER, b"\xff\xfe"),
    "tokenizer: deep": (TOKENIZER, b"[" * 100_000),
    "tokenizer: another model": (TOKENIZER, b'{"model": {"type": "Nothing"}}'),
    "labels: no Parquet": (LABELS, b"x" * 100),
    "labels: nothing": (LABELS, b""),
    "labels: fewer": (LABELS, table(label_id=[0], key=["a"], text=["a"], frequency=[1])),
    "labels: no key": (LABELS, table(label_id=[0])),
    "labels: another type of key": (LABELS, table(label_id=[0], key=[[1]], text=["a"], frequency=[1])),
    "labels: a footer of 4 GB": (LABELS, b"PAR1" + b"\xff\xff\xff\xff" + b"PAR1"),
    "labels: cut": (LABELS, lambda whole: whole[:-20]),
}


def copy(source: Path, folder: Path) -> Path:
    shutil.copytree(source / "export", folder / "export")
    (folder / "texts.txt").write_text("a landscape\n")
    return folder / "export"


def predict(folder: Path, *words: str, options: tuple[str, ...] = ()) -> None:
    before = listing(folder)
    run("predict", folder / "export", folder / "texts.txt", folder / "out.jsonl", *options, words=words)
    assert listing(folder) == before
    assert not Path("bomb-went-off").exists()


def message_of(loop: Path, folder: Path, alter: Change) -> str:
    """Change the manifest of a copy of the export, and predict; return the message of what refuses it, or nothing."""
    shutil.rmtree(folder / "export", ignore_errors=True)
    change(copy(loop, folder), alter)
    try:
        extremis.load(str(folder / "export")).predict(["a landscape"])
    except extremis.ExtremisError as error:
        check_message(f"error: {error}")
        return str(error)
    return ""


def sealed_again(folder: Path, name: str) -> Change:
    """Replace the content of a file of the export, and seal the manifest."""
    start, content = FILES[name]

    def alter(body: dict[str, Any]) -> None:
        path = next(entry["path"] for entry in body["shards"] if entry["path"].startswith(start))
        place = folder / "export" / path
        place.write_bytes(content if isinstance(content, bytes) else content(place.read_bytes()))
        sealed(folder / "export", path)(body)

    return alter


def sealed(export: Path, path: str) -> Change:
    """State a file as it is by now."""

    def alter(body: dict[str, Any]) -> None:
        entry, data = next(each for each in body["shards"] if each["path"] == path), (export / path).read_bytes()
        entry.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest(), checksums=None)

    return alter


# Rows of an export's shards say nothing, and it has no row groups.
UNREAD = {"row groups", "rows", "id range", "checksums", "text for columns", "a number for a parent", "deep", "parent"}
SEALED = {name: alter for name, alter in CHANGES.items() if not any(word in name for word in UNREAD)}
SEALED["another kind"] = lambda body: body.update(kind="data")


def test_a_file_that_was_sealed_again(loop: tuple[Path, Any], tmp_path: Path) -> None:
    for name in FILES:
        assert str(tmp_path) in message_of(loop[0], tmp_path, sealed_again(tmp_path, name)), name
    assert not Path("bomb-went-off").exists()


def test_a_manifest_that_was_sealed_again(loop: tuple[Path, Any], tmp_path: Path) -> None:
    for name, alter in SEALED.items():
        assert str(tmp_path) in message_of(loop[0], tmp_path, alter), name


def test_a_parameter_that_is_none(loop: tuple[Path, Any], tmp_path: Path) -> None:
    for name in (*PARAMETERS["export"], "shortlist", "index"):
        for value in VALUES.values():
            assert str(tmp_path) in message_of(loop[0], tmp_path, parameter(name, value)), f"{name} = {value}"


def test_an_encoder_that_is_none(loop: tuple[Path, Any], tmp_path: Path) -> None:
    """Other sections of the recipe are not read: an export has what they made."""
    for value in VALUES.values():
        words = message_of(loop[0], tmp_path, lambda body: body["parameters"]["recipe"].update(encoder=value))
        assert "recipe" in words, value
        assert "encoder" in words, value


@pytest.mark.parametrize(
    "name",
    ["vectors: a pickle", "encoder: a pickle", "vectors: a header of 2^63 bytes", "tokenizer: deep", "labels: cut"],
)
def test_a_command_tells_of_a_file(name: str, loop: tuple[Path, Any], tmp_path: Path) -> None:
    change(copy(loop[0], tmp_path), sealed_again(tmp_path, name))
    predict(tmp_path, str(tmp_path))


@pytest.mark.parametrize("value", VALUES)
def test_calibrations_that_are_none(value: str, loop: tuple[Path, Any], tmp_path: Path) -> None:
    change(copy(loop[0], tmp_path), parameter("calibration", VALUES[value]))
    predict(tmp_path, options=("--precision", "0.5"))


def test_what_is_no_calibration_and_no_number_of_points(loop: tuple[Path, Any], tmp_path: Path) -> None:
    """Each is refused when it is read, or it is none: predictions are never of half a curve."""
    curves = [
        {"scores": [0, 1], "probabilities": [0, 2]},
        {"scores": [1, 0], "probabilities": [0, 1]},
        {"scores": [0], "probabilities": []},
        {"scores": ["1e999"], "probabilities": [0.5]},
    ]
    for value in (*VALUES.values(), *curves):
        assert "calibration" in message_of(loop[0], tmp_path, parameter("calibration", {"curve": value})), value
    for value in VALUES.values():
        message_of(loop[0], tmp_path, parameter("training_points", value))
        model = extremis.load(str(tmp_path / "export"))
        if value in ("x", [1]):
            with pytest.raises(extremis.TableError, match=re.escape(str(tmp_path))):
                model.predict("")
        else:
            assert all(np.isfinite(label.score) for label in model.predict("")[0].labels), value


def test_files_of_an_export_have_one_mode(loop: tuple[Path, Any]) -> None:
    modes = {path.stat().st_mode & 0o777 for path in (loop[0] / "export").rglob("*") if path.is_file()}
    umask = os.umask(0o022)
    os.umask(umask)
    assert modes == {0o666 & ~umask}
