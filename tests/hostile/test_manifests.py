"""Manifests whose author sealed what he liked: refused by name, whichever reader meets them."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.errors import ExtremisError
from schemas.layout import MANIFEST, DataLayout
from schemas.manifest import open_manifest
from tests.command import sets
from tests.hostile.outcome import check_message, listing, run
from trainer.model import DataSizes
from trainer.stream import JoinedStream, open_sources

Body = dict[str, Any]
Change = Callable[[Body], object]


def seal(folder: Path, body: Body) -> str:
    """Write a manifest whose digest is right; the digest."""
    rest = {name: value for name, value in body.items() if name not in ("digest", "commit", "seal")}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    (folder / MANIFEST).write_text(json.dumps({**rest, "digest": digest}))
    return digest


def change(folder: Path, alter: Change) -> str:
    body = json.loads((folder / MANIFEST).read_bytes())
    alter(body)
    return seal(folder, body)


def shard(**fields: Any) -> Change:
    """Change the first shard's entry."""
    return lambda body: body["shards"] and body["shards"][0].update(fields)


def put(name: str, value: Any) -> Change:
    return lambda body: body.update({name: value})


def parameter(name: str, value: Any) -> Change:
    return lambda body: body["parameters"].update({name: value})


CHANGES: dict[str, Change] = {
    "NUL in a path": shard(path="part\0.parquet"),
    "a path above": shard(path="../../x.parquet"),
    "an absolute path": shard(path="/etc/passwd"),
    "a URL for a path": shard(path="s3://bucket/x"),
    "no path": shard(path=""),
    "a number for a path": shard(path=3),
    "a billion rows": shard(rows=10**9),
    "negative rows": shard(rows=-1),
    "rows beyond 64 bits": shard(rows=10**30),
    "text for rows": shard(rows="many"),
    "negative bytes": shard(bytes=-1),
    "more bytes": shard(bytes=10**12),
    "another SHA-256": shard(sha256="0" * 64),
    "no SHA-256": shard(sha256="zz"),
    "checksums of nothing": shard(checksums="!!!!"),
    "unknown field": shard(more=1),
    "no shards": put("shards", []),
    "a shard of no rows": lambda body: [entry.update(rows=0) for entry in body["shards"]],
    "text for shards": put("shards", "x"),
    "numbers for shards": put("shards", [1, 2]),
    "text for all rows": put("rows", "many"),
    "other rows in all": put("rows", 10**9),
    "negative rows in all": put("rows", -5),
    "row groups of no rows": put("row_group_rows", 0),
    "row groups of -1 rows": put("row_group_rows", -1),
    "row groups of text": put("row_group_rows", "x"),
    "an id range of text": put("id_range", ["a", "b"]),
    "text for columns": put("columns", "x"),
    "text for parents": put("parents", "x"),
    "a parent above": put("parents", {"../x": "0" * 64}),
    "a number for a parent": put("parents", {"queries/train": 3}),
    "text for parameters": put("parameters", "x"),
    "null for parameters": put("parameters", None),
    "another kind": put("kind", "export"),
    "no kind": lambda body: body.pop("kind"),
    "another format": put("format", "x"),
    "another version": put("version", 99),
    "text for a version": put("version", "one"),
    "unknown key": put("more", {}),
    "deep": put("counters", json.loads("[" * 500 + "]" * 500)),
}
# A data set has no shards of its own.
OF_SHARDS = {
    *("NUL in a path", "a path above", "an absolute path", "a URL for a path", "no path", "a number for a path"),
    *("a billion rows", "negative rows", "rows beyond 64 bits", "text for rows", "negative bytes", "more bytes"),
    *("another SHA-256", "no SHA-256", "checksums of nothing", "unknown field", "no shards", "a shard of no rows"),
}
# Column chunks have checksums of their own, rows of a data set are its parts', no file of the tokenizer is read.
UNREAD = {("queries", "another SHA-256"), ("labels", "another SHA-256"), ("data", "other rows in all")} | {
    ("tokenizer", name)
    for name in (
        *("a billion rows", "more bytes", "another SHA-256", "no shards", "a shard of no rows", "other rows in all"),
    )
}
KINDS = {"tokenizer": "data/tokenizer", "queries": "data/queries/train", "labels": "data/labels", "data": "data"}
PARAMETERS: dict[str, tuple[str, ...]] = {
    "tokenizer": ("vocabulary",),
    "labels": ("training_points",),
    "data": ("features", "dense"),
    "export": ("vocabulary", "features", "dense", "max_tokens", "dimension", "recipe"),
}
VALUES: dict[str, Any] = {
    "text": "x",
    "a list": [1],
    "negative": -1,
    "infinite": float("inf"),
    "huge": 10**40,
    "true": True,
    "a fraction": 0.5,
}


def broken(folder: Path, kind: str, alter: Change, source: Path) -> Path:
    """Return a copy of DATA with a changed part, and with manifests that name what is there."""
    data = folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    shutil.copytree(source / "data", data)
    digest = change(folder / KINDS[kind], alter)
    if kind != "data":
        name = KINDS[kind].removeprefix("data/")
        change(data, lambda body: body["parents"].update({name: digest}))
    return data


def message_of(data: Path) -> str:
    """Read DATA as a training does, every row of it; return the message of what refuses it, or nothing."""
    layout = DataLayout(str(data))
    try:
        labels = DataSizes.of(layout).labels
        list(JoinedStream(open_sources(layout, "train", label_texts=True), labels, batch=64, streams=4))
    except ExtremisError as error:
        check_message(f"error: {error}")
        return str(error)
    return ""


CASES = {(kind, name) for kind in KINDS for name in CHANGES if not (kind == "data" and name in OF_SHARDS)}


def test_a_part_of_data_that_was_sealed_again(loop: tuple[Path, Any], tmp_path: Path) -> None:
    messages = {(kind, name): message_of(broken(tmp_path, kind, CHANGES[name], loop[0])) for kind, name in CASES}
    assert {case for case, message in messages.items() if not message} == UNREAD
    assert [case for case, message in messages.items() if message and str(tmp_path) not in message] == []


def test_a_parameter_that_is_no_number(loop: tuple[Path, Any], tmp_path: Path) -> None:
    for kind in KINDS:
        for name in PARAMETERS.get(kind, ()):
            for value in VALUES.values():
                data = broken(tmp_path, kind, parameter(name, value), loop[0])
                assert name in message_of(data), f"{kind}: {name} = {value}"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "another kind") for kind in KINDS),
        *(("queries", name) for name in ("a path above", "a billion rows", "checksums of nothing", "no shards")),
        *(("labels", name) for name in ("more bytes", "text for shards")),
    ],
)
def test_no_checkpoint_is_made_of_it(kind: str, name: str, loop: tuple[Path, Any], tmp_path: Path) -> None:
    data = broken(tmp_path, kind, CHANGES[name], loop[0])
    run("train", "random", data, tmp_path / "run", *sets("train.epochs=1", "logging.tensorboard=false"))
    assert not list((tmp_path / "run").glob(f"checkpoints/*/{MANIFEST}"))


@pytest.mark.parametrize("kind", ["tokenizer", "queries", "labels"])
def test_a_part_that_is_another_than_data_names(kind: str, loop: tuple[Path, Any], tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(loop[0] / "data", data)
    change(tmp_path / KINDS[kind], lambda body: body["counters"].update(more=1))
    run("train", "random", data, tmp_path / "run", words=("this table was replaced after",))
    assert listing(tmp_path / "run") == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=st.sampled_from(sorted(KINDS)), data=st.data())
def test_any_value_anywhere_is_refused_or_read(kind: str, data: Any, loop: tuple[Path, Any], tmp_path: Path) -> None:
    """One value of a manifest is another, and its digest is right."""
    body = json.loads((loop[0] / KINDS[kind] / MANIFEST).read_bytes())
    place, name = body, data.draw(st.sampled_from(sorted(body)))
    while isinstance(place[name], (dict, list)) and place[name] and data.draw(st.booleans()):
        place = place[name]
        keys = sorted(place) if isinstance(place, dict) else range(len(place))
        name = data.draw(st.sampled_from(keys))
    place[name] = data.draw(JSON)
    seal(tmp_path, body)
    message = ""
    try:
        open_manifest(str(tmp_path))
    except ExtremisError as error:
        message = str(error)
    assert "\n" not in message


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200))
def test_any_bytes_are_no_manifest(content: bytes, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(ExtremisError):
        open_manifest(str(tmp_path))
