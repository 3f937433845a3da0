"""Raw data to a data set: find the input, settle the plan, run the pipeline, publish."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import apache_beam as beam

from pipelines.runner import make_pipeline, run
from pipelines.sharding import assign, dataset, inputs, lines, parse, tokenizer, wordpiece
from pipelines.sharding.inputs import Inputs
from pipelines.sharding.labels import ShardLabels
from pipelines.sharding.options import ShardOptions
from pipelines.sharding.plans import LabelsPlan, QueriesPlan
from pipelines.sharding.queries import FREQUENCIES, ShardQueries
from pipelines.sharding.summary import SUMMARY, MergeSummaries, Summary, WriteSummary
from pipelines.sharding.tokenizer import FrozenTokenizer
from schemas import storage
from schemas.errors import InputError, StorageError
from schemas.layout import DataLayout
from schemas.manifest import Manifest
from schemas.storage import join

__all__ = ["ShardOptions", "shard"]


def shard(
    source: str,
    data: str,
    options: ShardOptions,
    beam_options: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Shard the XC raw files at the prefix `source` to the prefix `data`; the data set's manifest.

    A finished data set of the same input and options is returned as it is; an unfinished attempt is made again.
    `overwrite` removes a finished one first, whatever it was made from. `progress` is told each step in a line.
    Raises InputError (bad input, or `data` holds something else) and StorageError; nothing half-written stays.
    """
    tell = progress or _silent
    pipeline = make_pipeline(beam_options)
    found = inputs.find(source)
    counts = ", ".join(f"{file.rows:,} {split} points" for split, file in found.points.items())
    tell(f"{source}: {counts}, {found.labels.rows:,} labels")
    given = tokenizer.load_directory(options.tokenizer, options.max_tokens)
    recorded = options.recorded(f"directory:{given.sha256}" if given else options.tokenizer)
    if not overwrite:
        finished = dataset.find_finished(data, found.identity, recorded)
        if finished is not None:
            dataset.end(data)  # a run that was stopped right after publishing may have left it
            tell(f"{data}: made from this input with these options already; nothing to do")
            return finished
    dataset.begin(data)
    try:
        tell(f"tokenizer: {options.tokenizer}")
        frozen = given or _make_tokenizer(found, options)
        manifest = _shard(found, data, options, recorded, frozen, pipeline, tell)
    except BaseException:
        with contextlib.suppress(StorageError):  # of the two errors the first is the cause
            dataset.clear(data)
        raise
    dataset.end(data)
    tell(f"{data}: published")
    return manifest


def _make_tokenizer(found: Inputs, options: ShardOptions) -> FrozenTokenizer:
    size = tokenizer.parse_name(options.tokenizer)
    if size is None:
        return tokenizer.load_hub(options.tokenizer, options.max_tokens)
    return tokenizer.freeze(wordpiece.train(lambda: _texts(found, options.text), size), {}, options.max_tokens)


def _texts(found: Inputs, text: str) -> Iterator[str]:
    """Texts of the valid train points, then of the labels."""
    points, labels = found.points["train"], found.labels
    for block in lines.read_blocks(points.url, assign.BLOCK_LINES):
        batch = parse.parse_points(block["line"].to_pylist(), 0, points.name, labels.rows, text).batch
        yield from batch["text"].to_pylist()
    for block in lines.read_blocks(labels.url, assign.BLOCK_LINES):
        yield from parse.parse_labels(block["line"].to_pylist(), 0, labels.name, text).batch["text"].to_pylist()


def _shard(
    found: Inputs,
    data: str,
    options: ShardOptions,
    recorded: Mapping[str, Any],
    frozen: FrozenTokenizer,
    pipeline: beam.Pipeline,
    tell: Callable[[str], None],
) -> Manifest:
    made = Manifest(
        kind="tokenizer",
        shards=dataset.write_tokenizer(data, frozen),
        parameters={"vocabulary": frozen.vocabulary, "max_tokens": options.max_tokens, "source": recorded["tokenizer"]},
    )
    queries = _plan_splits(found, data, options, frozen.vocabulary)
    labels = _plan_labels(found, data, options, frozen.vocabulary)
    tell(f"sharding {sum(plan.rows for plan in queries):,} points and {labels.labels:,} labels")
    summary_url = join(DataLayout(data).staging, "summary.json")
    build(pipeline, queries, labels, summary_url)
    run(pipeline)
    summary = Summary.from_json(storage.read_bytes(summary_url))
    dataset.check_rejects(summary.rejects, queries, labels, options.max_reject_share)
    parameters = _parameters(found, queries, summary, options, recorded)
    return dataset.publish(data, summary, made, queries, labels, parameters)


def build(pipeline: beam.Pipeline, queries: Sequence[QueriesPlan], labels: LabelsPlan, summary_url: str) -> None:
    """Wire the whole flow: every split, the labels joined with the train split's counts, one summary at the end."""
    made = {
        plan.split: pipeline | f"Queries {plan.split}" >> ShardQueries(plan, labels.shard_labels) for plan in queries
    }
    summaries = [outputs[SUMMARY] for outputs in made.values()]
    summaries.append(made["train"][FREQUENCIES] | "Labels" >> ShardLabels(labels))
    _ = (
        summaries
        | "All summaries" >> beam.Flatten()
        | "Merge summaries" >> beam.CombineGlobally(MergeSummaries())
        | "Write summary" >> beam.ParDo(WriteSummary(summary_url))
    )


def _plan_splits(found: Inputs, data: str, options: ShardOptions, vocabulary: int) -> list[QueriesPlan]:
    plans = [_plan_queries(split, found, data, options, vocabulary) for split in found.points]
    cut = options.validation_share
    if not cut:
        return plans
    if "val" in found.points:
        raise InputError(
            f"{found.points['val'].name} is a validation split already: leave it away, or do not cut one out of train."
        )
    train = next(plan for plan in plans if plan.split == "train")
    table = DataLayout(data).queries("val")
    shards = options.shards or assign.MIN_SHARDS
    validation = replace(train, split="val", table=table, shards=shards, share=(0.0, cut), reports=False)
    return [validation, *(replace(plan, share=(cut, 1.0)) if plan is train else plan for plan in plans)]


def _plan_queries(split: str, found: Inputs, data: str, options: ShardOptions, vocabulary: int) -> QueriesPlan:
    file = found.points[split]
    pairs = found.filters.get(split)
    return QueriesPlan(
        split=split,
        file=file.name,
        source=file.url,
        filter_source=pairs.url if pairs and pairs.rows else None,
        rows=file.rows,
        labels=found.labels.rows,
        vocabulary=vocabulary,
        tokenizer=DataLayout(data).tokenizer,
        table=DataLayout(data).queries(split),
        shards=options.shards or assign.default_shards(file.rows),
        row_group_rows=options.row_group_rows or assign.default_row_group_rows(file.rows),
        seed=options.seed,
        text=options.text,
        keep_text=options.keep_text,
    )


def _plan_labels(found: Inputs, data: str, options: ShardOptions, vocabulary: int) -> LabelsPlan:
    return LabelsPlan(
        file=found.labels.name,
        source=found.labels.url,
        labels=found.labels.rows,
        vocabulary=vocabulary,
        tokenizer=DataLayout(data).tokenizer,
        table=DataLayout(data).labels,
        row_group_rows=options.row_group_rows or assign.default_row_group_rows(found.labels.rows),
        text=options.text,
    )


def _parameters(
    found: Inputs,
    queries: Sequence[QueriesPlan],
    summary: Summary,
    options: ShardOptions,
    recorded: Mapping[str, Any],
) -> dict[str, Any]:
    known = options.propensity_a is not None
    return {
        "input": found.identity,
        "options": recorded,
        "propensity": {"a": options.propensity_a, "b": options.propensity_b} if known else None,
        "filters": {split: {"file": file.name, "pairs": file.rows} for split, file in found.filters.items()},
        "labels": found.labels.rows,
        "rows": {plan.split: summary.counters[plan.name]["rows_out"] for plan in queries},
    }


def _silent(message: str) -> None:
    pass
