"""What is at a prefix: a manifest in words, and a few rows."""

from typing import Any

from extremis.console import print_json, results, say, table
from schemas.layout import MANIFEST
from schemas.manifest import Manifest, open_manifest
from schemas.manifest import verify as verify_table
from schemas.shards import iterate


def inspect_url(url: str, *, verify: bool, rows: int, as_json: bool) -> None:
    """Print what is at `url`. Raises TableError where there is no table, or it is damaged."""
    url = url.removesuffix("/").removesuffix("/" + MANIFEST)
    manifest = open_manifest(url)
    if verify:
        verify_table(url, manifest)
    facts = _facts(manifest)
    table(url, ["what", ""], [[name, str(value)] for name, value in facts.items()])
    for row in _sample(url, manifest, rows):
        results.print(row, markup=False)
    if verify:
        say(f"verified: {len(manifest.shards)} shard(s), {sum(s.bytes for s in manifest.shards):,} bytes")
    if as_json:
        print_json({"url": url, "digest": manifest.digest, "verified": verify, **manifest.model_dump(mode="json")})


def _facts(manifest: Manifest) -> dict[str, Any]:
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
    for section in ("parents", "parameters", "counters", "quality"):
        for name, value in getattr(manifest, section).items():
            facts[f"{section}: {name}"] = value
    return facts


def _sample(url: str, manifest: Manifest, rows: int) -> list[dict[str, Any]]:
    if not manifest.columns or rows == 0:
        return []
    for group in iterate(url, manifest):
        return [_short(row) for row in group.slice(0, rows).to_pylist()]
    return []


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: [*value[:8], "…"] if isinstance(value, list) and len(value) > 8 else value for name, value in row.items()
    }
