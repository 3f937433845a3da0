"""Publish a data set as a whole: check existing files at DATA, write rejects, and write manifests (DATA's own last)."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pipelines.flow import FileExchange, Packet, gather, group_by_key, receive, send_together, split_by
from pipelines.formats.base import LABELS, Inputs, Reason
from pipelines.job import Summary, describe
from pipelines.sharding.plans import LabelsPlan, QueriesPlan, say_table, tokenizer_url
from pipelines.sharding.tokenizer import FILE, FrozenTokenizer
from schemas import arrow, storage
from schemas import manifest as manifests
from schemas.errors import InputError, StorageError, TableError
from schemas.layout import MANIFEST, DataLayout
from schemas.manifest import Manifest
from schemas.owners.build import Build
from schemas.owners.claim import ClaimLostError
from schemas.reuse import Request, find_reusable
from schemas.shard_files import parquet
from schemas.storage import join
from schemas.table import Table
from schemas.version import VERSION

Range = tuple[str, int]  # a file, and the number of a range of _LINES lines

_GROUP_ROWS = 8192
_LINES = 1 << 17  # lines of a file whose rejects are sorted together
_REMEDY = "Give another DATA, or --overwrite to replace it."


def open_finished(
    data: str, inputs: Mapping[str, Any], options: Mapping[str, Any], version: Mapping[str, Any] | None = None
) -> Manifest:
    """Open the data set at `data`, which must have been built from `inputs` with `options`, as this `version`.

    Raises InputError if the data set was built differently, and TableError if a table is damaged.
    """
    manifest = find_reusable(data, Request("data", None, {"input": inputs, "options": options}), _REMEDY)
    assert manifest is not None
    made = manifest.parameters.get(VERSION, {}).get("choices")
    if made != (None if version is None else dict(version)):
        raise InputError(f"{data}: this finished data set was built with a different --onto. {_REMEDY}")
    for table, digest in manifest.parents.items():
        if Table.open(join(data, table)).digest != digest:
            raise TableError(f"{join(data, table)}: this table was replaced after {data} was published. {_REMEDY}")
    return manifest


def clear(data: str) -> None:
    """Unpublish and remove the data set at `data`, whether finished or not."""
    manifests.unpublish(data)
    for name in DataLayout.FOLDERS:
        storage.remove(join(data, name), recursive=True)


def move_to_data(build: Build, manifest: Manifest) -> Manifest:
    """Move an attempt's data set to DATA: tables first, DATA's `manifest` last. Raises ClaimLostError, StorageError."""
    tables = {name: Table.open(join(build.url, name)) for name in manifest.parents}
    try:
        files = [f"{name}/{file}" for name, table in tables.items() for file in table.manifest.files]
        build.put(list(dict.fromkeys(files)))
        return build.publish(manifest, [f"{name}/{MANIFEST}" for name in tables])
    except BaseException:
        with contextlib.suppress(ClaimLostError, StorageError):  # the first error is the cause
            build.claim.require()
            clear(build.out)
        raise


def write_tokenizer(data: str, tokenizer: FrozenTokenizer, parameters: Mapping[str, Any]) -> Manifest:
    """Write the tokenizer's files, and a copy for the workers; return the manifest, which is published later."""
    folder = DataLayout(data).tokenizer
    storage.write_sealed(tokenizer_url(data), tokenizer.files[FILE])
    entries = [manifests.write_file(folder, name, content) for name, content in sorted(tokenizer.files.items())]
    facts = {"vocabulary": tokenizer.vocabulary, "max_tokens": tokenizer.max_tokens, **parameters}
    return Manifest(kind="tokenizer", shards=tuple(entries), parameters=facts)


def check_rejects(inputs: Inputs, raw: Summary, summary: Summary, max_share: float) -> None:
    """Raise InputError if too many rows of a table, or too many label mentions in the table's rows, are rejected.

    raw: the counts from the first flow. summary: the rejects so far. In a format without keys, no label may be
    rejected.
    """
    over = []
    for table in dict.fromkeys(part.table for part in inputs.parts):
        reasons = summary.reasons(table)
        unknown = reasons.pop(Reason.UNKNOWN_LABEL.value, 0)
        share = 0.0 if table == LABELS and not inputs.keyed else max_share
        for unit, n, of in (
            ("rows", sum(reasons.values()), raw.count_input(table, "rows_in")),
            ("label mentions", unknown, raw.count_input(table, "mentions")),
        ):
            if n > share * of:
                why = f" ({', '.join(f'{n:,} {reason}' for reason, n in reasons.items())})" if unit == "rows" else ""
                over.append(f"{n:,} of {of:,} {unit} of {say_table(inputs, table)}{why}")
    if not over:
        return
    first = "".join(f"\n  {reject}" for reject in summary.rejects)
    ids = "" if inputs.keyed else " (a label's line number is its id, so no label may be rejected)"
    raise InputError(
        f"rejected {'; '.join(over)}. The first rejects are:{first}\n"
        f"Fix these rows, or raise --max-reject-share, which is {max_share:g}{ids}."
    )


def publish(
    data: str,
    summary: Summary,
    tokenizer: Manifest | None,
    splits: Sequence[QueriesPlan],
    of_labels: LabelsPlan,
    rejects: Manifest,
    parameters: Mapping[str, Any],
) -> Manifest:
    """Publish tokenizer, queries, labels and rejects; then the data set, with `parameters` and the tables' digests.

    Raises StorageError.
    """
    layout, options = DataLayout(data), parameters["options"]
    parents: dict[str, str] = {}
    text: dict[str, Any] = {}
    if tokenizer is not None:
        parents["tokenizer"] = manifests.publish(layout.tokenizer, tokenizer).digest
        text = tokenizer.parameters
    labels, origins = sum(shard.rows for shard in summary.shards_of(of_labels.name)), dict(parents)
    for plan in splits:
        facts = {**text, "labels": labels, "split": plan.split, "seed": options["seed"], "text": options["text"]}
        queries = describe_table(plan, summary, origins, facts)
        parents[plan.name] = manifests.publish(plan.table, queries).digest
    facts = {**text, "training_points": summary.counters["queries/train"]["rows_out"], "text": options["text"]}
    origins["queries/train"] = parents["queries/train"]
    described = describe_table(of_labels, summary, origins, facts)
    parents[of_labels.name] = manifests.publish(layout.labels, described).digest
    parents["rejects"] = manifests.publish(layout.rejects, rejects).digest
    return manifests.publish(data, Manifest(kind="data", parents=parents, parameters=dict(parameters)))


def describe_table(
    plan: QueriesPlan | LabelsPlan, summary: Summary, parents: dict[str, str], parameters: dict[str, Any]
) -> Manifest:
    """Return the manifest of the table that was written with `plan`."""
    kind, source = ("queries", plan.source) if isinstance(plan, QueriesPlan) else ("labels", LABELS)
    rows = sum(shard.rows for shard in summary.shards_of(plan.name))
    counters = {**dict(sorted(summary.counters[plan.name].items())), "rejected": summary.reasons(source)}
    request = Request(kind, parents, parameters)
    return describe(request, summary, plan.schema, plan.row_group_rows, (0, rows), plan.name, counters=counters)


def write_rejects(data: str, rejected: Sequence[tuple[str, Packet]], staged: FileExchange) -> Manifest:
    """Write the rejects, one shard per input table, ordered by file and line; return the unpublished manifest.

    The function groups rejects by range of lines with temporary files in `staged`, and sorts one range at a time.
    """
    by_table = dict(group_by_key(rejected))
    url, schema, shards = DataLayout(data).rejects, arrow.rejects(), []
    for number, table in enumerate(sorted(by_table)):
        with parquet.writing_shard(url, number, len(by_table), schema, _GROUP_ROWS) as shard:
            ranges = (part for batch in receive(by_table[table]) for part in _ranges(batch))
            for _, packets in sorted(group_by_key(send_together(staged, ranges))):
                shard.write(gather(packets, schema).sort_by([(name, "ascending") for name in schema.names]))
        shards.append(shard.entry)
    request = Request("rejects", None, {"tables": sorted(by_table)})
    return describe(request, Summary({request.kind: tuple(shards)}), schema, _GROUP_ROWS, None)


def _ranges(batch: pa.RecordBatch) -> Iterator[tuple[Range, pa.RecordBatch]]:
    """Split rejects by file and range of lines."""
    files = batch["source"].dictionary_encode()
    names, number = files.dictionary.to_pylist(), files.indices.to_numpy().astype("int64")
    part = batch["line"].to_numpy() // _LINES
    stride = int(part.max(initial=0)) + 1
    for code, rows in split_by(batch, number * stride + part):
        yield (names[code // stride], code % stride), rows
