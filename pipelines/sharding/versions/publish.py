"""Publish the tables of a version: the tables of the new part, and views of all parts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from pipelines.formats.base import LABELS
from pipelines.job import Patched, Summary
from pipelines.sharding.dataset import describe_table
from pipelines.sharding.plans import LabelsPlan, QueriesPlan
from pipelines.sharding.versions.earlier import EarlierData, renumbered, views_of
from schemas import manifest as manifests
from schemas.errors import InputError
from schemas.layout import DataLayout, parts_prefix
from schemas.manifest import Column, Manifest, Shard, View
from schemas.shard_files.viewed import RETIRED
from schemas.storage import join, relative
from schemas.table import PARTS, PartTable, Table
from schemas.version import VERSION, Version

_TRAIN = "queries/train"


def publish_version(
    built: str,
    earlier: EarlierData,
    summary: Summary,
    splits: Sequence[QueriesPlan],
    labels: LabelsPlan,
    rejects: Manifest,
    parameters: Mapping[str, Any],
) -> Manifest:
    """Publish all tables of a version at `built`, and the data set last. Raises InputError, StorageError."""
    parents: dict[str, str] = {}
    text: dict[str, Any] = {}
    if "tokenizer" in earlier.manifest.parents:
        tokenizer = view_of_tokenizer(earlier)
        parents["tokenizer"] = manifests.publish(DataLayout(built).tokenizer, tokenizer).digest
        text = tokenizer.parameters
    origins = dict(parents)
    options = parameters["options"]
    facts = {**text, "seed": options["seed"], "text": options["text"]}
    total = earlier.labels + sum(shard.rows for shard in summary.shards_of(LABELS))
    added: dict[str, Manifest] = {}
    for plan in splits:
        own = {**facts, "labels": total, "split": plan.split}
        added[plan.name] = describe_table(plan, summary, origins, own)
    added[LABELS] = describe_table(labels, summary, origins, facts)
    added[LABELS] = added[LABELS].model_copy(update={"id_range": (earlier.labels, total)})
    for name, table in added.items():
        parents[f"{parts_prefix(earlier.part)}/{name}"] = manifests.publish(_own(built, earlier, name), table).digest
    rows: dict[str, int] = {}
    for name in sorted({*earlier.tables, *added} - {LABELS}):
        split = name.removeprefix("queries/")
        queries = _view_of_table(earlier, name, added.get(name), summary, {**facts, "labels": total, "split": split})
        parents[name] = manifests.publish(join(built, name), queries.model_copy(update={"parents": origins})).digest
        rows[split] = queries.rows
    table = _view_of_table(earlier, LABELS, added[LABELS], summary, {**facts, "training_points": rows["train"]})
    columns = table.columns
    if RETIRED not in (column.name for column in columns):  # shards of a view may have this column
        columns = (*columns, Column(name=RETIRED, type="bool"))
    made_from = {**origins, _TRAIN: parents[_TRAIN]}
    table = table.model_copy(update={"columns": columns, "parents": made_from})
    parents[LABELS] = manifests.publish(DataLayout(built).labels, table).digest
    parents["rejects"] = manifests.publish(DataLayout(built).rejects, rejects).digest
    stated = {
        **parameters,
        VERSION: asdict(_version(earlier, summary)),
        "labels": total,
        "rows": dict(sorted(rows.items())),
    }
    return manifests.publish(built, Manifest(kind="data", parents=parents, parameters=stated))


def view_of_tokenizer(earlier: EarlierData) -> Manifest:
    """Return a tokenizer manifest for the version; it refers to the files of the earlier data set's tokenizer."""
    before, after = DataLayout(earlier.url).tokenizer, earlier.table_url("tokenizer")
    manifest = Table.open(before, "tokenizer").manifest
    shards = []
    for entry in manifest.shards:
        table = before if entry.view is None else manifests.resolve(before, entry.view.table)
        view = View(table=relative(after, table), part=earlier.version.part, first=0, rows=0, row_group_rows=1)
        shards.append(entry.model_copy(update={"view": view}))
    return manifest.model_copy(update={"shards": tuple(shards)})


def require_most_labels(earlier: EarlierData, summary: Summary) -> None:
    """Raise InputError if more than half of the labels would retire and the option --labels is missing."""
    retired, before = summary.counters.get(LABELS, Counter())["retired"], earlier.labels - earlier.version.retired
    if earlier.complete is None and 2 * retired > before:
        raise InputError(
            f"--onto: INPUT lacks {retired:,} of the {before:,} labels of {earlier.url}. Give --labels new if INPUT "
            "lists only new and changed labels, or --labels all to retire the missing labels."
        )


def _own(root: str, earlier: EarlierData, name: str) -> str:
    """Return the URL of the new part's table `name` in the data set at `root`."""
    return join(root, parts_prefix(earlier.part), name)


def _version(earlier: EarlierData, summary: Summary) -> Version:
    counts, before = summary.counters.get(LABELS, Counter()), earlier.version
    retired = before.retired + counts["retired"] - counts["returned"]
    onto = relative(earlier.data, earlier.url)
    return Version(
        number=before.number + 1,
        part=earlier.part,
        onto=onto,
        digest=earlier.manifest.digest,
        needs=earlier.needs(),
        retired=retired,
        lineage=[*before.lineage, earlier.manifest.digest],
        choices=earlier.described(),
    )


def _view_of_table(
    earlier: EarlierData, name: str, added: Manifest | None, summary: Summary, facts: Mapping[str, Any]
) -> Manifest:
    """Return the manifest of the table `name` with all parts: first earlier shards with patches, then new shards."""
    older = earlier.tables.get(name)
    own = _own(earlier.data, earlier, name)
    patched = [each for each in summary.patched if each.table == name]
    more = views_of(own, earlier.table_url(name), added, earlier.part) if added else ()
    shards = renumbered([*_with_patches(earlier.views[name], patched), *more])
    columns = _columns(name, older, added)
    size = max(entry.view.row_group_rows for entry in shards if entry.view) if shards else 1
    parts = _parts(earlier, name, added, shards)
    counters: Counter[str] = Counter()
    for table in (older, added):
        counters.update(
            {key: count for key, count in (table.counters if table else {}).items() if isinstance(count, int)}
        )
    counters["replaced"] += summary.counters.get(name, Counter())["replaced"]
    rejected = {} if added is None else added.counters.get("rejected", {})
    rows = sum(entry.rows for entry in shards)
    return Manifest(
        kind="labels" if name == LABELS else "queries",
        columns=columns,
        shards=tuple(_cut(entry, size) for entry in shards),
        rows=rows,
        row_group_rows=size,
        id_range=(0, rows),
        parameters={**facts, PARTS: [vars(part) for part in parts]},
        counters={**dict(sorted(counters.items())), "rejected": rejected},
    )


def _with_patches(views: Sequence[Shard], patched: Sequence[Patched]) -> list[Shard]:
    shards = list(views)
    for each in patched:
        entry = shards[each.number]
        assert entry.view is not None
        changes: dict[str, Any] = {"view": entry.view.model_copy(update={each.kind: each.patch})}
        if each.groups is not None:
            changes |= {"groups": each.groups, "rows": sum(each.groups)}
        shards[each.number] = entry.model_copy(update=changes)
    return shards


def _cut(entry: Shard, size: int) -> Shard:
    """Record the sizes of a shard's row groups, unless all groups except the last have `size` rows."""
    assert entry.view is not None
    groups = entry.groups
    if groups is None:
        starts = np.arange(0, entry.rows, entry.view.row_group_rows)
        groups = tuple(np.minimum(entry.view.row_group_rows, entry.rows - starts).tolist())
    even = all(rows == size for rows in groups[:-1]) and groups[-1] <= size
    return entry.model_copy(update={"groups": None if even else groups})


def _parts(earlier: EarlierData, name: str, added: Manifest | None, shards: Sequence[Shard]) -> list[PartTable]:
    """Return the non-empty parts of a table, with their current shards and rows."""
    tables = {part.name: part for part in earlier.parts(name)}
    if added is not None:
        place = relative(earlier.table_url(name), _own(earlier.data, earlier, name))
        tables[earlier.part] = PartTable(earlier.part, place, added.digest, 0, 0, 0)
    parts = []
    for part in tables.values():
        numbers = [number for number, entry in enumerate(shards) if entry.view and entry.view.part == part.name]
        if numbers:
            rows = sum(shards[number].rows for number in numbers)
            parts.append(replace(part, rows=rows, first=numbers[0], stop=numbers[-1] + 1))
    return parts


def _columns(name: str, older: Manifest | None, added: Manifest | None) -> tuple[Column, ...]:
    """Return the columns of a table with several parts. Raises InputError if parts have different columns."""
    columns = (older or added).columns if older or added else ()  # type: ignore[union-attr]
    if older is None or added is None or not added.rows:
        return columns
    before, after = ({c.name for c in table.columns} - {RETIRED} for table in (older, added))
    if before != after:
        raise InputError(
            f"--onto: {name} of INPUT has the columns {', '.join(sorted(after))}, but the earlier data set has "
            f"{', '.join(sorted(before))}. Give INPUT with the same columns."
        )
    return columns
