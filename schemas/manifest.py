"""Manifests of tables: a manifest is written last, so that a table is either complete or absent, and is read first."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple

import pyarrow as pa
import pydantic
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_serializer, model_validator

from schemas import UNKNOWN, code_version, commit, storage
from schemas.errors import InputError, TableError
from schemas.layout import MANIFEST, RUN_FILE
from schemas.storage import join, resolve

FORMAT = "extremis-table"
FORMAT_VERSION = 2
# Kinds of tables whose shards contain all rows.
_KINDS_WITH_ROWS = "queries", "labels", "embeddings", "vectors", "negatives"
KINDS = (*_KINDS_WITH_ROWS, "tokenizer", "checkpoint", "data", "rejects", "export", "fusion", "tuples")
MAX_BYTES = 1 << 30  # size of a manifest: enough for a million shards with their checksums

_LONGEST_PATH = 4096  # characters
MOST_COUNT = 1 << 48  # largest count of any kind: more rows than any table has
MOST_DENSE = 1 << 16  # largest dimension of a row's dense vector


class _Number(NamedTuple):
    """Bounds of a parameter, and whether it may be absent."""

    least: int
    most: int = MOST_COUNT
    optional: bool = True


# Parameters that readers use as whole numbers, by the kind of table.
_NUMBERS: Mapping[str, Mapping[str, _Number]] = {
    "tokenizer": {"vocabulary": _Number(1, 1 << 32, optional=False), "max_tokens": _Number(1, 1 << 31)},
    "labels": {"training_points": _Number(0)},
    "data": {"features": _Number(0, 1 << 31), "dense": _Number(1, MOST_DENSE), "labels": _Number(0)},
    "export": {
        "vocabulary": _Number(0, 1 << 32, optional=False),
        "features": _Number(0, 1 << 31, optional=False),
        "dense": _Number(1, MOST_DENSE),
        "max_tokens": _Number(1, 1 << 31, optional=False),
        "dimension": _Number(1, 1 << 31, optional=False),
        "shortlist": _Number(1, 1 << 31),
        "step": _Number(0),
    },
    "fusion": {"shortlist": _Number(1, 1 << 31, optional=False)},
}


def _require_relative(path: str) -> str:
    parts = PurePosixPath(path).parts
    if not parts or path.startswith("/") or ".." in parts or "\\" in path or "://" in path or "\0" in path:
        raise ValueError(f"{path!r} points outside of the table's folder")
    return path


# A relative path that stays below its prefix.
RelativePath = Annotated[str, pydantic.AfterValidator(_require_relative)]


def _require_path(place: str) -> str:
    if not place or len(place) > _LONGEST_PATH or "\0" in place or "\\" in place:
        raise ValueError(f"{place[:60]!r} is not a path of a table")
    return place


# A URL, or a path relative to the table that names it.
TablePath = Annotated[str, pydantic.AfterValidator(_require_path)]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Patch(_Section):
    """A small Parquet file that changes rows of a shard."""

    place: TablePath
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class View(_Section):
    """A reused shard of another table, `table`. Its file has `rows` rows in groups of `row_group_rows`.

    `first`: id of the view's first row; ids increase by one. `gone`: positions in the file (`row`) of the rows that are
    left out. `columns`: columns that replace or extend the columns of the file, for all rows. `changed`: positions
    (`row`) of the rows with new values, and the new values.
    """

    table: TablePath
    part: str
    first: int = Field(ge=0)
    rows: int = Field(ge=0)
    row_group_rows: int = Field(ge=1)
    gone: Patch | None = None
    columns: Patch | None = None
    changed: Patch | None = None

    @property
    def patches(self) -> tuple[Patch, ...]:
        """All patches."""
        return tuple(patch for patch in (self.gone, self.columns, self.changed) if patch is not None)


class Column(_Section):
    """A column's name and Arrow type, as Arrow prints it."""

    name: str
    type: str


class Shard(_Section):
    """One immutable file: path relative to the manifest, rows, bytes, SHA-256.

    `checksums` (schemas/storage.py): CRC-32 of the end of the file and, in Parquet, of each column chunk; older
    tables have no checksums. `groups`: number of rows in each row group, if it differs from the table's
    `row_group_rows`. `view`: the file belongs to another table.
    """

    path: RelativePath
    rows: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    checksums: str | None = None
    groups: tuple[Annotated[int, Field(gt=0)], ...] | None = None
    view: View | None = None

    @model_serializer(mode="wrap")
    def _as_written(self, dump: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit absent fields, so that digests of older tables do not change."""
        body: dict[str, Any] = dump(self)
        return {name: value for name, value in body.items() if value is not None}

    @model_validator(mode="after")
    def _adds_up(self) -> "Shard":
        if self.groups is not None and sum(self.groups) != self.rows:
            raise ValueError(
                f"{self.path}: the row groups contain {sum(self.groups):,} rows, but the shard contains {self.rows:,}"
            )
        return self

    @field_validator("checksums")
    @classmethod
    def _unpacks(cls, text: str | None) -> str | None:
        if text is not None:
            storage.unpack(text)
        return text


class Manifest(_Section):
    """Manifest of a table: its content, its inputs (`parents`: name to digest), and its parameters.

    A manifest does not depend on when or where it is written, so the same input gives the same manifest and digest.
    Only `commit` tells which code wrote it, and the digest does not cover it.
    """

    format: str = FORMAT
    version: int = FORMAT_VERSION
    kind: str
    columns: tuple[Column, ...] = ()
    shards: tuple[Shard, ...] = ()
    rows: int = 0
    row_group_rows: int | None = None
    id_range: tuple[int, int] | None = None  # [first, last)
    parents: dict[RelativePath, str] = {}  # the parents of a data set have paths as names
    parameters: dict[str, Any] = {}
    counters: dict[str, Any] = {}
    quality: dict[str, Any] = {}
    code_version: str = Field(default_factory=code_version)
    commit: str = Field(default_factory=commit, pattern=r"^[\w.+-]{1,80}$", exclude=True)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest's canonical JSON; other tables list this digest among their parents."""
        return storage.sha256(_canonical(self.model_dump(mode="json")))

    def group_rows(self, shard: int) -> int | tuple[int, ...]:
        """Return the number of rows in each row group of a shard; a single number is for all groups except the last."""
        return self.shards[shard].groups or self.row_group_rows or 1

    @property
    def files(self) -> list[str]:
        """Paths of the table's own files: its patches, and its shards that are not views."""
        patches = [patch.place for entry in self.shards if entry.view for patch in entry.view.patches]
        own = [place for place in patches if not place.startswith(("/", "..")) and "://" not in place]
        return [entry.path for entry in self.shards if entry.view is None] + own


def columns_of(schema: pa.Schema) -> tuple[Column, ...]:
    """Return the columns of a schema in the format of a manifest."""
    return tuple(Column(name=field.name, type=str(field.type)) for field in schema)


def publish(url: str, manifest: Manifest) -> Manifest:
    """Write `manifest` at `url`, after its shards; this makes the table visible. Raises StorageError."""
    storage.write_bytes(join(url, MANIFEST), _encode_manifest(manifest))
    return manifest


def publish_new(url: str, manifest: Manifest) -> bool:
    """Write `manifest` at `url` if there is none; return whether `url` now has this manifest. Raises StorageError."""
    body = _encode_manifest(manifest)
    return storage.create_bytes(join(url, MANIFEST), body) or storage.read_bytes(join(url, MANIFEST)) == body


def unpublish(url: str) -> None:
    """Make the table at `url` invisible before its shards are overwritten."""
    storage.remove(join(url, MANIFEST))


def is_published(url: str) -> bool:
    """Return true if a finished table is at `url`."""
    return storage.exists(join(url, MANIFEST))


def open_manifest(url: str, kind: str | None = None) -> Manifest:
    """Read the manifest at the prefix `url`, and check its digest and its `kind` (None: any kind).

    Raises TableError if the table is missing, unfinished or damaged, has another format version or kind, or is not an
    Extremis table.
    """
    place = join(url, MANIFEST)
    try:
        length = storage.size(place)
        if length > MAX_BYTES:
            raise TableError(f"{place}: {length:,} bytes; a manifest has at most {MAX_BYTES:,}. Is the path right?")
        body, whole = storage.read_matching(lambda: _parse(storage.read_bytes(place)), lambda parsed: parsed[1])
    except TableError:
        raise
    except (FileNotFoundError, InputError) as error:
        if isinstance(error, InputError) and not storage.exists(url):  # else `url` is a path below a file
            raise
        raise TableError(_describe_absence(url, kind)) from None
    if isinstance(body, Exception):
        raise TableError(f"{place}: the manifest is damaged: not JSON ({body}). Remove the table and make it again.")
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        actual = body.get("format") if isinstance(body, dict) else type(body).__name__
        raise TableError(
            f"{place}: not an Extremis table: expected format {FORMAT!r}, got {actual!r}. Is the path right?"
        )
    if (version := body.get("version")) != FORMAT_VERSION:
        reader = "commit 3ac11646" if version == 1 else body.get("code_version", "its writer")
        raise TableError(
            f"{place}: format version {version!r}, but this Extremis reads {FORMAT_VERSION}. Make the table again, or "
            f"read it with {reader}."
        )
    if not whole:
        raise TableError(
            f"{place}: the manifest is damaged: its content does not match its digest. "
            "Remove the table and make it again."
        )
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TableError(
            f"{place}: the manifest is not valid at {where!r}: {first['msg']}. Make the table again."
        ) from None
    if broken := _find_fault(manifest):
        raise TableError(f"{place}: the manifest is not valid: {broken}. Make the table again.")
    if manifest.kind not in KINDS or (kind is not None and manifest.kind != kind):
        wanted = f"kind {kind}" if kind else "a known kind"
        raise TableError(f"{place}: expected a table of {wanted}, got {manifest.kind}. Is the path right?")
    return manifest


def shard_url(url: str, shard: Shard) -> str:
    """Return the URL of a shard of the table at `url`."""
    return join(url if shard.view is None else resolve(url, shard.view.table), shard.path)


def read_patch(url: str, patch: Patch) -> bytes:
    """Read a patch of the table at `url`. Raises TableError if the patch is missing or damaged; StorageError."""
    place = resolve(url, patch.place)
    try:
        return _read_checked(place, patch.sha256, f"The file belongs to {url}: make this version again.")
    except FileNotFoundError:
        raise TableError(
            f"{place}: missing, and {url} needs this file. Restore the file, or use another version."
        ) from None


def find_shard(url: str, shard: Shard, remedy: str = "Make the table again.") -> str:
    """Return the URL of a shard of the table at `url`.

    Raises TableError, with `remedy` at the end of the message, if the shard is missing or its length has changed.
    """
    place = shard_url(url, shard)
    try:
        length = storage.size(place)
    except FileNotFoundError:
        if shard.view is not None:
            raise TableError(
                f"{place}: missing. This file belongs to the part {shard.view.part}, which {url} needs. Restore the "
                "file, or use a version without this part."
            ) from None
        raise TableError(f"{place}: the manifest names this shard, but the file is missing. {remedy}") from None
    if length != shard.bytes:
        raise TableError(f"{place}: damaged: {length} bytes, expected {shard.bytes}. {remedy}")
    return place


def read_shard(url: str, shard: Shard, remedy: str = "Make the table again.") -> bytes:
    """Read a shard of the table at `url`, and check its length and SHA-256.

    Raises TableError, with `remedy` at the end of the message.
    """
    return _read_checked(find_shard(url, shard, remedy), shard.sha256, remedy)


def verify_shard(
    url: str, shard: Shard, on_bytes: Callable[[int], None] | None = None, remedy: str = "Make the table again."
) -> str:
    """Read a shard of the table at `url` in pieces, check it like `read_shard`, and return its URL.

    `on_bytes(bytes)` is called after each piece.
    """
    place = find_shard(url, shard, remedy)

    def read() -> str:
        with storage.open_read(place) as file:
            return storage.stream_sha256(file, on_bytes)

    _require_digest(place, shard.sha256, storage.read_matching(read, lambda digest: digest == shard.sha256), remedy)
    return place


def _read_checked(place: str, expected: str, remedy: str) -> bytes:
    """Return the bytes of a file; read again if the SHA-256 differs. Raises FileNotFoundError too."""

    def read() -> tuple[bytes, str]:
        data = storage.read_bytes(place)
        return data, storage.sha256(data)

    data, digest = storage.read_matching(read, lambda found: found[1] == expected)
    _require_digest(place, expected, digest, remedy)
    return data


def write_file(url: str, name: str, data: bytes) -> Shard:
    """Publish `data` as a file of the table at `url` that contains no rows. Raises StorageError."""
    storage.write_bytes(join(url, name), data)
    return Shard(path=name, rows=0, bytes=len(data), sha256=storage.sha256(data))


def describe_file(path: str, name: str, rows: int, checksums: str | None = None) -> Shard:
    """Describe the shard `name` from the local file `path`, before the shard is published."""
    digest = storage.file_sha256(path)
    return Shard(path=name, rows=rows, bytes=os.path.getsize(path), sha256=digest, checksums=checksums)


def _require_digest(place: str, expected: str, digest: str, remedy: str) -> None:
    if digest != expected:
        raise TableError(f"{place}: damaged: SHA-256 is {digest[:12]}…, expected {expected[:12]}…. {remedy}")


def _parse(data: bytes) -> tuple[Any, bool]:
    """Return the JSON value in `data` without its digest, or the parse error, and return whether the digest matches."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        return error, False
    if not isinstance(body, dict):
        return body, True
    digest, made_by, seal = (body.pop(name, None) for name in ("digest", "commit", "seal"))
    is_whole = digest == storage.sha256(_canonical(body)) and seal in (None, _seal(digest, made_by))
    return {**body, "commit": UNKNOWN if seal is None else made_by}, is_whole


def _describe_absence(url: str, kind: str | None) -> str:
    """Describe what is at `url` instead of a table of `kind`, and what to do."""
    if storage.exists(url):
        return (
            f"{url}: expected a table (a folder with a {MANIFEST}), got a file. Give the folder. `extremis shard` "
            "makes DATA from raw data, and `extremis mine QUERIES VECTORS --out OUT` mines vectors in files."
        )
    names = storage.list_names(url)
    if RUN_FILE in names:
        if kind == "export":
            return (
                f"{url}: expected an export, got a run. Run `extremis export DATA {url} exported/`, then open "
                "exported/."
            )
        if kind == "data":
            return (
                f"{url}: expected DATA, got a run. Give the DATA that the run was trained on, as `extremis shard` "
                "wrote it."
            )
        return f"{url}: expected a table, got a run. `extremis inspect {url}` lists the run's tables."
    for below in (names, [f"{name}/{inner}" for name in names[-1:] for inner in storage.list_names(join(url, name))]):
        folders = [join(url, name) for name in below if "." not in name]
        kinds = {place: open_manifest(place).kind for place in folders if is_published(place)}
        wanted = [place for place in kinds if kinds[place] == kind]
        if wanted or (kinds and len(kinds) == len(folders)):
            return (
                f"{url}: expected a table, got a folder of {' and '.join(sorted({*kinds.values()}))} tables. Give the "
                f"path of a table, such as {(wanted or folders)[-1]}."
            )
    if names:
        return (
            f"{url}: unfinished table: {len(names)} file(s), but no {MANIFEST}. The command that wrote the table was "
            "interrupted. Run that command again."
        )
    return (
        f"{url}: no table here (no {MANIFEST}). Is the path right, and has the command that makes the table finished?"
    )


def _encode_manifest(manifest: Manifest) -> bytes:
    body = manifest.model_dump(mode="json")
    digest, made_by = manifest.digest, manifest.commit
    body |= {"digest": digest, "commit": made_by, "seal": _seal(digest, made_by)}
    return (json.dumps(body, indent=1, sort_keys=True) + "\n").encode()


def _seal(digest: str, commit: str) -> str:
    """Return a digest that covers the commit, too; no other table lists it."""
    return storage.sha256(f"{digest} {commit}".encode())


def _canonical(body: dict[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _find_fault(manifest: Manifest) -> str | None:
    """Describe the rule that a manifest with a valid digest violates; None if it violates no rule."""
    kind, rows, group, parameters = manifest.kind, manifest.rows, manifest.row_group_rows, manifest.parameters
    shards = sum(shard.rows for shard in manifest.shards)
    if not 0 <= rows <= MOST_COUNT or not 0 <= shards <= MOST_COUNT:
        return f"it records {max(rows, shards, key=abs):,} rows"
    if kind in _KINDS_WITH_ROWS and rows != shards:
        return f"it records {rows:,} rows, but its shards contain {shards:,}"
    if group is not None and not 0 < group <= MOST_COUNT:
        return f"row groups of {group} rows"
    for name, number in _NUMBERS.get(kind, {}).items():
        value = parameters.get(name)
        if value is None and number.optional:
            continue
        if type(value) is not int or not number.least <= value <= number.most:
            return f"its parameter {name!r} is {_shown(value)}, not a whole number from {number.least:,} on"
    if kind == "export" and not isinstance(parameters.get("recipe"), Mapping):
        return f"its parameter 'recipe' is {_shown(parameters.get('recipe'))}, not a section"
    return None


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else text[:60] + "…"
