"""Making of the plans: every choice of a sharding run that depends on what the first pipeline counted."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from pipelines.common import assign
from pipelines.common.meter import Meter
from pipelines.common.summary import Summary
from pipelines.formats.base import LABELS, PAIRS, Inputs
from pipelines.options import ShardOptions
from pipelines.sharding import filters
from pipelines.sharding.plan import LabelsPlan, QueriesPlan
from pipelines.sharding.tokenizer import FrozenTokenizer
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.storage import join

# Bytes on storage a unit, measured on WordPiece ids, random keys and Zipfian labels; text is a byte a byte before zstd.
_BYTES = {"tokens": 1.7, "key": 0.9, "mentions": 2.5, "features": 6.0, "text": 0.5}
_BYTES_A_TOKEN = 4.5  # of text


class Basis(NamedTuple):
    """Basis of the plans: inputs, the first pipeline's summary, DATA, options, and the tokenizer.

    `tables`: where the tables go, DATA or the part of a version. `labels_before`, `shards_before`: those that it has.
    `meter` counts the workers' steps.
    """

    inputs: Inputs
    raw: Summary
    data: str
    options: ShardOptions
    tokenizer: FrozenTokenizer | None
    tables: str
    labels_before: int = 0
    shards_before: int = 0
    meter: Meter = Meter()


def plan_queries(basis: Basis, filter_pairs: Mapping[str, int]) -> list[QueriesPlan]:
    """Plan each split; those with a share are cut out of `train`. `filter_pairs`: how many by split."""
    plans = [_plan_split(split, basis, bool(filter_pairs.get(split))) for split in basis.inputs.splits]
    options, train = basis.options, next(plan for plan in plans if plan.split == "train")
    cuts, low = list[QueriesPlan](), 0.0
    for split, share in (("val", options.validation_share), ("test", options.test_share)):
        if share:
            shards = options.shards or max(1, round(train.shards * share), min(assign.MIN_SHARDS, train.shards))
            table = DataLayout(basis.tables).queries(split)
            cuts.append(replace(train, split=split, table=table, shards=shards, share=(low, low + share)))
            low += share
    return [*cuts, *(replace(plan, share=(low, 1.0)) if plan is train and low else plan for plan in plans)]


def plan_labels(basis: Basis) -> LabelsPlan:
    """Plan the table of labels."""
    inputs, raw, options, frozen = basis.inputs, basis.raw, basis.options, basis.tokenizer
    rows = raw.count_input(LABELS, "rows")
    estimate = _estimated_bytes(LABELS, basis, text=True) + 2 * rows
    shards = max(1, -(-int(estimate) // options.shard_bytes))
    if not inputs.keyed:  # contiguous ranges of ids, none of them empty
        shards = -(-rows // max(1, -(-rows // shards)))
    return LabelsPlan(
        table=DataLayout(basis.tables).labels,
        shards=max(1, shards),
        row_group_rows=options.row_group_rows or assign.default_row_group_rows(rows),
        vocabulary=frozen.vocabulary if frozen else None,
        tokenizer=tokenizer_url(basis.data),
        tokenizer_name=options.tokenizer,
        features=raw.count_input(LABELS, "with_features") > 0,
        sources=sources_of(inputs, LABELS),
        sink="parquet",
        rows=rows,
        keyed=inputs.keyed,
        shards_before=basis.shards_before,
        meter=basis.meter,
    )


def check(inputs: Inputs, options: ShardOptions) -> None:
    """Raise InputError for what shows before anything is read."""
    cuts = {"val": options.validation_share, "test": options.test_share}
    for split, kind in (("val", "validation"), ("test", "test")):
        if cuts[split] and split in inputs.splits:
            raise InputError(
                f"{name_of(inputs, split)} is a {kind} split already: leave it away, or do not cut one out of train."
            )
    if not inputs.keyed and len(inputs.of(LABELS)) != 1:
        raise InputError(f"{name_of(inputs, LABELS)}: a label's line is its id, so there has to be one file of labels.")
    for split, url in inputs.filters.items():
        if len(inputs.of(split)) != 1:
            raise InputError(f"{url}: a filter names lines of one file of {split}, and there are several, or none.")


def stage_filters(inputs: Inputs, raw: Summary, data: str) -> dict[str, int]:
    """Check the filter files and leave their pairs in staging; pairs by split. Raises InputError."""
    counts = {}
    for split, url in inputs.filters.items():
        rows, labels = raw.count_input(split, "rows_in"), raw.count_input(LABELS, "rows_in")
        pairs = filters.parse_pairs(storage.read_bytes(url), url, rows, labels)
        storage.write_sealed(_filter_url(data, split), pairs.tobytes())
        counts[split] = len(pairs)
    return counts


def tokenizer_url(data: str) -> str:
    """Return the URL of the tokenizer's file in staging, which the workers open."""
    return join(DataLayout(data).staging, "tokenizer.json")


def name_of(inputs: Inputs, table: str) -> str:
    """Name an input table in messages: its file, or how many it has."""
    parts = inputs.of(table)
    return parts[0].name if len(parts) == 1 else f"the {len(parts)} files of {table}"


def sources_of(inputs: Inputs, *tables: str) -> Mapping[int, str]:
    """Map the numbers of the tables' parts to their names."""
    return {number: part.name for number, part in enumerate(inputs.parts) if part.table in tables}


def _plan_split(split: str, basis: Basis, filtered: bool) -> QueriesPlan:
    inputs, raw, data, options, frozen = basis[:5]
    pairs = PAIRS + split
    rows = raw.count_input(split, "rows")
    estimate = _estimated_bytes(split, basis, options.keep_text)
    return QueriesPlan(
        table=DataLayout(basis.tables).queries(split),
        shards=options.shards or assign.default_shards(rows, estimate, options.shard_bytes),
        row_group_rows=options.row_group_rows or assign.default_row_group_rows(rows),
        vocabulary=frozen.vocabulary if frozen else None,
        tokenizer=tokenizer_url(data),
        tokenizer_name=options.tokenizer,
        features=raw.count_input(split, "with_features") > 0,
        sources=sources_of(inputs, split, pairs),
        sink=options.sink,
        split=split,
        source=split,
        labels=basis.labels_before + max(raw.count_input(LABELS, "rows_in"), raw.count_input(LABELS, "rows")),
        keyed=inputs.keyed,
        pairs=bool(inputs.of(pairs)),
        shared=inputs.shared_points,
        filters=_filter_url(data, split) if filtered else None,
        keep_text=options.keep_text,
        meter=basis.meter,
    )


def _estimated_bytes(table: str, basis: Basis, text: bool) -> float:
    """Estimate what a table takes on storage, with its `text` or without."""
    raw = basis.raw
    text_bytes = raw.count_input(table, "text_bytes")
    most = raw.count_input(table, "rows") * basis.tokenizer.max_tokens if basis.tokenizer else 0
    units = {
        "tokens": min(text_bytes / _BYTES_A_TOKEN, most),
        "key": raw.count_input(table, "key_bytes"),
        "mentions": raw.count_input(table, "mentions") + raw.count_input(PAIRS + table, "rows"),
        "features": raw.count_input(table, "features"),
        "text": text * text_bytes,
    }
    return sum(_BYTES[name] * n for name, n in units.items())


def _filter_url(data: str, split: str) -> str:
    return join(DataLayout(data).staging, f"filter-{split}.int64")
