"""`extremis shard`: raw data to a data set.

files ─▶ read and parse by block                                               (the first pipeline; then the plan)
labels ─▶ order ─▶ ids ─▶ resolve the points' labels ─▶ tokenize ─▶ order ─▶ write ─▶ sum up ─▶ publish
"""

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import apache_beam as beam
from apache_beam.pvalue import PCollection

from pipelines import formats
from pipelines.common import exchange
from pipelines.common.exchange import Exchange, Files
from pipelines.common.progress import Progress, Watch, silent
from pipelines.common.summary import SUMMARY, Summary, merge_and_write, read_summary
from pipelines.formats.base import LABELS, PAIRS, Format, Inputs
from pipelines.formats.keyed import Keyed
from pipelines.runners.check import check_workers
from pipelines.runners.runner import for_workers, local_workers, make_pipeline, run
from pipelines.sharding import dataset, identity, make_plan, read, sampling, text_length, tokenizer, wordpiece
from pipelines.sharding import labels as label_steps
from pipelines.sharding import queries as query_steps
from pipelines.sharding.labels import OrderedLabels, order_labels, write_labels
from pipelines.sharding.make_plan import Basis
from pipelines.sharding.older import older_shards
from pipelines.sharding.onto.base import Base
from pipelines.sharding.onto.gone import leave_out
from pipelines.sharding.onto.labels import order_labels_onto
from pipelines.sharding.onto.patches import patch_labels
from pipelines.sharding.onto.publish import publish_version, require_most_labels
from pipelines.sharding.options import ShardOptions
from pipelines.sharding.plan import LabelsPlan, QueriesPlan, ReadPlan
from pipelines.sharding.queries import AGAIN, FREQUENCIES, shard_queries
from pipelines.sharding.resolve import resolve_labels
from pipelines.sharding.tokenizer import FrozenTokenizer
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout, parts_prefix
from schemas.manifest import Manifest, is_published
from schemas.owners.build import building, clean_up
from schemas.owners.claim import claimed
from schemas.sizes import require_room
from schemas.storage import join
from schemas.versions.version import own_digest

__all__ = ["ShardOptions", "shard"]


def shard(
    source: str,
    data: str,
    options: ShardOptions,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Shard the input at `source` (any form of `formats`) to the prefix `data`; the data set's manifest.

    A finished data set of the same input and options is returned as it is; an unfinished attempt is made again.
    `overwrite` removes a finished one first, whatever it was made from. `progress` gets a line a step.
    Raises InputError (bad input, or `data` holds something else) and StorageError; nothing half-written stays.
    """
    say = progress or silent
    make_pipeline(beam_options)  # refuses wrong options before anything is read
    source, data = for_workers(beam_options, source), for_workers(beam_options, data)
    if options.onto is not None:
        options = options.model_copy(update={"onto": for_workers(beam_options, options.onto)})
    form = formats.choose(source, options.format, options.fields)
    if options.onto is not None and isinstance(form, Keyed):
        form = replace(form, labels_needed=False)
    inputs = form.find(source)
    base = None if options.onto is None else Base.open(data, inputs, options)
    options = options if base is None else base.inherit(options)
    make_plan.check(inputs, options)
    least = options.max_tokens or text_length.LEAST
    frozen = base.load_tokenizer() if base else tokenizer.load_directory(options.tokenizer, least)
    recorded = options.recorded(_tokenizer_identity(options, frozen, base))

    def find_finished() -> Manifest | None:
        if overwrite or not is_published(data):
            return None
        files = identity.identity(inputs, identity.read_files(inputs))
        finished = dataset.open_finished(data, files, recorded, base.described() if base else None)
        say(f"{data}: made from this input with these options already; nothing to do")
        return finished

    finished = find_finished()
    if finished is not None:
        clean_up(data, "sharded")
        return finished
    read_bytes = sum(storage.size(url) for url in identity.files_of(inputs))
    # The first step writes all that it reads; how densely, and how much of it, is not known before.
    require_room(data, {"rows": read_bytes // 4}, "Choose another place.")
    with claimed(data, "sharded", say):
        finished = find_finished()  # the last owner may have made it
        if finished is not None:
            return finished
        dataset.begin(data)
        with building(data, "sharded") as build:
            check_workers(beam_options, identity.files_of(inputs)[:1], DataLayout(build.url).staging, say)
            flags = local_workers(beam_options, [*identity.files_of(inputs), data, *([base.url] if base else ())])
            watch = Watch(DataLayout(build.url).staging, say)
            attempt = Attempt(source, data, build.url, form, inputs, options, recorded, flags, say, watch, base)
            manifest = dataset.place(build, _make(attempt, frozen))
            watch.summarize()
    say(f"{data}: published")
    return manifest


def _tokenizer_identity(options: ShardOptions, frozen: FrozenTokenizer | None, base: Base | None) -> str:
    """Return what the manifest calls the tokenizer: a directory's by its content, a version's as its base does."""
    if base is not None:
        return str(base.manifest.parameters["options"]["tokenizer"])
    return f"directory:{frozen.sha256}" if frozen else options.tokenizer


@dataclass(frozen=True)
class Attempt:
    """One attempt at a data set, built at `built`: the input, the options, and how the pipelines are run."""

    source: str
    data: str
    built: str
    form: Format
    inputs: Inputs
    options: ShardOptions
    recorded: Mapping[str, Any]
    beam_options: Sequence[str]
    say: Progress
    watch: Watch
    base: Base | None = None  # of a version

    @property
    def tables(self) -> str:
        """Prefix of the tables that are made: those of the data set, or of the part that a version adds."""
        return self.built if self.base is None else join(self.built, parts_prefix(self.base.part))

    @property
    def staging(self) -> str:
        """Prefix of all that is removed at the end."""
        return DataLayout(self.built).staging

    def run(
        self, name: str, steps: Mapping[str, int | None], wire: Callable[[beam.Pipeline, Exchange, str], None]
    ) -> Summary:
        """Run the pipeline that `wire(pipeline, exchange, summary_url)` makes; its summary. `steps`: their rows."""
        pipeline = make_pipeline(self.beam_options)
        bulk = exchange.choose(pipeline.runner, join(self.staging, name), self.options.exchange)
        url = join(self.staging, f"{name}.json")
        wire(pipeline, bulk, url)
        self.watch.expect(steps)
        run(pipeline, watch=self.watch)
        return read_summary(url)


def _make(attempt: Attempt, frozen: FrozenTokenizer | None) -> Manifest:
    """Read, plan, shard, publish. Raises InputError, StorageError."""
    inputs, options, data, say = attempt.inputs, attempt.options, attempt.built, attempt.say
    staging = join(attempt.staging, "rows")
    meter = attempt.watch.meter
    read_plan = ReadPlan(attempt.form, inputs, options.text, staging, options.seed, read.BLOCK_ROWS, meter)
    steps = dict.fromkeys((read.READ, read.PARSE))
    raw = attempt.run("read", steps, lambda pipeline, bulk, url: read.wire(pipeline, read_plan, bulk, url))
    say(f"{attempt.source} ({inputs.format}): {_counted(inputs, raw)}")
    dataset.check_rejects(inputs, raw, raw, options.max_reject_share)
    filter_pairs = make_plan.stage_filters(inputs, raw, data)
    base = attempt.base
    frozen = frozen if base else _choose_tokenizer(attempt, raw, frozen)
    source = {"source": attempt.recorded["tokenizer"]}
    tokenizer_manifest = dataset.write_tokenizer(data, frozen, source) if frozen else None
    before = (base.labels, len(base.views(LABELS))) if base else (0, 0)
    basis = Basis(inputs, raw, data, options, frozen, attempt.tables, *before, meter=meter)
    labels = make_plan.plan_labels(basis)
    queries = make_plan.plan_queries(basis, filter_pairs)
    if base is not None and base.replaces:
        queries = [replace(plan, older=older_shards(base.views(plan.name))) for plan in queries]
    say(f"sharding into {', '.join(f'{plan.shards} shards of {plan.split}' for plan in queries)}")
    wire = functools.partial(_wire, raw=raw, queries=queries, labels=labels, attempt=attempt)
    summary = raw.merge(attempt.run("shard", _steps(raw, queries, labels), wire))
    dataset.check_rejects(inputs, raw, summary, options.max_reject_share)
    if base is not None:
        require_most_labels(base, summary)
    rejects = dataset.write_rejects(data, summary.rejected)
    if rejects.rows:
        say(f"{rejects.rows:,} rejects: see {DataLayout(attempt.data).rejects}")
    parameters = _parameters(attempt, summary, queries, filter_pairs)
    if base is not None:
        say(_changes(base, summary))
        if own_digest(base.url) != base.manifest.digest:
            raise InputError(f"{base.url}: made again meanwhile. Run the command again.")
        return publish_version(data, base, summary, queries, labels, rejects, parameters)
    return dataset.publish(data, summary, tokenizer_manifest, queries, labels, rejects, parameters)


def _counted(inputs: Inputs, raw: Summary) -> str:
    """Describe what was read; queries that splits share are counted once, and belong to those whose pairs name them."""
    labels = f"{raw.count_input(LABELS, 'rows'):,} labels"
    if inputs.shared_points:
        pairs = ", ".join(f"{raw.count_input(PAIRS + split, 'rows'):,} pairs of {split}" for split in inputs.splits)
        return f"{raw.count_input(inputs.splits[0], 'rows_in'):,} queries, {pairs}, {labels}"
    return ", ".join([*(f"{raw.count_input(split, 'rows'):,} {split} points" for split in inputs.splits), labels])


def _steps(raw: Summary, queries: Sequence[QueriesPlan], labels: LabelsPlan) -> dict[str, int | None]:
    """Name the steps of the second pipeline, with their rows: splits that are cut out of a table share its rows."""
    rows = sum(
        round(raw.count_input(plan.source, "rows") * (min(plan.share[1], 1.0) - plan.share[0])) for plan in queries
    )
    steps: dict[str, int | None] = dict.fromkeys((label_steps.ENCODE, label_steps.ORDER), labels.rows)
    steps |= dict.fromkeys((query_steps.ENCODE, query_steps.ORDER, query_steps.WRITE), rows)
    return {**steps, label_steps.WRITE: labels.rows}


def _choose_tokenizer(attempt: Attempt, raw: Summary, frozen: FrozenTokenizer | None) -> FrozenTokenizer | None:
    """Return `frozen`, the hub's, or one that learns from a sample of the texts; None where nothing has a text.

    Unless the options say so, the texts say where they are cut.
    """
    options, tables = attempt.options, ("train", LABELS)
    if not any(raw.count_input(table, "text_bytes") for table in (*attempt.inputs.splits, LABELS)):
        return None
    attempt.say(f"tokenizer: {options.tokenizer}")
    limit = options.max_tokens or text_length.LEAST
    if frozen is None and (size := tokenizer.parse_name(options.tokenizer)) is not None:
        blocks = [block for table in tables for block in raw.blocks_of(table)]
        rows = sum(raw.count_input(table, "rows") for table in tables)
        texts = sampling.sample_texts(blocks, rows, options.tokenizer_texts)
        frozen = tokenizer.freeze(wordpiece.train(texts, size), {}, limit)
    elif frozen is None:
        frozen = tokenizer.load_hub(options.tokenizer, limit)
    if options.max_tokens:
        return frozen
    samples = (
        sampling.sample_texts(raw.blocks_of(table), raw.count_input(table, "rows"), text_length.SAMPLED)
        for table in tables
    )
    limit = text_length.choose_length(frozen, samples)
    attempt.say(f"texts are cut at {limit} tokens")
    return frozen.cut_at(limit)


def _wire(
    pipeline: beam.Pipeline,
    bulk: Exchange,
    summary_url: str,
    raw: Summary,
    queries: Sequence[QueriesPlan],
    labels: LabelsPlan,
    attempt: Attempt,
) -> None:
    """Wire the whole flow: labels in order, every split with its labels' ids, training counts, one summary at the end.

    raw: the first pipeline's blocks. Bulk data goes through `bulk`, rejects through staging.
    """
    base, built = attempt.base, attempt.built
    staged = Files(join(attempt.staging, "rejects"))
    version = None
    if base is None:
        ordered = pipeline | "Labels" >> order_labels(labels, raw.blocks_of(LABELS), bulk, staged)
    else:
        version = pipeline | "Labels" >> order_labels_onto(labels, base, raw.blocks_of(LABELS), bulk, staged)
        ordered = version.ordered
    tables = dict.fromkeys(table for plan in queries for table in (plan.source, PAIRS + plan.source))
    named = {table: _name_labels(pipeline, table, raw, ordered, labels, bulk) for table in tables}
    outputs, more = {}, []
    for plan in queries:
        pairs = named[PAIRS + plan.source] if plan.pairs else None
        sharding = shard_queries(plan, named[plan.source], pairs, ordered.sizes, bulk, staged)
        outputs[plan.split] = pipeline | f"Queries {plan.split}" >> sharding
        if plan.older and base is not None:
            leaving = leave_out(plan, base, built, ordered.sizes, bulk)
            more.append(outputs[plan.split][AGAIN] | f"Again in {plan.split}" >> leaving)
            if plan.split == "train":
                counts = (outputs["train"][FREQUENCIES], more[-1][FREQUENCIES]) | "Less" >> beam.Flatten()
                outputs["train"] = {**outputs["train"], FREQUENCIES: counts}
    counts = outputs["train"][FREQUENCIES]
    if version is not None and base is not None:
        older, counts = (
            counts | name >> beam.Filter(_is_new, new, labels.shards_before)
            for name, new in (("Of labels before", False), ("Of new labels", True))
        )
        joined = {"counts": older, "states": version.states, "changed": version.changed}
        patched = joined | "Join what changes" >> beam.CoGroupByKey()
        more.append({SUMMARY: patched | "Patch labels" >> beam.Map(patch_labels, base, built)})
    written = counts | "Write labels" >> write_labels(labels, ordered)
    summaries = [ordered.summary, written, *(output[SUMMARY] for output in [*outputs.values(), *more])]
    merge_and_write(summaries | "All summaries" >> beam.Flatten(), summary_url)


def _is_new(element: tuple[int, Any], new: bool, before: int) -> bool:
    """Tell whether counts are of a shard of labels that are new, or not new."""
    return (element[0] >= before) == new


def _changes(base: Base, summary: Summary) -> str:
    """Say what the version adds to `base`, and what it changes there."""
    counts = summary.counters.get(LABELS, Counter())
    replaced = sum(counters["replaced"] for counters in summary.counters.values())
    parts = [f"{counts['new']:,} new labels", f"{counts['changed']:,} with another text"]
    parts += [f"{counts['retired']:,} retired", f"{counts['returned']:,} back", f"{replaced:,} points replaced"]
    return f"onto {base.url}: {', '.join(parts)}"


def _name_labels(
    pipeline: beam.Pipeline, table: str, raw: Summary, ordered: OrderedLabels, labels: LabelsPlan, bulk: Exchange
) -> dict[str, PCollection]:
    """Return the `blocks` of an input table with the `ids` of the labels that they name."""
    blocks = raw.blocks_of(table)
    numbered = pipeline | f"Blocks {table}" >> beam.Create(list(enumerate(blocks)))
    if any(block.mentions for block in blocks):
        resolving = resolve_labels(ordered, labels.shards, bulk, labels.shards_before)
        return {"blocks": numbered, "ids": numbered | f"Resolve {table}" >> resolving}
    return {"blocks": numbered, "ids": pipeline | f"No ids {table}" >> beam.Create([], reshuffle=False)}


def _parameters(
    attempt: Attempt, summary: Summary, queries: Sequence[QueriesPlan], filter_pairs: Mapping[str, int]
) -> dict[str, Any]:
    inputs, options = attempt.inputs, attempt.options
    has_propensity = options.propensity_a is not None
    filters = {
        split: {"file": url.rsplit("/", 1)[-1], "pairs": filter_pairs[split]} for split, url in inputs.filters.items()
    }
    part = {"part": options.part} if options.part and attempt.base is None else {}
    return {
        **part,
        "format": inputs.format,
        "input": identity.identity(inputs, summary.files),
        "options": attempt.recorded,
        "propensity": {"a": options.propensity_a, "b": options.propensity_b} if has_propensity else None,
        "filters": filters,
        "features": inputs.features or summary.features or None,
        "labels": sum(shard.rows for shard in summary.shards_of("labels")),
        "rows": {plan.split: summary.count(plan.name, "rows_out") for plan in queries},
    }
