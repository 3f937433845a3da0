"""What is at a prefix: a table, a whole DATA or RUN, sample rows in words, and one query with its negatives."""

from typing import Any

import numpy as np

from extremis.console import Bar, print_json, results, say, table
from extremis.inspecting.decode_text import Words, clean
from extremis.inspecting.examples import (
    LONGEST_LABEL,
    Example,
    find_example,
    newest_joined,
    read_examples,
    require_run,
    splits_of,
)
from extremis.inspecting.list_tables import Found, misfits, tables_below
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import MANIFEST, DataLayout, RunLayout
from schemas.manifest import Manifest, is_published, open_manifest, verify
from schemas.shard_files.shards import iterate


def inspect_url(
    url: str, *, check: bool, rows: int, key: str | None, split: str | None, run: str | None, as_json: bool
) -> None:
    """Print what is at `url`. Raises TableError where nothing of ours is there, or it is damaged; InputError."""
    url = url.removesuffix("/").removesuffix("/" + MANIFEST)
    of_run = None if run is None else require_run(run)
    if key is not None or of_run is not None:
        words = Words(DataLayout(url))
        body = _queries(DataLayout(url), words, key, split, of_run, rows)
    elif is_published(url) and (manifest := open_manifest(url)).kind != "data":
        body = _table(url, manifest, check, rows)
    else:
        body = _prefix(url, check, rows, split)
    if as_json:
        print_json({"url": url, **body})


def _prefix(url: str, check: bool, rows: int, split: str | None) -> dict[str, Any]:
    """A DATA, a RUN, or any prefix with tables below it."""
    whole = open_manifest(url, "data") if is_published(url) else None
    layout = RunLayout(url)
    is_run = whole is None and storage.exists(layout.config)
    found = tables_below(url)
    if whole is None and not is_run and not found:
        raise _nothing(url)
    checks = misfits(whole, found)
    kind = "data" if whole else "run" if is_run else "prefix"
    size = sum(one.bytes for one in found)
    facts = [f"{len(found)} tables, {size:,} bytes"]
    if is_run:
        facts.append("finished" if storage.exists(layout.finished) else "not finished")
    if whole is not None:
        facts.append(f"digest {whole.digest}")
    results.print(f"{url}: {kind}, {', '.join(facts)}", markup=False)
    table(
        "tables",
        ["table", "kind", "rows", "shards", "bytes", "state"],
        [_row(one, checks.get(one.name, [])) for one in found],
    )
    for name, said in checks.items():
        for line in said:
            say(f"{name or url}: {line}")
    if whole is not None:
        _say_facts({"code version": whole.code_version, **_sections(whole, "parameters")})
    if kind == "prefix" and {"queries", "labels"} <= set(storage.list_names(url)):
        raise _nothing(url)  # a DATA that was cut off: its parts are above
    if check:
        _verify(found)
    body: dict[str, Any] = {
        "kind": kind,
        "verified": check,
        "bytes": size,
        "tables": {
            one.name: {"wrong": one.wrong}
            if one.manifest is None
            else {
                "kind": one.manifest.kind,
                "rows": one.manifest.rows,
                "shards": len(one.manifest.shards),
                "bytes": one.bytes,
                "digest": one.manifest.digest,
                "parents": one.manifest.parents,
            }
            for one in found
        },
        "checks": checks,
    }
    if whole is not None:
        body |= {"digest": whole.digest, "parameters": whole.parameters}
        body |= _queries(DataLayout(url), Words(DataLayout(url)), None, split, None, rows)
    if checks and check:
        raise TableError(f"{url}: {sum(map(len, checks.values()))} thing(s) are not as the manifests say; see above.")
    return body


def _row(one: Found, wrong: list[str]) -> list[str]:
    if one.manifest is None:
        return [one.name, "?", "", "", "", "unfinished" if one.wrong.startswith("unfinished") else "damaged"]
    return [
        one.name,
        one.manifest.kind,
        f"{one.manifest.rows:,}",
        f"{len(one.manifest.shards):,}",
        f"{one.bytes:,}",
        "replaced" if wrong else "ok",
    ]


def _table(url: str, manifest: Manifest, check: bool, rows: int) -> dict[str, Any]:
    if check:
        _verify([Found(url, url, manifest)])
    facts: dict[str, Any] = {
        "kind": manifest.kind,
        "rows": f"{manifest.rows:,}",
        "shards": len(manifest.shards),
        "bytes": f"{sum(shard.bytes for shard in manifest.shards):,}",
        "digest": manifest.digest,
        "code version": manifest.code_version,
    }
    if manifest.columns:
        facts["columns"] = ", ".join(f"{column.name} {column.type}" for column in manifest.columns)
    if manifest.row_group_rows:
        facts["rows a row group"] = f"{manifest.row_group_rows:,}"
    results.print(url, markup=False, style="bold")
    _say_facts(facts | _sections(manifest))
    for row in _sample(url, manifest, rows):
        results.print(row, markup=False)
    return {"digest": manifest.digest, "verified": check, **manifest.model_dump(mode="json")}


def _say_facts(facts: dict[str, Any]) -> None:
    for name, value in facts.items():
        results.print(f"  {name}: {clean(str(value))}", markup=False)


def _sections(manifest: Manifest, *sections: str) -> dict[str, Any]:
    return {
        f"{section}: {name}": value
        for section in sections or ("parents", "parameters", "counters", "quality")
        for name, value in getattr(manifest, section).items()
    }


def _verify(found: list[Found]) -> None:
    """Read all of it. Raises TableError that names the first shard that differs."""
    tables = [one for one in found if one.manifest is not None]
    shards = sum(len(one.manifest.shards) for one in tables if one.manifest)
    with Bar("verify", sum(one.bytes for one in tables)) as bar:
        for one in tables:
            assert one.manifest is not None
            verify(one.url, one.manifest, bar.advance)
    say(f"verified: {shards} shard(s), {sum(one.bytes for one in tables):,} bytes")


def _sample(url: str, manifest: Manifest, rows: int) -> list[dict[str, Any]]:
    """The first rows; those of queries and labels with their words, where the tokenizer is where DATA has it."""
    if not manifest.columns or rows == 0:
        return []
    for group in iterate(url, manifest):
        chosen = group.slice(0, rows)
        shown = [_short(row) for row in chosen.to_pylist()]
        words = _words_beside(url, manifest)
        if words is not None and "input_ids" in chosen.column_names:
            for row, text in zip(shown, words.texts(chosen, LONGEST_LABEL), strict=True):
                row["words"] = text
        return shown
    return []


def _words_beside(url: str, manifest: Manifest) -> Words | None:
    """The words of the DATA that the table at `url` is a part of, by its place and by its tokenizer's digest."""
    above = {"labels": 1, "queries": 2}.get(manifest.kind)
    if above is None or "tokenizer" not in manifest.parents:
        return None
    root = url.rsplit("/", above)[0] if url.count("/") >= above else "."
    layout = DataLayout(root)
    try:
        same = open_manifest(layout.tokenizer, "tokenizer").digest == manifest.parents["tokenizer"]
        return Words(layout) if same else None
    except TableError:
        return None


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [*value[:8], "…"] if isinstance(value, list) and len(value) > 8 else value
        for name, value in ((name, clean(value) if isinstance(value, str) else value) for name, value in row.items())
    }


def _queries(
    data: DataLayout, words: Words, key: str | None, split: str | None, run: RunLayout | None, rows: int
) -> dict[str, Any]:
    """The query of `key`, or the first of a split, in words."""
    if key is not None:
        examples = [find_example(data, key, words, split, run)]
    else:
        chosen = split or next(iter(splits_of(data)), None)
        if chosen is None or rows == 0:
            return {}
        if chosen not in splits_of(data):
            raise InputError(f"{data.root}: no split {chosen!r}; this data set has {', '.join(splits_of(data))}.")
        manifest = open_manifest(data.queries(chosen), "queries")
        joined = None if run is None else newest_joined(run, manifest)
        examples = read_examples(data, chosen, np.arange(min(rows, manifest.rows)), words, joined)
    names = words.labels((label for example in examples for label in example.label_ids), LONGEST_LABEL)
    for example in examples:
        _show(example, names, run)
    return {"queries": [_describe(example, names) for example in examples]}


def _show(example: Example, names: dict[int, str], run: RunLayout | None) -> None:
    results.print(f"{example.split} row {example.row}, key {example.key}", markup=False, style="bold")
    results.print(f"  {example.text}", markup=False)
    for label in example.positives:
        results.print(f"  + {names.get(label, label)}  [{label}]", markup=False)
    for label, score in example.negatives:
        results.print(f"  - {names.get(label, label)}  [{label}] {score:.3f}", markup=False)
    if run is not None and not example.negatives:
        results.print(f"  no table of {run.root} is joined to the split {example.split}", markup=False)


def _describe(example: Example, names: dict[int, str]) -> dict[str, Any]:
    return {
        "split": example.split,
        "query_id": example.row,
        "key": example.key,
        "text": example.text,
        "positives": [{"label_id": label, "text": names.get(label, "")} for label in example.positives],
        "negatives": [
            {"label_id": label, "text": names.get(label, ""), "score": score} for label, score in example.negatives
        ],
    }


def _nothing(url: str) -> TableError:
    """Why there is no table at `url`."""
    try:
        open_manifest(url)
    except TableError as error:
        return error
    raise AssertionError(url)
