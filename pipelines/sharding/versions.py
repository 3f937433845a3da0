"""A new part of data on top of an earlier version: labels keep their ids, and patches change rows of earlier shards.

New labels follow the earlier ones; earlier points with a key of a new point give up their labels or their rows; then
the tables of all parts are published as views of the shards.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.flow import (
    Collection,
    FileExchange,
    Flow,
    Packet,
    Tagged,
    gather,
    receive,
    send_together,
    split_by,
    to_record_batch,
)
from pipelines.formats.base import LABELS
from pipelines.job import SUMMARY, Patched, StagedBlock, Summary
from pipelines.sharding import plans, publish, read, rows
from pipelines.sharding.earlier import EarlierData, renumbered, route_keys, views_of
from pipelines.sharding.plans import LabelsPlan, QueriesPlan
from pipelines.sharding.rows import OrderedLabels
from schemas import manifest as manifests
from schemas import storage
from schemas.errors import InputError, option
from schemas.hashing import hash_strings
from schemas.layout import DataLayout, parts_prefix
from schemas.manifest import Column, Manifest, Patch, Shard, View
from schemas.ragged import offsets_of
from schemas.shard_files import parquet
from schemas.shard_files.shards import POSITION, RETIRED, ViewedShard, iterate_shard, open_shard, read_group
from schemas.storage import join, relative, resolve
from schemas.table import PARTS, PartTable, Table
from schemas.versions import VERSION, Version

CHANGED, STATES = "changed", "states"  # tags of collections
EARLIER_SCHEMA = pa.schema(
    {"hash": pa.uint64(), "key": pa.string(), "label_id": pa.int64(), "content": pa.uint64(), RETIRED: pa.bool_()}
)
STATE_SCHEMA = pa.schema({"label_id": pa.int64(), RETIRED: pa.bool_()})
_GROUP_ROWS = 1 << 16  # of a patch


def order_labels_onto(flow: Flow, plan: LabelsPlan, earlier: EarlierData, blocks: list[StagedBlock]) -> OrderedLabels:
    """Order new labels by (hash, key) after the earlier labels; find earlier labels that change, retire or return.

    Returns the collections of `order_labels`, and two collections of packets in files per earlier label shard:
    `changed` contains the rows of changed labels, and `states` the labels that retire or return (STATE_SCHEMA).
    """
    before = earlier.views[LABELS]
    routed = flow.create("Blocks of labels", blocks).flat_map("Route labels", route_labels, plan)
    old = flow.create("Shards before", range(len(before))).flat_map("Read before", read_before, plan, earlier)
    every = flow.create("Shards of labels", [(shard, None) for shard in range(plan.shards)])
    joined = flow.join("Labels by shard", {"rows": routed, "before": old, "every": every})
    tags = (read.ROWS, rows.KEYS, read.SIZES, SUMMARY, CHANGED, STATES)
    ordered = joined.split("Order labels", tags, sort_new_labels, plan, earlier)
    sizes = {number: entry.rows for number, entry in enumerate(before)}
    sizes_before = flow.create("Sizes before", sizes.items())
    summary = flow.create("Summary of labels before", [Summary(label_sizes=sizes)])
    return ordered | {read.SIZES: sizes_before + ordered[read.SIZES], SUMMARY: summary + ordered[SUMMARY]}


def route_labels(block: StagedBlock, plan: LabelsPlan) -> Iterator[tuple[int, Packet]]:
    """Send the labels of a block to their shards, without tokens: (shard, packet)."""
    yield from plan.exchange.send(read.by_shard(block.read().select(plan.raw_schema.names), plan.shards))


def read_before(number: int, plan: LabelsPlan, earlier: EarlierData) -> Iterator[tuple[int, Packet]]:
    """Send the key, id and state of each label in the earlier shard `number`, and the content's hash if needed."""
    entry = earlier.views[LABELS][number]
    names = [column.name for column in earlier.tables[LABELS].columns]
    given = {*read.CONTENT} - ({"dense"} if earlier.dense_model else set())  # a model's vectors follow from the text
    counted = [name for name in read.CONTENT if name in names and name in given and earlier.texts]
    columns = ["key", "label_id", *counted, RETIRED]
    for group in iterate_shard(earlier.table_url(LABELS), entry, columns):
        (batch,) = group.combine_chunks().to_batches()
        if not earlier.texts:
            batch = batch.append_column("text", pa.array([""] * batch.num_rows))
        batch = read.with_hashes(batch, earlier.seed)
        batch = pa.RecordBatch.from_arrays([batch[name] for name in EARLIER_SCHEMA.names], schema=EARLIER_SCHEMA)
        yield from plan.exchange.send(read.by_shard(batch, plan.shards))


def sort_new_labels(element: tuple[int, dict[str, Any]], plan: LabelsPlan, earlier: EarlierData) -> Iterator[Tagged]:
    """Order the labels in (shard, packets by collection); yield new rows and keys, and changes of old rows."""
    shard, packets = element
    plan.meter.start(rows.ORDER_LABELS)
    staged = plan.files[plans.LABELS_DONE]
    first = offsets_of(np.array([entry.rows for entry in earlier.views[LABELS]], np.int64))
    ordered = rows.order_rows(gather(packets["rows"], plan.raw_schema))
    before = gather(packets["before"], EARLIER_SCHEMA).sort_by("label_id").combine_chunks()
    table = ordered.rows
    place = pc.index_in(table["key"].combine_chunks(), value_set=before["key"].combine_chunks())
    is_new = pc.is_null(place)
    new = _encoded(plan, table.filter(is_new))
    again = table.filter(pc.invert(is_new))
    old = before.take(place.drop_null())
    counters = Counter(rows_in=table.num_rows + ordered.merged + ordered.rejected.num_rows)
    counters.update(rows_merged=ordered.merged, new=new.num_rows)
    if earlier.texts:
        other = pc.not_equal(again["content"], old["content"])
        changed = _encoded(plan, again.filter(other)).append_column("label_id", old["label_id"].filter(other))
        counters["changed"] = changed.num_rows
        columns = [name for name in plan.schema.names if name != "frequency"]
        yield from _by_shard_before(staged, first, CHANGED, to_record_batch(changed.select(columns)))
    # Listed labels return; if the list is complete, the other labels retire.
    listed = pc.is_in(before["label_id"], value_set=old["label_id"].combine_chunks())
    is_other = pc.and_(pc.equal(before[RETIRED], listed), pc.or_(listed, earlier.complete is not False))
    states = before.filter(is_other).select(STATE_SCHEMA.names)
    states = states.set_column(1, RETIRED, pc.invert(states[RETIRED]))
    retiring = int(pc.sum(states[RETIRED]).as_py() or 0)
    counters.update(retired=retiring, returned=states.num_rows - retiring)
    yield from _by_shard_before(staged, first, STATES, to_record_batch(states))
    keys = pa.table({"key": before["key"], "label_id": before["label_id"]})
    missing = pa.nulls(new.num_rows, pa.int64())
    keys = pa.concat_tables([keys, pa.table({"key": new["key"], "label_id": missing})])
    yield from rows.send_sorted(shard, plan, new, keys, counters, rows.duplicates(ordered, plan.sources))


def _encoded(plan: LabelsPlan, table: pa.Table) -> pa.Table:
    batch = read.encode(to_record_batch(table), plan)
    return pa.Table.from_batches([batch.select(plan.row_schema.names)]).cast(plan.row_schema)


def _by_shard_before(staged: FileExchange, first: np.ndarray, tag: str, batch: pa.RecordBatch) -> Iterator[Tagged]:
    """Send rows with `label_id` to the earlier label shards: shard s has ids [first[s], first[s + 1])."""
    shard = np.searchsorted(first, batch["label_id"].to_numpy(), side="right") - 1
    yield from (Tagged(tag, packet) for packet in staged.send(split_by(batch, shard)))


def keep_labels_before(flow: Flow, plan: QueriesPlan, earlier: EarlierData, blocks: list[StagedBlock]) -> Collection:
    """Store the labels of older points with the keys in `blocks`, per shard of the new points. Returns Summary."""
    given = flow.create(f"Blocks with keys of {plan.split}", blocks)
    keys = given.flat_map(f"Send keys of {plan.split}", send_keys, plan)
    grouped, name = keys.group(f"New keys by older shard of {plan.split}"), rows.names_of(plan)[2]
    found = grouped.flat_map(f"Find {name}", find_labels_before, plan, earlier)
    return read.store_packets(found, name, plan.files[plans.ROWS])


def send_keys(block: StagedBlock, plan: QueriesPlan) -> Iterator[tuple[int, Packet]]:
    """Send the keys of a block to the older shards that may contain them: (older shard, packet)."""
    yield from plan.exchange.send(route_keys(block.read().select(["hash", "key"]), plan.older))


def find_labels_before(
    element: tuple[int, Any], plan: QueriesPlan, earlier: EarlierData
) -> Iterator[tuple[int, Packet]]:
    """Find points with the keys in (older shard, packets); send keys and labels (BEFORE_SCHEMA) to (shard, packet)."""
    number, packets = element
    keys = pa.concat_arrays([batch["key"] for batch in receive(packets)])

    def parts() -> Iterator[tuple[int, pa.RecordBatch]]:
        entry = earlier.views[plan.name][number]
        for group in iterate_shard(earlier.table_url(plan.name), entry, ["key", "label_ids"]):
            found = group.filter(pc.is_in(group["key"], value_set=keys)).combine_chunks()
            ids, offsets = parquet.list_column(found, "label_ids")
            key = found["key"].take(pa.array(np.repeat(np.arange(len(found)), np.diff(offsets)))).combine_chunks()
            hashes = hash_strings(key, earlier.seed)
            batch = pa.record_batch([key, ids.astype(np.int64)], schema=rows.BEFORE_SCHEMA)
            yield from split_by(batch, (hashes % np.uint64(plan.shards)).astype(np.int64))

    yield from send_together(plan.files[plans.ROWS], parts())


def remove_replaced(
    keys: Collection, plan: QueriesPlan, earlier: EarlierData, built: str, label_sizes: dict[int, int]
) -> dict[str, Collection]:
    """Remove older rows with one of the `keys` (older shard, packet). Returns `summary` and negative `frequencies`."""
    grouped, tags = keys.group(f"Keys by older shard of {plan.split}"), (SUMMARY, rows.FREQUENCIES)
    return grouped.split(f"Find keys of {plan.split}", tags, remove_keys, plan, earlier, built, label_sizes)


def remove_keys(
    element: tuple[int, Any], plan: QueriesPlan, earlier: EarlierData, built: str, label_sizes: dict[int, int]
) -> Iterator[Tagged]:
    """Write a patch that removes keys, given as (older shard, packets of keys); subtract the rows' label counts."""
    number, packets = element
    entry, url = earlier.views[plan.name][number], earlier.table_url(plan.name)
    view = entry.view
    assert view is not None
    again = pa.Table.from_batches(receive(packets)).combine_chunks()
    keys, total = again["key"].combine_chunks(), int(read.first_ids(label_sizes)[-1])
    kept, mentions = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    with open_shard(url, entry) as file:
        assert isinstance(file, ViewedShard)
        for group in range(file.num_row_groups):
            found = read_group(file, group, ["key", "label_ids"], f"{url}, part {view.part}, {entry.path}")
            place = pc.index_in(found["key"], value_set=keys).combine_chunks()
            kept.append(file.positions(group)[place.is_null().to_numpy(zero_copy_only=False)])
            mentions.append(_mentions(place.drop_null(), found.filter(place.is_valid()), total))
    left, named = np.concatenate(kept), np.concatenate(mentions)
    if len(left) == entry.rows:
        return
    gone_rows = pa.table({POSITION: np.setdiff1d(np.arange(view.rows), left)})
    live = np.bincount(left // view.row_group_rows)
    patched = write_patch(built, plan.name, number, "gone", gone_rows, tuple(live[live > 0].tolist()))
    lost = np.setdiff1d(named, _mentions(pa.array(np.arange(len(again))), again, total))
    replaced = Counter(replaced=entry.rows - len(left), labels_lost=len(lost))
    yield Tagged(SUMMARY, Summary(counters={plan.name: replaced}, patched=(patched,)))
    sent = [
        (shard, batch.set_column(1, "count", pc.negate(batch["count"])))
        for shard, batch in rows.count_labels(named % total, read.first_ids(label_sizes))
    ]
    yield from (Tagged(rows.FREQUENCIES, place) for place in plan.exchange.send(sent))


def _mentions(owners: pa.Array, rows: pa.Table, labels: int) -> np.ndarray:
    """Return the number owner * labels + id for each of the rows' label ids, int64."""
    ids, offsets = parquet.list_column(rows, "label_ids")
    return np.repeat(owners.to_numpy().astype(np.int64), np.diff(offsets)) * labels + ids.astype(np.int64)


def write_patch(
    built: str, table: str, number: int, kind: str, rows: pa.Table, groups: tuple[int, ...] | None = None
) -> Patched:
    """Write a patch of `kind` for shard `number` of `table`, in the attempt at `built`. Raises StorageError."""
    file = f"_{kind}-{number:05d}.parquet"  # readers of Parquet folders skip files with a leading _
    data = memoryview(parquet.encode(rows, _GROUP_ROWS))
    storage.write_bytes(join(built, table, file), data)
    return Patched(table, number, kind, Patch(place=file, bytes=len(data), sha256=storage.sha256(data)), groups)


def patch_labels(element: tuple[int, dict[str, Any]], earlier: EarlierData, built: str) -> Summary:
    """Write the patches for an earlier label shard, from (number, counts, states and changed rows)."""
    number, packets = element
    entry, url = earlier.views[LABELS][number], earlier.table_url(LABELS)
    assert entry.view is not None
    first = entry.view.first
    before = pa.concat_tables(iterate_shard(url, entry, ["frequency", RETIRED]))
    was = before["frequency"].to_numpy()
    frequency = was + rows.sum_counts(receive(packets["counts"]), first, entry.rows)
    retired = before[RETIRED].to_numpy().copy()
    states = gather(packets["states"], STATE_SCHEMA)
    retired[states["label_id"].to_numpy() - first] = states[RETIRED].to_numpy()
    columns = pa.table({"frequency": frequency, RETIRED: retired})
    patched = [write_patch(built, LABELS, number, "columns", columns)]
    more = Counter(without_training_points=int((frequency == 0).sum()) - int((was == 0).sum()))
    if changed := [*receive(packets["changed"])]:
        newer = pa.Table.from_batches(changed)
        counted = [name for name in ("input_ids", "feature_ids") if name in newer.column_names]
        old = pa.concat_tables(iterate_shard(url, entry, counted)).take(pc.subtract(newer["label_id"], first))
        more["empty_texts"] = rows.count_tokens(newer)["empty_texts"] - rows.count_tokens(old)["empty_texts"]
        place = newer.column_names.index("label_id")
        newer = newer.set_column(place, POSITION, pc.subtract(newer["label_id"], first)).sort_by(POSITION)
        with open_shard(url, entry) as file:
            assert isinstance(file, ViewedShard)
            if file.changed is not None:  # earlier changes of other rows stay
                stay = pc.invert(pc.is_in(file.changed[POSITION], value_set=newer[POSITION].combine_chunks()))
                kept = file.changed.filter(stay).select(newer.column_names).cast(newer.schema)
                newer = pa.concat_tables([kept, newer]).sort_by(POSITION)
            patched.append(write_patch(built, LABELS, number, "changed", newer))
    return Summary(counters={LABELS: more}, patched=tuple(patched))


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
    facts = {name: parameters["options"][name] for name in ("seed", "text")}
    if "tokenizer" in earlier.manifest.parents:
        tokenizer = _view_of_tokenizer(earlier)
        parents["tokenizer"] = manifests.publish(DataLayout(built).tokenizer, tokenizer).digest
        facts = {**tokenizer.parameters, **facts}
    origins, added = dict(parents), dict[str, Manifest]()
    total = earlier.labels + sum(shard.rows for shard in summary.shards_of(LABELS))
    for plan in splits:
        own = {**facts, "labels": total, "split": plan.split}
        added[plan.name] = publish.describe_table(plan, summary, origins, own)
    added[LABELS] = publish.describe_table(labels, summary, origins, facts)
    added[LABELS] = added[LABELS].model_copy(update={"id_range": (earlier.labels, total)})
    for name, table in added.items():
        parents[f"{parts_prefix(earlier.part)}/{name}"] = manifests.publish(_own(built, earlier, name), table).digest
    total_rows: dict[str, int] = {}
    for name in sorted({*earlier.tables, *added} - {LABELS}):
        split = name.removeprefix("queries/")
        own = {**facts, "labels": total, "split": split}
        queries = _view_of_table(earlier, name, added.get(name), origins, summary, own)
        parents[name] = manifests.publish(join(built, name), queries).digest
        total_rows[split] = queries.rows
    origins["queries/train"] = parents["queries/train"]
    facts["training_points"] = total_rows["train"]
    table = _view_of_table(earlier, LABELS, added[LABELS], origins, summary, facts)
    if RETIRED not in (column.name for column in table.columns):  # shards of a view may have this column
        table = table.model_copy(update={"columns": (*table.columns, Column(name=RETIRED, type="bool"))})
    parents[LABELS] = manifests.publish(DataLayout(built).labels, table).digest
    parents["rejects"] = manifests.publish(DataLayout(built).rejects, rejects).digest
    counts, before = summary.counters.get(LABELS, Counter()), earlier.version
    needs = [(part, relative(earlier.data, resolve(earlier.url, place))) for part, place in before.needs]
    version = Version(
        number=before.number + 1,
        part=earlier.part,
        onto=relative(earlier.data, earlier.url),
        digest=earlier.manifest.digest,
        needs=[*needs, (earlier.part, ".")],
        retired=before.retired + counts["retired"] - counts["returned"],
        lineage=[*before.lineage, earlier.manifest.digest],
        choices=earlier.described(),
    )
    stated = {**parameters, VERSION: asdict(version), "labels": total, "rows": dict(sorted(total_rows.items()))}
    return manifests.publish(built, Manifest(kind="data", parents=parents, parameters=stated))


def _view_of_tokenizer(earlier: EarlierData) -> Manifest:
    """Return the manifest of the version's tokenizer, which refers to the files of the earlier tokenizer."""
    before, after = DataLayout(earlier.url).tokenizer, earlier.table_url("tokenizer")
    manifest = Table.open(before, "tokenizer").manifest
    shards = []
    for entry in manifest.shards:
        table = before if entry.view is None else resolve(before, entry.view.table)
        view = View(table=relative(after, table), part=earlier.version.part, first=0, rows=0, row_group_rows=1)
        shards.append(entry.model_copy(update={"view": view}))
    return manifest.model_copy(update={"shards": tuple(shards)})


def require_most_labels(earlier: EarlierData, summary: Summary) -> None:
    """Raise InputError if more than half of the labels would retire and the option --labels is missing."""
    retired, before = summary.counters.get(LABELS, Counter())["retired"], earlier.labels - earlier.version.retired
    if earlier.complete is None and 2 * retired > before:
        raise InputError(
            f"{option('onto')}: INPUT lacks {retired:,} of the {before:,} labels of {earlier.url}. Give "
            f"{option('labels', 'new')} if INPUT lists only new and changed labels, or {option('labels', 'all')} to "
            "retire the missing labels."
        )


def _own(root: str, earlier: EarlierData, name: str) -> str:
    """Return the URL of the new part's table `name` in the data set at `root`."""
    return join(root, parts_prefix(earlier.part), name)


def _view_of_table(
    earlier: EarlierData,
    name: str,
    added: Manifest | None,
    parents: Mapping[str, str],
    summary: Summary,
    facts: Mapping[str, Any],
) -> Manifest:
    """Return the manifest of the table `name` with all parts: first earlier shards with patches, then new shards.

    Raises InputError if the new part has other columns.
    """
    older = earlier.tables.get(name)
    columns = (older or added).columns if older or added else ()  # type: ignore[union-attr]
    if older is not None and added is not None and added.rows:
        before, after = ({column.name for column in table.columns} - {RETIRED} for table in (older, added))
        if before != after:
            raise InputError(
                f"{option('onto')}: {name} of INPUT has the columns {', '.join(sorted(after))}, but the earlier data "
                f"set has {', '.join(sorted(before))}. Give INPUT with the same columns."
            )
    shards = list(earlier.views[name])
    for each in (patched for patched in summary.patched if patched.table == name):
        entry = shards[each.number]
        assert entry.view is not None
        changes: dict[str, Any] = {"view": entry.view.model_copy(update={each.kind: each.patch})}
        if each.groups is not None:
            changes |= {"groups": each.groups, "rows": sum(each.groups)}
        shards[each.number] = entry.model_copy(update=changes)
    if added is not None:
        shards += views_of(_own(earlier.data, earlier, name), earlier.table_url(name), added, earlier.part)
    shards = renumbered(shards)
    size = max((entry.view.row_group_rows for entry in shards if entry.view), default=1)
    counters: Counter[str] = Counter()
    for table in filter(None, (older, added)):
        counters.update({key: count for key, count in table.counters.items() if isinstance(count, int)})
    counters["replaced"] += summary.counters.get(name, Counter())["replaced"]
    rows = sum(entry.rows for entry in shards)
    return Manifest(
        kind="labels" if name == LABELS else "queries",
        columns=columns,
        shards=tuple(_cut(entry, size) for entry in shards),
        rows=rows,
        row_group_rows=size,
        id_range=(0, rows),
        parents=dict(parents),
        parameters={**facts, PARTS: [vars(part) for part in _parts(earlier, name, added, shards)]},
        counters={**dict(sorted(counters.items())), "rejected": added.counters.get("rejected", {}) if added else {}},
    )


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
    before, after, table = join(earlier.url, name), earlier.table_url(name), earlier.tables.get(name)
    places: dict[str, tuple[str, str]] = {}  # URL and digest of the table that has the part's shards
    if table is not None:
        older = {part.name: (resolve(before, part.table), part.digest) for part in Table(before, table).parts}
        places = older or {earlier.version.part: (before, table.digest)}
    if added is not None:
        places[earlier.part] = _own(earlier.data, earlier, name), added.digest
    parts = []
    for part, (url, digest) in places.items():
        numbers = [number for number, entry in enumerate(shards) if entry.view and entry.view.part == part]
        if numbers:
            rows = sum(shards[number].rows for number in numbers)
            parts.append(PartTable(part, relative(after, url), digest, rows, numbers[0], numbers[-1] + 1))
    return parts
