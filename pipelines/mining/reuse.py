"""Tables that are there already: the same is kept, a stale one is made again, any other needs `--overwrite`.

A table that an epoch trains on is never replaced while the run goes on: see docs/decisions/0003.
"""

import json
from typing import Any

from pipelines.common.aligned import Source
from pipelines.mining.inputs import Inputs
from pipelines.mining.plan import Plan
from schemas import storage
from schemas.errors import InputError
from schemas.layout import RunLayout
from schemas.manifest import Manifest, is_published, open_manifest
from schemas.storage import join


def mined(inputs: Inputs, source: Source) -> Manifest | None:
    """The table of `source` made from these very inputs, with whatever options; None where there is none."""
    url = inputs.table(source)
    if not is_published(url):
        return None
    manifest = open_manifest(url, "negatives")
    return manifest if manifest.parents == inputs.parents(source) else None


def finished(plan: Plan, run: str) -> dict[str, Manifest]:
    """Tables that the plan need not make, by source.

    Raises InputError where a table stands in the way: made with other options, or in use.
    """
    found: dict[str, Manifest] = {}
    for source in plan.sources:
        url = plan.inputs.table(source)
        if not is_published(url):
            continue
        manifest = open_manifest(url)
        if manifest.kind != "negatives":
            raise InputError(f"{url}: holds a {manifest.kind} table. Choose another place with --out.")
        differs = _difference(manifest, plan, source)
        if not differs:
            found[source.name] = manifest
        elif not plan.options.overwrite and not _is_stale(manifest, plan):
            raise InputError(
                f"{url}: holds a table made with other options ({differs}). Give the same options, another place with "
                "--out, or --overwrite to replace it."
            )
        elif plan.options.overwrite:
            require_unused(url, manifest, run)
    return found


def _difference(manifest: Manifest, plan: Plan, source: Source) -> str:
    """What differs, in words; empty where the table is what the plan would make."""
    parts = [
        f"other {name}" for name, digest in plan.inputs.parents(source).items() if manifest.parents.get(name) != digest
    ]
    wanted: dict[str, Any] = json.loads(json.dumps(plan.parameters()))
    parts += [
        f"{name} {manifest.parameters.get(name)!r}, now {value!r}"
        for name, value in wanted.items()
        if manifest.parameters.get(name) != value
    ]
    return "; ".join(parts)


def _is_stale(manifest: Manifest, plan: Plan) -> bool:
    """Whether the trainer has written the dump anew since: what was made from the old one is of no use."""
    inputs, old = plan.inputs, manifest.parameters
    from_dump = inputs.epoch is not None and plan.options.queries is None and plan.options.vectors is None
    sources = {source.name: inputs.parents(source) for source in plan.sources}
    same = any(manifest.parents == parents for parents in sources.values())
    return from_dump and not same and old.get("epoch") == inputs.epoch and old.get("by", inputs.by) == inputs.by


def require_unused(url: str, manifest: Manifest, run: str) -> None:
    """A trainer reads an adopted table until the next, and a resumed one needs it again. Raises InputError."""
    layout = RunLayout(run)
    if storage.exists(layout.finished):
        return
    for name in storage.list_names(layout.adoptions):
        record = json.loads(storage.read_bytes(join(layout.adoptions, name)))
        if manifest.digest in record["digests"].values():
            raise InputError(
                f"{url}: epoch {record['epoch']} of this run trains on this table, and the run is not finished, so it "
                "is not replaced. Publish the new one elsewhere with --out, or take a newer dump."
            )
