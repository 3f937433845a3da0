"""Description of a single table: the facts of its manifest, and its first rows."""

from typing import Any

from extremis.console import Bar, results, say
from extremis.inspecting.decode_text import TextDecoder, clean
from extremis.inspecting.examples import LONGEST_LABEL
from schemas.errors import TableError
from schemas.layout import DataLayout
from schemas.manifest import Manifest
from schemas.table import Table
from trainer.config import flatten

_SHOWN_VALUES = 8  # of a list


def inspect_table(url: str, manifest: Manifest, check: bool, rows: int) -> dict[str, Any]:
    """Print a table's facts and its first `rows` rows; with `check`, verify its bytes. Raises TableError."""
    if check:
        verify_tables({url: manifest})
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
        facts["rows per row group"] = f"{manifest.row_group_rows:,}"
    results.print(url, style="bold")
    print_facts(facts)
    for section in ("parents", "parameters", "counters", "quality"):
        print_section(manifest, section)
    for row in _sample(url, manifest, rows):
        results.print(row)
    return {"digest": manifest.digest, "verified": check, **manifest.model_dump(mode="json")}


def print_facts(facts: dict[str, Any]) -> None:
    """Print one fact per line."""
    for name, value in facts.items():
        results.print(f"  {name}: {clean(str(value))}")


def print_section(manifest: Manifest, section: str) -> None:
    """Print a section of a manifest, one entry per line; what nobody stated is left out."""
    entries = flatten(getattr(manifest, section))
    print_facts({f"{section}: {name}": value for name, value in entries.items() if value is not None})


def verify_tables(tables: dict[str, Manifest]) -> None:
    """Read every byte of tables by URL. Raises TableError that names the first shard that differs."""
    shards = [shard for manifest in tables.values() for shard in manifest.shards]
    total = sum(shard.bytes for shard in shards)
    with Bar("verify", total) as bar:
        for url, manifest in tables.items():
            Table(url, manifest).verify(bar.advance)
    say(f"verified: {len(shards)} shard(s), {total:,} bytes")


def _sample(url: str, manifest: Manifest, rows: int) -> list[dict[str, Any]]:
    """Read the first rows; those of queries and labels with their text, where DATA has the tokenizer."""
    sample: list[dict[str, Any]] = []
    if not manifest.columns or rows == 0:
        return sample
    for group in Table(url, manifest).batches():  # those of rejects are small: one a file of the input
        first = group.slice(0, rows - len(sample))
        part = [{name: _shorten(value) for name, value in row.items()} for row in first.to_pylist()]
        decoder = _decoder_of(url, manifest) if "input_ids" in first.column_names else None
        if decoder is not None:
            for row, text in zip(part, decoder.texts(first, LONGEST_LABEL), strict=True):
                row["words"] = text
        sample += part
        if len(sample) >= rows:
            break
    return sample


def _decoder_of(url: str, manifest: Manifest) -> TextDecoder | None:
    """Find the DATA that the table at `url` belongs to, by its place and by its tokenizer's digest."""
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
        return clean(value)
    if isinstance(value, list) and len(value) > _SHOWN_VALUES:
        return [*value[:_SHOWN_VALUES], "…"]
    return value
