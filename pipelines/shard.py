"""Raw data to a data set: find the input, read it, settle the plan, run the pipeline, publish."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import apache_beam as beam

from pipelines import formats
from pipelines.common import exchange
from pipelines.common.exchange import Exchange, Files
from pipelines.common.progress import silent
from pipelines.formats.base import LABELS, PAIRS, Context, Format, Inputs
from pipelines.runners.runner import local_workers, make_pipeline, run
from pipelines.sharding import dataset, identity, read, sampling, tokenizer, wordpiece
from pipelines.sharding import make_plan as planning
from pipelines.sharding.labels import OrderedLabels, OrderLabels, WriteLabels
from pipelines.sharding.options import ShardOptions
from pipelines.sharding.plan import LabelsPlan, QueriesPlan, ReadPlan
from pipelines.sharding.queries import FREQUENCIES, Named, ShardQueries
from pipelines.sharding.resolve import ResolveLabels
from pipelines.sharding.summary import SUMMARY, MergeSummaries, Summary, WriteSummary
from pipelines.sharding.tokenizer import FrozenTokenizer
from schemas import storage
from schemas.errors import StorageError
from schemas.layout import DataLayout
from schemas.manifest import Manifest
from schemas.storage import join

__all__ = ["ShardOptions", "shard"]

Tell = Callable[[str], None]


def shard(
    source: str,
    data: str,
    options: ShardOptions,
    beam_options: Sequence[str] = (),
    progress: Tell | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Shard the input at `source` (any form of `formats`) to the prefix `data`; the data set's manifest.

    A finished data set of the same input and options is returned as it is; an unfinished attempt is made again.
    `overwrite` removes a finished one first, whatever it was made from. `progress` is told each step in a line.
    Raises InputError (bad input, or `data` holds something else) and StorageError; nothing half-written stays.
    """
    tell = progress or silent
    make_pipeline(beam_options)  # refuses wrong options before anything is read
    form = formats.choose(source, options.format, options.fields)
    inputs = form.find(source)
    planning.check(inputs, options)
    given = tokenizer.load_directory(options.tokenizer, options.max_tokens)
    recorded = options.recorded(f"directory:{given.sha256}" if given else options.tokenizer)
    if not overwrite and dataset.is_finished(data):
        now = identity.identity(inputs, identity.read_files(inputs))
        finished = dataset.open_finished(data, now, recorded)
        dataset.end(data)  # a run that was stopped right after publishing may have left it
        tell(f"{data}: made from this input with these options already; nothing to do")
        return finished
    dataset.begin(data)
    try:
        flags = local_workers(beam_options, [*identity.files_of(inputs), data])
        manifest = _Run(source, data, form, inputs, options, recorded, flags, tell).make(given)
    except BaseException:
        with contextlib.suppress(StorageError):  # of the two errors the first is the cause
            dataset.clear(data)
        raise
    dataset.end(data)
    tell(f"{data}: published")
    return manifest


class _Run:
    """One attempt, from the input's files to the published data set."""

    def __init__(
        self,
        source: str,
        data: str,
        form: Format,
        inputs: Inputs,
        options: ShardOptions,
        recorded: Mapping[str, Any],
        beam_options: Sequence[str],
        tell: Tell,
    ) -> None:
        self._source, self._data, self._form, self._inputs = source, data, form, inputs
        self._options, self._recorded, self._beam_options, self._tell = options, recorded, beam_options, tell
        self._staging = DataLayout(data).staging

    def make(self, given: FrozenTokenizer | None) -> Manifest:
        """Read, plan, shard, publish. Raises InputError, StorageError."""
        inputs, options, data = self._inputs, self._options, self._data
        found = self._read()
        counts = ", ".join(f"{found.count_input(split, 'rows_in'):,} {split} points" for split in inputs.splits)
        self._tell(f"{self._source} ({inputs.format}): {counts}, {found.count_input(LABELS, 'rows_in'):,} labels")
        dataset.check_rejects(inputs, found, found, options.max_reject_share)
        filter_pairs = planning.stage_filters(inputs, found, data)
        frozen = self._tokenizer(found, given)
        made = self._write_tokenizer(frozen) if frozen else None
        vocabulary = frozen.vocabulary if frozen else None
        labels = planning.plan_labels(inputs, found, data, options, vocabulary)
        queries = planning.plan_queries(inputs, found, data, options, vocabulary, filter_pairs)
        self._tell(f"sharding into {', '.join(f'{plan.shards} shards of {plan.split}' for plan in queries)}")
        summary = found.merge(self._shard(found, queries, labels))
        dataset.check_rejects(inputs, found, summary, options.max_reject_share)
        rejects = dataset.write_rejects(data, summary.rejected)
        if rejects.rows:
            self._tell(f"{rejects.rows:,} rejects: see {DataLayout(data).rejects}")
        parameters = self._parameters(found, summary, queries, filter_pairs)
        return dataset.publish(data, summary, made, queries, labels, rejects, parameters)

    def _read(self) -> Summary:
        inputs, options = self._inputs, self._options
        plan = ReadPlan(
            form=self._form,
            parts=inputs.parts,
            files=identity.files_of(inputs),
            context=Context(options.text, inputs.labels, inputs.features),
            staging=join(self._staging, "rows"),
            seed=options.seed,
            block_rows=read.BLOCK_ROWS,
        )
        return self._run("read", lambda pipeline, bulk, url: read.build(pipeline, plan, bulk, url))

    def _shard(self, found: Summary, queries: Sequence[QueriesPlan], labels: LabelsPlan) -> Summary:
        staged = Files(join(self._staging, "rejects"))
        return self._run(
            "shard", lambda pipeline, bulk, url: build(pipeline, found, queries, labels, bulk, staged, url)
        )

    def _run(self, name: str, wire: Callable[[beam.Pipeline, Exchange, str], None]) -> Summary:
        pipeline = make_pipeline(self._beam_options)
        bulk = exchange.choose(pipeline.runner, join(self._staging, name), self._options.exchange)
        url = join(self._staging, f"{name}.json")
        wire(pipeline, bulk, url)
        run(pipeline)
        return Summary.from_json(storage.read_bytes(url))

    def _tokenizer(self, found: Summary, given: FrozenTokenizer | None) -> FrozenTokenizer | None:
        """The given one, the hub's, or one that learns from a sample of the texts; None where nothing has a text."""
        options, tables = self._options, ("train", LABELS)
        if not any(found.count_input(table, "text_bytes") for table in (*self._inputs.splits, LABELS)):
            return None
        self._tell(f"tokenizer: {options.tokenizer}")
        if given:
            return given
        size = tokenizer.parse_name(options.tokenizer)
        if size is None:
            return tokenizer.load_hub(options.tokenizer, options.max_tokens)
        blocks = [block for table in tables for block in found.blocks_of(table)]
        rows = sum(found.count_input(table, "rows") for table in tables)
        texts = sampling.sample_texts(blocks, rows, options.tokenizer_texts)
        return tokenizer.freeze(wordpiece.train(lambda: sampling.iterate(texts), size), {}, options.max_tokens)

    def _write_tokenizer(self, frozen: FrozenTokenizer) -> Manifest:
        return Manifest(
            kind="tokenizer",
            shards=dataset.write_tokenizer(self._data, frozen),
            parameters={
                "vocabulary": frozen.vocabulary,
                "max_tokens": self._options.max_tokens,
                "source": self._recorded["tokenizer"],
            },
        )

    def _parameters(
        self, found: Summary, summary: Summary, queries: Sequence[QueriesPlan], filter_pairs: Mapping[str, int]
    ) -> dict[str, Any]:
        inputs, options = self._inputs, self._options
        known = options.propensity_a is not None
        filters = {
            split: {"file": url.rsplit("/", 1)[-1], "pairs": filter_pairs[split]}
            for split, url in inputs.filters.items()
        }
        return {
            "format": inputs.format,
            "input": identity.identity(inputs, found.files),
            "options": self._recorded,
            "propensity": {"a": options.propensity_a, "b": options.propensity_b} if known else None,
            "filters": filters,
            "features": inputs.features or found.features or None,
            "labels": sum(shard.rows for shard in summary.shards_of("labels")),
            "rows": {plan.split: summary.count(plan.name, "rows_out") for plan in queries},
        }


def build(
    pipeline: beam.Pipeline,
    found: Summary,
    queries: Sequence[QueriesPlan],
    labels: LabelsPlan,
    bulk: Exchange,
    staged: Files,
    summary_url: str,
) -> None:
    """Wire the whole flow: labels in order, every split with its labels' ids, training counts, one summary at the end.

    found: the first pipeline's blocks. Bulk data goes through `bulk`, rejects through `staged`.
    """
    ordered = pipeline | "Labels" >> OrderLabels(labels, found.blocks_of(LABELS), bulk, staged)
    tables = dict.fromkeys(table for plan in queries for table in (plan.source, PAIRS + plan.source))
    named = {table: _named(pipeline, table, found, ordered, labels.shards, bulk) for table in tables}
    made = {}
    for plan in queries:
        pairs = named[PAIRS + plan.source] if plan.pairs else None
        sharded = ShardQueries(plan, named[plan.source], pairs, ordered.sizes, labels.shards, bulk, staged)
        made[plan.split] = pipeline | f"Queries {plan.split}" >> sharded
    written = made["train"][FREQUENCIES] | "Write labels" >> WriteLabels(labels, ordered)
    _ = (
        [ordered.summary, written, *(outputs[SUMMARY] for outputs in made.values())]
        | "All summaries" >> beam.Flatten()
        | "Merge summaries" >> beam.CombineGlobally(MergeSummaries())
        | "Write summary" >> beam.ParDo(WriteSummary(summary_url))
    )


def _named(
    pipeline: beam.Pipeline, table: str, found: Summary, ordered: OrderedLabels, shards: int, bulk: Exchange
) -> Named:
    blocks = found.blocks_of(table)
    numbered = pipeline | f"Blocks {table}" >> beam.Create(list(enumerate(blocks)))
    if any(block.mentions for block in blocks):
        return Named(numbered, numbered | f"Resolve {table}" >> ResolveLabels(ordered, shards, bulk))
    return Named(numbered, pipeline | f"No ids {table}" >> beam.Create([], reshuffle=False))
