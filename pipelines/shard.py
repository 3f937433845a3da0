"""`extremis shard`: turn raw data into a data set.

read      files ─▶ blocks of parsed rows                                                     (then the plans of tables)
join      labels ─▶ order ─▶ ids ─▶ ids of the points' labels
tokenize  blocks ─▶ tokens, label ids ─▶ files of the shards
write     shards ─▶ order ─▶ write                                                           (then publish)

Each line is a flow, and a phase: its files are kept until the next phase is finished, so that a run can resume. A point
is a row of a split, which becomes a query. A pair is a query's key and one label, in formats with files of pairs.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pipelines import formats
from pipelines.flow import Collection, Flow, Packet, flatten
from pipelines.formats.base import LABELS, PAIRS, Inputs, notes_on, unchanged
from pipelines.formats.keyed import Beir, Keyed
from pipelines.job import SUMMARY, Job, Summary, make_table
from pipelines.options import ShardOptions, shard_worker_bytes, vocabulary_size
from pipelines.progress import Progress, silent
from pipelines.runners.local import LocalRunner, absolute_path, choose_runner, for_workers
from pipelines.sharding import plans, publish, read, rows, tokenizer, versions
from pipelines.sharding.earlier import EarlierData
from pipelines.sharding.plans import Attempt, LabelsPlan, PlanInputs, QueriesPlan, ReadPlan, TablePlans
from pipelines.sharding.publish import Finished, Phases
from pipelines.sharding.read import load_packets, store_packets
from pipelines.sharding.rows import FREQUENCIES, REPEATED_KEYS
from pipelines.sharding.tokenizer import FrozenTokenizer
from pipelines.sharding.versions import publish_version, require_most_labels
from schemas import storage
from schemas.arrow import DENSE, DENSE_MODEL, DenseModel
from schemas.errors import ExtremisError, InputError, option
from schemas.layout import phases as phases_of
from schemas.manifest import Manifest, is_published
from schemas.owners import reading, require_output_folder
from schemas.versions import open_data

__all__ = ["ShardOptions", "shard"]
_WORTH_A_JOB = 32 << 20  # bytes of a phase; a smaller phase is finished here before a remote job has started


def shard(
    source: str,
    data: str,
    options: ShardOptions,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Shard the input at `source` (in any of `formats`) into a data set at `data`. Returns the manifest.

    If the data set was already built from the same input with the same options, it is returned; an interrupted run
    resumes. With `overwrite`, any finished data set is removed, and the run starts from the beginning. `progress`
    receives one line per step. Readers never see an incomplete table. Raises InputError (invalid input, or `data`
    contains something else), StorageError.
    """
    say = progress or silent
    choose_runner(beam_options)  # refuses wrong options before anything is read
    source, data = for_workers(beam_options, source), for_workers(beam_options, data)
    if options.onto is not None:
        options = options.model_copy(update={"onto": for_workers(beam_options, options.onto)})
    form = formats.choose(source, options.format, options.fields, options.encoding)
    if options.onto is not None and options.fields is None and isinstance(form, Keyed):
        if named := open_data(options.onto)[0].parameters["options"]["fields"]:
            say(f"fields as in {options.onto}: {named}; {option('fields')} gives other names")
        options = options.model_copy(update={"fields": named})
        form = formats.choose(source, options.format, named, options.encoding)
    if options.onto is not None and isinstance(form, Keyed):
        form = replace(form, labels_needed=False)
    inputs = form.find(source)
    files = publish.files_of(inputs)
    for line in notes_on(source, files):
        say(line)
    require_output_folder(data, "sharded", [options.onto])
    base = None if options.onto is None else EarlierData.open(data, inputs, options)
    usual = "filter" if isinstance(form, Beir) else "keep"  # as in BEIR's own evaluation
    options = base.inherit(options) if base else options.model_copy(update={"same_key": options.same_key or usual})
    plans.check_inputs(inputs, options)
    least = options.max_tokens or tokenizer.LEAST_TOKENS
    frozen = base.load_tokenizer() if base else tokenizer.load_directory(options.tokenizer, least)
    dense = _find_dense_model(options, inputs, base, beam_options)
    # The content identifies a directory's tokenizer; a version has the tokenizer of its base.
    name = f"directory:{storage.sha256(frozen.files[tokenizer.FILE])}" if frozen else options.tokenizer
    name = name if base is None else str(base.manifest.parameters["options"]["tokenizer"])
    recorded = options.recorded(name, None if dense is None else dense.identity())

    described, made = base.described() if base else None, False

    def find() -> Manifest | None:
        if overwrite or not is_published(data):
            return None
        identity = publish.identity(inputs, publish.read_files(inputs))
        finished = publish.open_finished(data, identity, recorded, described)
        say(f"{data}: up to date: built from this input with these options")
        return finished

    def make(job: Job) -> Manifest:
        nonlocal made
        publish.clear(data)
        phases = Phases(absolute_path(phases_of(data)), publish.digest(inputs, recorded, described), job.build.claim)
        facts = source, data, form, inputs, options, recorded, say, phases.folder, overwrite, base, dense
        attempt = Attempt(job.build, job.runner, job.watch, *facts)
        try:
            with contextlib.nullcontext() if base is None else reading(base.url, say):
                manifest = publish.move_to_data(job.build, _make(attempt, phases, frozen))
        except BaseException as error:
            with contextlib.suppress(ExtremisError):
                phases.clear()
                if phases.needed and not isinstance(error, InputError):
                    say(
                        f"{data}: interrupted. The same command resumes from the last finished phase; "
                        f"{option('overwrite', True)} starts from the beginning"
                    )
            raise
        made = True
        return manifest

    # The first phase writes all rows that it reads; a quarter of their size is a guess at their size when compressed.
    needs = {"rows": sum(storage.size(url) for url in files) // 4}
    urls, need = [*files, data, *([base.url] if base else ())], shard_worker_bytes(options.shard_bytes)
    work = data, "sharded", find, make, beam_options, say
    manifest = make_table(*work, needs=needs, urls=urls, reads=files[:1], in_phases=True, worker_bytes=need)
    if made:
        say(f"{data}: published")
    return manifest


def _make(attempt: Attempt, phases: Phases, frozen: FrozenTokenizer | None) -> Manifest:
    """Read, plan, shard and publish. Raises InputError, StorageError."""
    inputs, options, data, say = attempt.inputs, attempt.options, attempt.build.url, attempt.say
    base = attempt.base
    with unchanged(publish.files_of(inputs)):
        finished = None if attempt.anew else publish.find_finished(phases, inputs, attempt.data, say)
        raw = _read(attempt) if finished is None else finished.raw
        filter_pairs = plans.stage_filters(inputs, raw, data)
    say(f"{attempt.source} ({inputs.format}): {_counted(inputs, raw)}")
    for table in ("train", f"{PAIRS}train", LABELS):
        if line := read.describe_first(raw, inputs, table):
            say(line)
    publish.check_rejects(inputs, raw, raw, options)
    if finished is None:
        finished = Finished(publish.READ, raw, Summary())
        publish.record_phase(phases, finished)
    if finished.phase != publish.READ:
        frozen = finished.frozen
    elif base is None:
        frozen = _choose_tokenizer(attempt, raw, frozen)
    source = {"source": attempt.recorded["tokenizer"]}
    tokenizer_manifest = publish.write_tokenizer(data, frozen, source) if frozen else None
    tables = PlanInputs(attempt, raw, frozen, _dimension(attempt, raw)).plan(filter_pairs)
    queries, labels = tables
    say(f"sharding into {', '.join(f'{plan.shards} shards of {plan.split}' for plan in queries)}")
    steps = _steps(raw, queries, labels)
    if finished.phase == publish.READ:
        packets = [packet for block in raw.blocks_of(LABELS) for packet in (block.sampled, block.rest)]
        packets += [block.mentions for block in raw.blocks if block.mentions]
        small = base is None and sum(size for _, _, size, _ in packets) < _WORTH_A_JOB
        where = replace(attempt, runner=LocalRunner()) if small and attempt.runner.far else attempt
        joined = where.run("join", steps[0], lambda flow: join_labels(flow, where, tables, raw))
        finished = Finished(publish.JOINED, raw, joined, frozen)
        publish.record_phase(phases, finished)
    if finished.phase == publish.JOINED:
        joined = finished.later
        tokenized = attempt.run("tokenize", steps[1], lambda flow: tokenize(flow, attempt, tables, raw, joined))
        finished = Finished(publish.TOKENIZED, raw, Summary.sum_of([joined, tokenized]), frozen)
        publish.record_phase(phases, finished)
    later = finished.later
    written = attempt.run("write", steps[2], lambda flow: write(flow, attempt, tables, later))
    summary = Summary.sum_of([raw, later, written])
    publish.check_rejects(inputs, raw, summary, options)
    if base is not None:
        require_most_labels(base, summary)
    elif not summary.count("queries/train", "rows_out"):
        raise InputError(f"{attempt.source}: no points with labels in {inputs.shown('train')}. Give at least one row.")
    if options.same_key == "filter":
        own = sum(summary.count(plan.name, "filter_pairs_applied") for plan in queries)
        kept = option("same_key", "filter")
        say(f"{own:,} queries have the key of a label, which is never their negative or prediction ({kept})")
    rejects = publish.write_rejects(data, summary.rejected, attempt.files("sorted"))
    parameters = _parameters(attempt, summary, queries, filter_pairs, max(plan.dense for plan in (*queries, labels)))
    if base is not None:
        say(_changes(base, summary))
        if open_data(base.url)[0].digest != base.manifest.digest:
            raise InputError(f"{base.url}: another command has just rebuilt this data set. Run the command again.")
        return publish_version(data, base, summary, queries, labels, rejects, parameters)
    return publish.publish(data, summary, tokenizer_manifest, queries, labels, rejects, parameters)


def _read(attempt: Attempt) -> Summary:
    """Run the first flow, which writes blocks of parsed rows to staging."""
    options, meter, same_key = attempt.options, attempt.watch.meter, attempt.options.same_key == "filter"
    channels = attempt.files("bulk"), attempt.files(plans.BLOCKS), attempt.files(plans.REJECTS)
    reading = ReadPlan(
        attempt.form, attempt.inputs, options.text, *channels, options.seed, read.BLOCK_ROWS, same_key, meter
    )
    return attempt.run("read", dict.fromkeys((read.READ, read.PARSE)), lambda flow: read.read(flow, reading))


def join_labels(flow: Flow, attempt: Attempt, tables: TablePlans, raw: Summary) -> Collection:
    """Order the labels, find the ids of the points' labels, and store both for later flows. Returns Summary.

    raw: summary of the first flow, with its blocks.
    """
    base, labels, blocks = attempt.base, tables.labels, raw.blocks_of(LABELS)
    summaries = []
    if base is None:
        ordered = rows.order_labels(flow, labels, blocks)
    else:
        ordered = versions.order_labels_onto(flow, labels, base, blocks)
        kept = versions.STATES, versions.CHANGED
        summaries += [store_packets(ordered[name], name, labels.files[plans.LABELS_DONE]) for name in kept]
    summaries.append(ordered[SUMMARY] + store_packets(ordered[read.ROWS], LABELS, labels.files[plans.LABELS_DONE]))
    for table, groups in _groups(tables, raw).items():
        if any(block.mentions for _, blocks in groups for block in blocks):
            named = flow.create(f"Blocks of {table}", groups)
            resolved = rows.resolve_labels(named, ordered, labels, attempt.options.seed)
            summaries.append(store_packets(resolved, f"ids of {table}", labels.files[plans.IDS]))
    return flatten(summaries)


def _groups(tables: TablePlans, raw: Summary) -> dict[str, list[tuple[int, rows.BlockGroup]]]:
    """Return the blocks of points and of pairs in numbered groups, by input table; the same groups in both flows."""
    sources = dict.fromkeys(table for plan in tables.queries for table in (plan.source, PAIRS + plan.source))
    return {table: rows.group_blocks(raw.blocks_of(table), tables.labels.shards) for table in sources}


def tokenize(flow: Flow, attempt: Attempt, tables: TablePlans, raw: Summary, joined: Summary) -> Collection:
    """Send every split's rows, tokenized and with label ids, to the files of their shards. Returns Summary."""
    groups = {
        table: [(blocks, joined.kept.get(f"ids of {table}", {}).get(number)) for number, blocks in some]
        for table, some in _groups(tables, raw).items()
    }
    summaries = [rows.assemble_queries(flow, plan, groups) for plan in tables.queries]
    if (base := attempt.base) and base.again == "merge":
        growing = [plan for plan in tables.queries if plan.older]
        summaries += [versions.keep_labels_before(flow, plan, base, raw.blocks_of(plan.source)) for plan in growing]
    return flatten(summaries)


def write(flow: Flow, attempt: Attempt, tables: TablePlans, assembled: Summary) -> Collection:
    """Write all tables from the output of `tokenize`, with training counts for the labels. Returns Summary."""
    base, labels, built = attempt.base, tables.labels, attempt.build.url
    written = {plan.split: rows.write_queries(flow, plan, assembled) for plan in tables.queries}
    summaries = [outputs[SUMMARY] for outputs in written.values()]
    counts = written["train"][FREQUENCIES]
    for plan in tables.queries:
        if plan.older and base is not None:
            gone = versions.remove_replaced(
                written[plan.split][REPEATED_KEYS], plan, base, built, assembled.label_sizes
            )
            summaries.append(gone[SUMMARY])
            if plan.split == "train":
                counts += gone[FREQUENCIES]
    if base is not None:
        kept = {name: load_packets(flow, assembled, name) for name in (versions.STATES, versions.CHANGED)}
        older = counts.flat_map("Of labels before", _counts_of, labels.shards_before, False)
        patched = flow.join("Join what changes", {"counts": older, **kept})
        summaries.append(patched.map("Patch labels", versions.patch_labels, base, built))
        counts = counts.flat_map("Of new labels", _counts_of, labels.shards_before, True)
    return flatten([*summaries, rows.write_labels(counts, labels, assembled)])


def _counts_of(element: tuple[int, Packet], before: int, new: bool) -> Iterator[tuple[int, Packet]]:
    """Yield (label shard, packet of counts) if the shard contains new labels, or, without `new`, earlier labels."""
    if (element[0] >= before) == new:
        yield element


def _steps(raw: Summary, queries: Sequence[QueriesPlan], labels: LabelsPlan) -> tuple[dict[str, int | None], ...]:
    """Return the steps of the later flows with row counts. Splits that are taken from one table share its rows."""
    points = sum(
        round(raw.count_input(plan.source, "rows") * (min(plan.hash_range[1], 1.0) - plan.hash_range[0]))
        for plan in queries
    )
    return (
        {rows.ENCODE_LABELS: labels.rows, rows.ORDER_LABELS: labels.rows, rows.SEND: None, rows.LOOK_UP: None},
        {rows.ENCODE_QUERIES: points},
        {rows.ORDER_QUERIES: points, rows.WRITE_QUERIES: points, rows.WRITE_LABELS: labels.rows},
    )


def _find_dense_model(
    options: ShardOptions, inputs: Inputs, base: EarlierData | None, beam_options: Sequence[str]
) -> DenseModel | None:
    """Return the model that computes dense vectors of texts, given by the earlier data or the options, or None.

    Raises InputError if --embed is given but INPUT has its own vectors, or if vectors do not match the earlier data.
    """
    given = next((part for part in inputs.parts if part.contents.dense and not part.contents.derived), None)
    if options.embed and given:
        raise InputError(
            f"{option('embed')}: {given.name} has its own vectors of {given.contents.dense:,} numbers. Leave "
            f"{option('embed')} out, or remove the vectors from INPUT."
        )
    before = base.dense_model if base else None
    name = options.embed or (before.name if before and not given else None)
    if base is not None:
        has = "computed by a model" if name else given.contents.dense if given else 0
        had = "computed by a model" if before else base.manifest.parameters.get(DENSE) or 0
        if has != had:
            raise InputError(
                f"{option('onto')}: dense vectors differ in length or origin ({base.url}: {had or 'none'}; INPUT: "
                f"{has or 'none'}). Give INPUT with the same kind of dense vectors."
            )
    if name is None:
        return None
    from pipelines.models import find_dense_model  # needs the trainer's packages, which may be missing

    found = find_dense_model(name, beam_options)
    if before is not None:
        found = replace(found, compute=before.compute)
        if differing := {*found.identity().items()} - {*before.identity().items()}:
            raise InputError(
                f"{option('embed', name)}: the earlier version has vectors of another model, {before.name} (different: "
                f"{', '.join(name for name, _ in sorted(differing))}). Give the same model."
            )
    return found


def _choose_tokenizer(attempt: Attempt, raw: Summary, frozen: FrozenTokenizer | None) -> FrozenTokenizer | None:
    """Return `frozen`, the hub's tokenizer, or a tokenizer trained on a sample of the texts; None without texts.

    The length limit comes from the options, or else from the texts.
    """
    options, tables = attempt.options, ("train", LABELS)
    if not any(raw.count_input(table, "text_bytes") for table in (*attempt.inputs.splits, LABELS)):
        return None
    attempt.say(f"tokenizer: {options.tokenizer}")
    limit = options.max_tokens or tokenizer.LEAST_TOKENS
    if frozen is None and (size := vocabulary_size(options.tokenizer)) is not None:
        blocks = [block for table in tables for block in raw.blocks_of(table)]
        total = sum(raw.count_input(table, "rows") for table in tables)
        texts = read.sample_texts(blocks, total, options.tokenizer_texts)
        frozen = tokenizer.freeze(tokenizer.train_wordpiece(texts, size), {}, limit)
    elif frozen is None:
        frozen = tokenizer.load_hub(options.tokenizer, limit)
    if options.max_tokens:
        return frozen
    samples = (
        read.sample_texts(raw.blocks_of(table), raw.count_input(table, "rows"), tokenizer.SAMPLE_TEXTS)
        for table in tables
    )
    limit = tokenizer.choose_length(frozen, samples, options.tokenizer)
    attempt.say(f"texts are truncated to at most {limit} tokens")
    return frozen.with_max_tokens(limit)


def _dimension(attempt: Attempt, raw: Summary) -> int:
    """Return the length of the vectors that a model computes; 0 without a model. Raises InputError without texts."""
    if attempt.dense is None:
        return 0
    if not any(raw.count_input(table, "text_bytes") for table in (*attempt.inputs.splits, LABELS)):
        raise InputError(f"{option('embed')}: {attempt.source} contains no texts. Leave {option('embed')} out.")
    from pipelines.models import dimension_of

    dimension = dimension_of(attempt.dense)
    attempt.say(f"{attempt.dense.name}: vectors of {dimension} numbers, computed in {attempt.dense.compute}")
    return dimension


def _counted(inputs: Inputs, raw: Summary) -> str:
    """Describe the input's points, or, if splits share their points, the queries and the pairs of each split."""
    if inputs.shared_points:
        pairs = ", ".join(f"{raw.count_input(PAIRS + split, 'rows'):,} pairs of {split}" for split in inputs.splits)
        return f"{raw.count_input(inputs.splits[0], 'rows_in'):,} queries, {pairs}"
    return ", ".join(f"{raw.count_input(split, 'rows'):,} {split} points" for split in inputs.splits)


def _changes(base: EarlierData, summary: Summary) -> str:
    """Describe the rows that the version adds to `base`, and the changes to earlier rows."""
    counts = summary.counters.get(LABELS, Counter())
    replaced, lost = (sum(counts[name] for counts in summary.counters.values()) for name in ("replaced", "labels_lost"))
    parts = [f"{counts['new']:,} new labels", f"{counts['changed']:,} labels with a new text"]
    parts += [f"{counts['retired']:,} retired", f"{counts['returned']:,} returned", f"{replaced:,} points replaced"]
    parts += [f"{lost:,} of their labels are not repeated ({option('again', 'merge')} keeps them)"] if lost else []
    return f"onto {base.url}: {', '.join(parts)}"


def _parameters(
    attempt: Attempt, summary: Summary, queries: Sequence[QueriesPlan], filter_pairs: Mapping[str, int], dense: int
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
        "input": publish.identity(inputs, summary.files),
        "options": attempt.recorded,
        "propensity": {"a": options.propensity_a, "b": options.propensity_b} if has_propensity else None,
        "filters": filters,
        "features": inputs.features or summary.features or None,
        **({DENSE: dense} if dense else {}),
        **({DENSE_MODEL: attempt.dense.as_json()} if attempt.dense else {}),
        "labels": sum(shard.rows for shard in summary.shards_of("labels")),
        "rows": {plan.split: summary.count(plan.name, "rows_out") for plan in queries},
    }
