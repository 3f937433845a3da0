"""`extremis inspect`: describes the table at a URL, or all tables below a prefix, such as a DATA or a RUN."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from extremis.console import Bar, results, say, table
from extremis.inspecting.examples import LONGEST_LABEL, TextDecoder, clean_text, inspect_queries
from pipelines.options import ShardOptions
from schemas import storage
from schemas.errors import TableError
from schemas.layout import MANIFEST, DataLayout, RunLayout
from schemas.manifest import Manifest, is_published
from schemas.storage import join
from schemas.table import Table
from schemas.text_model import DENSE_MODEL
from schemas.version import Version
from trainer.config.load import load_config
from trainer.config.merging import flatten

DEPTH = 4  # levels of folders to search
FOLDERS = 10_000  # maximum of folders to search


@dataclass(frozen=True)
class ListedTable:
    """A table below a prefix, with its manifest, or with a description of what is wrong."""

    name: str
    url: str
    manifest: Manifest | None
    fault: str = ""

    @property
    def bytes(self) -> int:
        return 0 if self.manifest is None else sum(shard.bytes for shard in self.manifest.shards)


def list_tables(url: str) -> list[ListedTable]:
    """List every table below the prefix `url`, and every folder of shards without a manifest, sorted by name."""
    folders = 0

    def walk(place: str, name: str, depth: int) -> Iterator[ListedTable]:
        nonlocal folders
        entries = storage.list_names(place)
        folders += 1
        if name and MANIFEST in entries:
            try:
                yield ListedTable(name, place, Table.open(place).manifest)
            except TableError as error:
                yield ListedTable(name, place, None, str(error))
        elif any(entry.startswith("part-") for entry in entries):
            yield ListedTable(name, place, None, f"unfinished: {len(entries)} file(s) and no {MANIFEST}")
        elif depth:
            for entry in entries:
                if "." not in entry and entry != "tensorboard" and folders < FOLDERS:
                    yield from walk(join(place, entry), f"{name}/{entry}".strip("/"), depth - 1)

    return list(walk(url, "", DEPTH))


def find_mismatches(data: Manifest | None, tables: list[ListedTable]) -> dict[str, str]:
    """Find unreadable tables, and tables of DATA whose digests differ from DATA's manifest; return faults by name."""
    faults = {item.name: item.fault for item in tables if item.fault}
    digests = {item.name: item.manifest.digest for item in tables if item.manifest is not None}
    for name, digest in (data.parents if data is not None else {}).items():
        if name not in digests and name not in faults:
            faults[name] = "missing, but listed in the data's manifest: shard again"
        elif name in digests and digests[name] != digest:
            had = f"digest {digests[name][:12]}…, but the data's manifest lists {digest[:12]}…"
            faults[name] = f"{had}: the table was replaced; shard again"
    return faults


_SHOWN_VALUES = 8  # values shown of a list


def inspect_table(url: str, manifest: Manifest, check: bool, rows: int) -> dict[str, Any]:
    """Print information about a table and its first `rows` rows; with `check`, verify its bytes. Raises TableError."""
    if check:
        verify_tables({url: manifest})
    fields: dict[str, Any] = {
        "kind": manifest.kind,
        "rows": f"{manifest.rows:,}",
        "shards": len(manifest.shards),
        "bytes": f"{sum(shard.bytes for shard in manifest.shards):,}",
        "digest": manifest.digest,
        "code version": manifest.code_version,
    }
    if manifest.columns:
        fields["columns"] = ", ".join(f"{column.name} {column.type}" for column in manifest.columns)
    if manifest.row_group_rows:
        fields["rows per row group"] = f"{manifest.row_group_rows:,}"
    results.print(url, style="bold")
    print_fields(fields)
    for section in ("parents", "parameters", "counters", "quality"):
        print_section(manifest, section)
    for row in _sample(url, manifest, rows):
        results.print(row)
    return {"digest": manifest.digest, "verified": check, **manifest.model_dump(mode="json")}


def print_fields(fields: dict[str, Any]) -> None:
    """Print each name and value on a line."""
    for name, value in fields.items():
        results.print(f"  {name}: {clean_text(str(value))}")


def print_section(manifest: Manifest, section: str) -> None:
    """Print a section of a manifest, one entry per line; leave out entries that are None."""
    entries = flatten(getattr(manifest, section))
    print_fields({f"{section}: {name}": value for name, value in entries.items() if value is not None})


def verify_tables(tables: dict[str, Manifest]) -> None:
    """Verify every byte of the tables, given by URL. Raises TableError that names the first damaged shard."""
    shards = [shard for manifest in tables.values() for shard in manifest.shards]
    total = sum(shard.bytes for shard in shards)
    with Bar("verify", total) as bar:
        for url, manifest in tables.items():
            Table(url, manifest).verify(bar.advance)
    say(f"verified: {len(shards)} shard(s), {total:,} bytes")


def _sample(url: str, manifest: Manifest, rows: int) -> list[dict[str, Any]]:
    """Read the first rows; add texts to rows of queries and labels if the tokenizer of DATA is available."""
    sample: list[dict[str, Any]] = []
    for group in Table(url, manifest).batches(stop=rows) if manifest.columns else ():
        part = [{name: _shorten(value) for name, value in row.items()} for row in group.to_pylist()]
        decoder = _decoder_of(url, manifest) if "input_ids" in group.column_names else None
        if decoder is not None:
            for row, text in zip(part, decoder.texts(group, LONGEST_LABEL), strict=True):
                row["words"] = text
        sample += part
    return sample


def _decoder_of(url: str, manifest: Manifest) -> TextDecoder | None:
    """Find the DATA that the table at `url` belongs to, by the URL and the digest of the tokenizer."""
    depth = {"labels": 1, "queries": 2}.get(manifest.kind)
    if depth is None or "tokenizer" not in manifest.parents:
        return None
    layout = DataLayout(url.rsplit("/", depth)[0] if url.count("/") >= depth else ".")
    try:
        same = Table.open(layout.tokenizer, "tokenizer").digest == manifest.parents["tokenizer"]
        return TextDecoder(layout) if same else None
    except TableError:
        return None


def _shorten(value: Any) -> Any:
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list) and len(value) > _SHOWN_VALUES:
        return [*value[:_SHOWN_VALUES], "…"]
    return value


_VERSION_OPTIONS = ("shards", "shard_bytes", "max_reject_share", "format", "fields", "sink")  # others stay the same
_PROPENSITY = ("propensity_a", "propensity_b")  # both belong to one flag
_DIRECTORY = "directory:"  # prefix of the digest of a tokenizer that was read from a directory


def sharding_command(url: str, data: Manifest) -> str:
    """Return the `extremis shard` command that creates the DATA at `url`.

    Manifests do not record paths of inputs. INPUT stands for the input, DATA1 for the earlier version, and TOKENIZER
    for a tokenizer's directory.
    """
    options, version = data.parameters["options"], Version.of(data)
    words = ["extremis", "shard", "INPUT", shlex.quote(url)]
    if version.onto is not None:
        options = {name: options[name] for name in _VERSION_OPTIONS}
        options |= {name: version.choices.get(name) for name in ("again", "labels")}
        words += ["--onto", "DATA1", "--part", shlex.quote(version.part)]
    a, b = (options.get(name) for name in _PROPENSITY)
    if a is not None:
        words += ["--propensity", f"{a},{b}"]
    for name, option in ShardOptions.model_fields.items():
        value = options.get(name)
        if name == "embed":  # the manifest records the content of this option
            value = data.parameters.get(DENSE_MODEL, {}).get("name", value)
        if name not in _PROPENSITY and value not in (None, option.default):
            words.append("--" + (option.alias or name).replace("_", "-"))
            if value is not True:  # else the option has no value
                words.append("TOKENIZER" if str(value).startswith(_DIRECTORY) else shlex.quote(str(value)))
    return " ".join(words)


def inspect_url(
    url: str, *, verify: bool, rows: int, key: str | None, split: str | None, run: str | None
) -> dict[str, Any]:
    """Print and return a description of `url`. Raises InputError, and TableError if a table is missing or damaged."""
    url = url.removesuffix("/").removesuffix("/" + MANIFEST)
    layout = None if run is None else RunLayout(run)
    if layout is not None:
        load_config(layout.config)  # raises InputError if there is no run
    if key is not None or layout is not None:
        body = inspect_queries(DataLayout(url), rows, split, key, layout)
    elif is_published(url) and (manifest := Table.open(url).manifest).kind != "data":
        body = inspect_table(url, manifest, verify, rows)
    else:
        body = _inspect_prefix(url, verify, rows, split)
    return {"url": url, **body}


def _inspect_prefix(url: str, check: bool, rows: int, split: str | None) -> dict[str, Any]:
    """Print the tables below `url`, their problems, and the first queries of a DATA.

    With `check`, verify every byte. Raises TableError.
    """
    data = Table.open(url, "data").manifest if is_published(url) else None
    layout = RunLayout(url)
    is_run = data is None and storage.exists(layout.config)
    tables = list_tables(url)
    if data is None and not is_run and not tables:
        Table.open(url)  # raises
    mismatches = find_mismatches(data, tables)
    kind = "data" if data else "run" if is_run else "prefix"
    size = sum(item.bytes for item in tables)
    fields = [f"{len(tables)} tables, {size:,} bytes"]
    if is_run:
        fields.append("finished" if storage.exists(layout.finished) else "not finished")
    if data is not None:
        fields.append(f"digest {data.digest}")
    results.print(f"{url}: {kind}, {', '.join(fields)}")
    _print_tables(url, tables, mismatches)
    if data is not None:
        print_fields({"code version": data.code_version})
        print_section(data, "parameters")
        if data.parameters.get("options"):  # empty if vectors in files were mined
            results.print(f"to create DATA again (INPUT: the input files):\n  {sharding_command(url, data)}")
    if kind == "prefix" and {"queries", "labels"} <= set(storage.list_names(url)):
        Table.open(url)  # raises for an unfinished DATA, whose parts were printed above
    if check:
        verify_tables({item.url: item.manifest for item in tables if item.manifest is not None})
    body = {
        "kind": kind,
        "verified": check,
        "bytes": size,
        "tables": {item.name: _describe(item) for item in tables},
        "checks": {name: [fault] for name, fault in mismatches.items()},
    }
    if data is not None:
        body |= {"digest": data.digest, "parameters": data.parameters, "command": sharding_command(url, data)}
        body |= inspect_queries(DataLayout(url), rows, split)
    if mismatches and check:
        raise TableError(f"{url}: {len(mismatches)} item(s) do not match the manifests; see above.")
    return body


def _print_tables(url: str, tables: list[ListedTable], mismatches: dict[str, str]) -> None:
    rows = []
    for item in tables:
        if item.manifest is None:
            state = "unfinished" if item.fault.startswith("unfinished") else "damaged"
            rows.append([item.name, "?", "", "", "", state])
            continue
        counts = [f"{count:,}" for count in (item.manifest.rows, len(item.manifest.shards), item.bytes)]
        rows.append([item.name, item.manifest.kind, *counts, "replaced" if item.name in mismatches else "ok"])
    table("tables", ["table", "kind", "rows", "shards", "bytes", "state"], rows)
    for name, fault in mismatches.items():
        say(f"{name or url}: {fault}")


def _describe(item: ListedTable) -> dict[str, Any]:
    if item.manifest is None:
        return {"wrong": item.fault}
    fields = item.manifest.model_dump(include={"kind", "rows", "parents"})
    return {**fields, "shards": len(item.manifest.shards), "bytes": item.bytes, "digest": item.manifest.digest}
