"""Making of the plans: every choice of a sharding run that depends on what the first pipeline counted."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipelines.common import assign
from pipelines.common.summary import Summary
from pipelines.formats.base import LABELS, PAIRS, Inputs
from pipelines.sharding import filters
from pipelines.sharding.options import ShardOptions
from pipelines.sharding.plan import LabelsPlan, QueriesPlan
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.storage import join

# Bytes on storage a unit, measured on WordPiece ids, random keys and Zipfian labels; text is a byte a byte before zstd.
_BYTES = {"tokens": 1.7, "key": 0.9, "mentions": 2.5, "features": 6.0, "text": 0.5}
_BYTES_A_TOKEN = 4.5  # of text


@dataclass(frozen=True)
class Sizes:
    """Sizes of one input table, as the first pipeline counted them."""

    rows: int
    text_bytes: int
    key_bytes: int
    mentions: int
    features: int
    with_features: int

    @classmethod
    def of(cls, table: str, raw: Summary) -> "Sizes":
        """Read them from the first pipeline's summary."""
        names = ("rows", "text_bytes", "key_bytes", "mentions", "features", "with_features")
        return cls(*(raw.count_input(table, name) for name in names))

    def estimated_bytes(self, max_tokens: int, text: bool) -> float:
        """Estimate what the table takes on storage."""
        tokens = min(self.text_bytes / _BYTES_A_TOKEN, self.rows * max_tokens)
        units = {"tokens": tokens, "key": self.key_bytes, "mentions": self.mentions, "features": self.features}
        return sum(_BYTES[name] * n for name, n in units.items()) + text * _BYTES["text"] * self.text_bytes


class Basis(NamedTuple):
    """Basis of the plans: inputs, the first pipeline's summary, DATA, options, and the tokenizer's vocabulary."""

    inputs: Inputs
    raw: Summary
    data: str
    options: ShardOptions
    vocabulary: int | None


def plan_queries(basis: Basis, filter_pairs: Mapping[str, int]) -> list[QueriesPlan]:
    """Plan each split; with a share for validation, `val` is cut out of `train`. `filter_pairs`: how many by split."""
    plans = [_plan_split(split, basis, bool(filter_pairs.get(split))) for split in basis.inputs.splits]
    cut = basis.options.validation_share
    if not cut:
        return plans
    train = next(plan for plan in plans if plan.split == "train")
    shards = basis.options.shards or max(1, round(train.shards * cut), min(assign.MIN_SHARDS, train.shards))
    table = DataLayout(basis.data).queries("val")
    validation = replace(train, split="val", table=table, shards=shards, share=(0.0, cut))
    return [validation, *(replace(plan, share=(cut, 1.0)) if plan is train else plan for plan in plans)]


def plan_labels(basis: Basis) -> LabelsPlan:
    """Plan the table of labels."""
    inputs, raw, data, options, vocabulary = basis
    sizes = Sizes.of(LABELS, raw)
    estimate = sizes.estimated_bytes(options.max_tokens, text=True) + 2 * sizes.rows
    shards = max(1, -(-int(estimate) // options.shard_bytes))
    if not inputs.keyed:  # contiguous ranges of ids, none of them empty
        shards = -(-sizes.rows // max(1, -(-sizes.rows // shards)))
    return LabelsPlan(
        table=DataLayout(data).labels,
        shards=max(1, shards),
        row_group_rows=options.row_group_rows or assign.default_row_group_rows(sizes.rows),
        vocabulary=vocabulary,
        tokenizer=DataLayout(data).tokenizer,
        features=sizes.with_features > 0,
        sources=sources_of(inputs, LABELS),
        sink="parquet",
        rows=sizes.rows,
        keyed=inputs.keyed,
    )


def check(inputs: Inputs, options: ShardOptions) -> None:
    """Raise InputError for what shows before anything is read."""
    if options.validation_share and "val" in inputs.splits:
        raise InputError(
            f"{name_of(inputs, 'val')} is a validation split already: leave it away, or do not cut one out of train."
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
        filters.save(pairs, _filter_url(data, split))
        counts[split] = len(pairs)
    return counts


def name_of(inputs: Inputs, table: str) -> str:
    """Name an input table in messages: its file, or how many it has."""
    parts = inputs.of(table)
    return parts[0].name if len(parts) == 1 else f"the {len(parts)} files of {table}"


def sources_of(inputs: Inputs, *tables: str) -> Mapping[int, str]:
    """Map the numbers of the tables' parts to their names."""
    return {number: part.name for number, part in enumerate(inputs.parts) if part.table in tables}


def _plan_split(split: str, basis: Basis, filtered: bool) -> QueriesPlan:
    inputs, raw, data, options, vocabulary = basis
    sizes = Sizes.of(split, raw)
    pairs = PAIRS + split
    if inputs.of(pairs):
        sizes = replace(sizes, mentions=sizes.mentions + raw.count_input(pairs, "rows"))
    estimate = sizes.estimated_bytes(options.max_tokens, options.keep_text)
    return QueriesPlan(
        table=DataLayout(data).queries(split),
        shards=options.shards or assign.default_shards(sizes.rows, estimate, options.shard_bytes),
        row_group_rows=options.row_group_rows or assign.default_row_group_rows(sizes.rows),
        vocabulary=vocabulary,
        tokenizer=DataLayout(data).tokenizer,
        features=sizes.with_features > 0,
        sources=sources_of(inputs, split, pairs),
        sink=options.sink,
        split=split,
        source=split,
        labels=raw.count_input(LABELS, "rows_in"),
        keyed=inputs.keyed,
        pairs=bool(inputs.of(pairs)),
        shared=inputs.shared_points,
        filters=_filter_url(data, split) if filtered else None,
        keep_text=options.keep_text,
    )


def _filter_url(data: str, split: str) -> str:
    return join(DataLayout(data).staging, f"filter-{split}.int64")
