"""`extremis inspect`: the table at a URL, or a prefix with tables below it: a DATA, a RUN, or any other."""

from typing import Any

from extremis.console import results, say, table
from extremis.inspecting.examples import require_run
from extremis.inspecting.list_tables import ListedTable, find_mismatches, list_tables
from extremis.inspecting.queries import inspect_queries
from extremis.inspecting.sharding_command import sharding_command
from extremis.inspecting.table import inspect_table, print_facts, print_section, verify_tables
from schemas import storage
from schemas.errors import TableError
from schemas.layout import EARLIER_MANIFEST, MANIFEST, DataLayout, RunLayout
from schemas.manifest import is_published
from schemas.table import Table


def inspect_url(
    url: str, *, verify: bool, rows: int, key: str | None, split: str | None, run: str | None
) -> dict[str, Any]:
    """Print and return what is at `url`. Raises InputError; TableError where there is no table, or a damaged one."""
    url = url.removesuffix("/").removesuffix("/" + MANIFEST).removesuffix("/" + EARLIER_MANIFEST)
    layout = None if run is None else require_run(run)
    if key is not None or layout is not None:
        body = inspect_queries(DataLayout(url), rows, split, key, layout)
    elif is_published(url) and (manifest := Table.open(url).manifest).kind != "data":
        body = inspect_table(url, manifest, verify, rows)
    else:
        body = _inspect_prefix(url, verify, rows, split)
    return {"url": url, **body}


def _inspect_prefix(url: str, check: bool, rows: int, split: str | None) -> dict[str, Any]:
    """Print the tables below `url`, what is wrong with them, and the first queries of a DATA.

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
    facts = [f"{len(tables)} tables, {size:,} bytes"]
    if is_run:
        facts.append("finished" if storage.exists(layout.finished) else "not finished")
    if data is not None:
        facts.append(f"digest {data.digest}")
    results.print(f"{url}: {kind}, {', '.join(facts)}")
    _print_tables(url, tables, mismatches)
    if data is not None:
        print_facts({"code version": data.code_version})
        print_section(data, "parameters")
        results.print(f"made by, INPUT being where its files were:\n  {sharding_command(url, data)}")
    if kind == "prefix" and {"queries", "labels"} <= set(storage.list_names(url)):
        Table.open(url)  # raises: a DATA that was cut off; its parts are above
    if check:
        verify_tables({item.url: item.manifest for item in tables if item.manifest is not None})
    body = {
        "kind": kind,
        "verified": check,
        "bytes": size,
        "tables": {item.name: _describe(item) for item in tables},
        "checks": mismatches,
    }
    if data is not None:
        body |= {"digest": data.digest, "parameters": data.parameters, "command": sharding_command(url, data)}
        body |= inspect_queries(DataLayout(url), rows, split)
    if mismatches and check:
        count = sum(map(len, mismatches.values()))
        raise TableError(f"{url}: {count} thing(s) are not as the manifests say; see above.")
    return body


def _print_tables(url: str, tables: list[ListedTable], mismatches: dict[str, list[str]]) -> None:
    rows = []
    for item in tables:
        if item.manifest is None:
            state = "unfinished" if item.fault.startswith("unfinished") else "damaged"
            rows.append([item.name, "?", "", "", "", state])
            continue
        counts = [f"{count:,}" for count in (item.manifest.rows, len(item.manifest.shards), item.bytes)]
        rows.append([item.name, item.manifest.kind, *counts, "replaced" if item.name in mismatches else "ok"])
    table("tables", ["table", "kind", "rows", "shards", "bytes", "state"], rows)
    for name, lines in mismatches.items():
        for line in lines:
            say(f"{name or url}: {line}")


def _describe(item: ListedTable) -> dict[str, Any]:
    if item.manifest is None:
        return {"wrong": item.fault}
    facts = item.manifest.model_dump(include={"kind", "rows", "parents"})
    return {**facts, "shards": len(item.manifest.shards), "bytes": item.bytes, "digest": item.manifest.digest}
