"""A manifest says what a table is, and refuses to say it when it is not so."""

import json
import re

import numpy as np
import pyarrow as pa
import pytest

from schemas import storage
from schemas.errors import TableError
from schemas.layout import MANIFEST, RUN_FILE
from schemas.manifest import (
    Manifest,
    Shard,
    is_published,
    open_manifest,
    publish,
    unpublish,
)
from schemas.shard_files.shards import write_table
from schemas.storage import join
from schemas.table import Table

URL = "memory://manifests/table"


@pytest.fixture
def table() -> Manifest:
    rows = pa.table({"label_id": pa.array(np.arange(10))})
    return write_table(
        URL,
        "labels",
        [rows.slice(0, 5), rows.slice(5)],
        4,
        parents={"tokenizer": "0" * 64},
        parameters={"text": True, "nested": {"a": [1, 2.5, None]}},
        counters={"rows_in": 12},
        quality={"recall": 0.971},
        id_range=(0, 10),
    )


def rewrite(**changes: object) -> None:
    body = json.loads(storage.read_bytes(join(URL, MANIFEST)))
    storage.write_bytes(join(URL, MANIFEST), json.dumps({**body, **changes}).encode())


def seal(**changes: object) -> None:
    """The manifest with `changes`, and a digest that agrees with them."""
    body = json.loads(storage.read_bytes(join(URL, MANIFEST)))
    body = {name: value for name, value in body.items() if name not in ("digest", "commit", "seal")} | changes
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    text = json.dumps({**body, "digest": storage.sha256(canonical)})
    storage.write_bytes(join(URL, MANIFEST), text.encode())


def test_what_was_published_is_opened(table: Manifest) -> None:
    opened = open_manifest(URL, "labels")
    assert opened == table
    assert opened.digest == table.digest
    assert opened.rows == sum(shard.rows for shard in opened.shards) == 10
    Table(URL, opened).verify()


def test_the_same_table_has_the_same_digest_and_another_has_another(table: Manifest) -> None:
    assert Manifest.model_validate(table.model_dump()).digest == table.digest
    assert table.model_copy(update={"rows": 11}).digest != table.digest


def test_parameters_keyed_by_numbers_survive() -> None:
    publish(URL, Manifest(kind="labels", parameters={"by_k": {10: 0.5, 9: 0.25}}))
    assert open_manifest(URL).parameters == {"by_k": {"9": 0.25, "10": 0.5}}


def test_no_table_is_not_an_unfinished_table() -> None:
    with pytest.raises(TableError, match="no table here"):
        open_manifest("memory://manifests/nothing")


def test_an_unfinished_table_is_invisible_and_says_so(table: Manifest) -> None:
    unpublish(URL)
    assert not is_published(URL)
    with pytest.raises(TableError, match=r"unfinished table: 2 file\(s\), but no _manifest.json"):
        open_manifest(URL)


def test_a_folder_of_tables_names_one_and_a_run_says_what_to_type() -> None:
    place = "memory://manifests/run"
    for name in ("negatives/epoch-0002/queries", "negatives/epoch-0002/labels", "dumps/epoch-0000/queries"):
        publish(join(place, name), Manifest(kind="negatives" if "neg" in name else "embeddings"))
    for folder in ("negatives", "negatives/epoch-0002"):
        with pytest.raises(
            TableError,
            match=r"a folder of negatives tables.* Give the path of a table, such as .*/epoch-0002/queries\.$",
        ):
            open_manifest(join(place, folder), "negatives")
    with pytest.raises(TableError, match="unfinished table"):
        open_manifest(place, "labels")
    publish(join(place, "queries"), Manifest(kind="negatives"))  # beside folders of tables, as in OUT of `mine`
    with pytest.raises(TableError, match=r"Give the path of a table, such as .*/run/queries\.$"):
        open_manifest(place, "negatives")
    storage.write_bytes(join(place, RUN_FILE), b"")
    for kind, remedy in (
        ("export", f"expected an export, got a run. Run `extremis export DATA {place} exported/`"),
        ("data", "expected DATA, got a run"),
        ("negatives", f"expected a table, got a run. `extremis inspect {place}` lists"),
    ):
        with pytest.raises(TableError, match=re.escape(f"{place}: {remedy}")):
            open_manifest(place, kind)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"name": "a web app"}', "not an Extremis table: expected format 'extremis-table', got None"),
        (b"[1, 2]", "not an Extremis table.*got 'list'"),
        (b"\x89PNG\r\n", "damaged: not JSON"),
        (b"", "damaged: not JSON"),
    ],
)
def test_a_foreign_file_is_refused(content: bytes, message: str) -> None:
    storage.write_bytes(join(URL, MANIFEST), content)
    with pytest.raises(TableError, match=message):
        open_manifest(URL)


def test_another_version_names_both_and_the_writer(table: Manifest) -> None:
    for version, reader in ((0, r"0\.0\.7"), (1, "commit 3ac11646")):
        rewrite(version=version, code_version="0.0.7")
        with pytest.raises(TableError, match=rf"format version {version}, but this Extremis reads 2\..*{reader}"):
            open_manifest(URL)


def test_another_kind_is_refused(table: Manifest) -> None:
    with pytest.raises(TableError, match="expected a table of kind queries, got labels"):
        open_manifest(URL, "queries")


def test_a_kind_that_does_not_exist_is_refused_whatever_is_expected(table: Manifest) -> None:
    seal(kind="lables")
    with pytest.raises(TableError, match="expected a table of a known kind, got lables"):
        open_manifest(URL)


def test_a_flipped_bit_anywhere_is_refused_or_changes_nothing(table: Manifest) -> None:
    content = storage.read_bytes(join(URL, MANIFEST))
    refused = 0
    for position in range(0, len(content), 3):
        spoilt = bytearray(content)
        spoilt[position] ^= 1 << (position // 3) % 8
        storage.write_bytes(join(URL, MANIFEST), bytes(spoilt))
        try:
            assert open_manifest(URL, "labels") == table  # white space between values may change
        except TableError as error:
            refused += 1
            assert join(URL, MANIFEST) in str(error)  # noqa: PT017
    assert refused > len(content) // 3 // 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "SHA-256 is .* expected"),
        (lambda content: content[:-1], "damaged: .* bytes, expected"),
        (None, "the manifest names this shard, but the file is missing"),
    ],
)
def test_verify_names_the_shard_that_differs(table: Manifest, change, message: str) -> None:  # type: ignore[no-untyped-def]
    shard: Shard = table.shards[1]
    place = join(URL, shard.path)
    content = storage.read_bytes(place)
    storage.remove(place)
    if change:
        storage.write_bytes(place, change(content))
    with pytest.raises(TableError, match=f"{place}: .*{message}|{place}: {message}"):
        Table(URL, table).verify()


def test_a_child_of_another_parent_names_both(table: Manifest) -> None:
    child = Table(URL, table)
    parent = Table("/data/tokenizer", table)
    object.__setattr__(parent, "digest", "0" * 64)
    child.require_made_from("tokenizer", parent)
    object.__setattr__(parent, "digest", "1" * 64)
    with pytest.raises(TableError, match=r"from a tokenizer table.*00000.*, but /data/tokenizer.*11111"):
        child.require_made_from("tokenizer", parent)
    with pytest.raises(TableError, match="from a queries table"):
        child.require_made_from("queries", parent)
