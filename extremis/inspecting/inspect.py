"""`extremis inspect`: what is at a URL, by its kind."""

from typing import Any

from extremis.inspecting.examples import require_run
from extremis.inspecting.prefix import inspect_prefix
from extremis.inspecting.queries import inspect_queries
from extremis.inspecting.table import inspect_table
from schemas.layout import MANIFEST, DataLayout
from schemas.manifest import is_published, open_manifest


def inspect_url(
    url: str, *, verify: bool, rows: int, key: str | None, split: str | None, run: str | None
) -> dict[str, Any]:
    """Print and return what is at `url`. Raises InputError; TableError where there is no table, or a damaged one."""
    url = url.removesuffix("/").removesuffix("/" + MANIFEST)
    layout = None if run is None else require_run(run)
    if key is not None or layout is not None:
        body = inspect_queries(DataLayout(url), rows, split, key, layout)
    elif is_published(url) and (manifest := open_manifest(url)).kind != "data":
        body = inspect_table(url, manifest, verify, rows)
    else:
        body = inspect_prefix(url, verify, rows, split)
    return {"url": url, **body}
