"""Setup of a run: `set_up` opens and builds what the recipe requires, or refuses it early; its parts follow."""

import itertools
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from schemas import code_version
from schemas.errors import InputError, option
from schemas.layout import LABEL_TEXTS, DataLayout, RunLayout
from schemas.owners import Claim
from schemas.storage import require_room
from schemas.table import Table
from schemas.versions import Version
from schemas.waits import Say
from trainer.checkpoints import CheckpointWriter
from trainer.device import CPU, describe_device, keep_freed_memory, open_device
from trainer.evaluation.evaluate import Validator, label_statistics, positive_weights, retired_labels
from trainer.group import SILENCE_SECONDS, Group, label_range
from trainer.heads import FrozenQueries, QueryEmbeddings, SubBatches, WholeBatch, merges_on
from trainer.methods.keys import flatten
from trainer.methods.recipe import ClassifierRecipe, Recipe
from trainer.model import (
    DataSizes,
    Model,
    find_earlier,
    initialise_from_run,
    initialise_from_texts,
    load_encoder_of_run,
    open_texts,
)
from trainer.modules import digests
from trainer.negatives.base import NegativeSource, NegativeSources, SourceContext
from trainer.negatives.planner import Planner
from trainer.refresh.dump import DumpWriter
from trainer.rows.kernels import check_kernels, name_kernels
from trainer.settings.data_statistics import describe_textless_labels
from trainer.sizes import encoder_bytes, label_bounds, label_bytes, require_memory, require_scratch
from trainer.step import Clock, GlobalBatches, StepContext, plan_for_device
from trainer.stream import Batch, JoinedStream, ReadOptions, Source, by_shares, open_sources
from trainer.stream.batch import Candidates
from trainer.stream.sources import Replay, select_window
from trainer.threads import set_threads
from trainer.tracking import NoTracker, Tracker

# Options that may change when a run is resumed, because they do not change the training itself.
_RESUMABLE_OPTIONS = {"name", "classifier.storage", "train.device", "logging.wandb", "logging.mlflow"}


@dataclass(frozen=True)
class RunContext:
    """Everything that a run needs on one rank: model, stream, writers."""

    recipe: Recipe
    data: DataLayout
    run: RunLayout
    group: Group
    say: Say
    claim: Claim  # rank 0's claim on the run
    sizes: DataSizes
    sources: list[Source]  # of training rows
    stream: JoinedStream
    batches: GlobalBatches  # batches of the stream
    step: StepContext
    dump_writer: DumpWriter
    validator: Validator
    writer: CheckpointWriter
    tracker: Tracker | NoTracker
    kernels: str  # that step on rows: `name_kernels`, or none

    @property
    def model(self) -> Model:
        return self.step.model

    @property
    def labels(self) -> int:
        return self.sizes.labels


def set_up(
    data: DataLayout, run: RunLayout, recipe: Recipe, say: Say, group: Group, claim: Claim, threads: int = 0
) -> RunContext:
    """Open and build what a run needs, on every rank. Raises InputError, TableError.

    `threads`: torch threads (0: one per core) if the recipe does not set them.
    """
    say = say if group.first else lambda line: None
    keep_freed_memory()
    if recipe.train.threads or threads:
        set_threads(recipe.train.threads or threads)
    device = open_device(recipe.train.device)
    say(f"device: {describe_device(device)}")
    sizes = DataSizes.of(data)
    rows, inputs = recipe.data, recipe.encoder.inputs
    sources = open_sources(data, rows.split, rows.label_texts, inputs, rows.mix, rows.training_rows)
    sources = by_shares(sources) if rows.mix_by == "shares" else sources
    sources = select_window(sources, rows.parts, open_replay(data, recipe))
    require_whole_epochs(recipe)
    require_label_texts(data, recipe, say)
    require_streamable(recipe, sources, data.root, group)
    validator = Validator(recipe.validation, recipe.data, data, group)
    validator.check(inputs)
    require_consistent_ranks(recipe, sizes, group, device)
    second_loss = recipe.second_loss(run)
    rows_trained = sum(source.rows for source in sources)
    require_scratch(recipe, rows_trained, sizes.labels, group.ranks, sizes.dense, second_loss)
    texts, bounds = open_texts(data, recipe), group.decide(lambda: label_bounds(data, recipe, group.ranks))
    bounds = bounds or [label_range(sizes.labels, rank, group.ranks)[0] for rank in range(group.ranks)] + [sizes.labels]
    counts = sizes.vocabulary, sizes.labels, sizes.features
    model = Model.build(recipe, *counts, group, texts, device, bounds, sizes.dense)
    stepped = itertools.chain(model.head.matrices, *(encoder.matrices for encoder in model.encoders.values()))
    forms = [matrix.form for matrix in stepped]
    if replaced := check_kernels(forms, group):
        say(replaced)
    planner = open_planner(recipe, data, sizes.labels, group, say, device, bounds)
    negative_sources = open_negative_sources(recipe, model, group)
    plans_ahead = not negative_sources and model.head.has_rows  # otherwise planning needs the model
    clock = Clock()
    queries = open_query_embeddings(recipe, model, group, clock)
    # Several ranks plan the global batch, but a stream has only this rank's part of the batch.
    plan = partial(plan_for_device, planner, device) if plans_ahead and group.ranks == 1 else None
    stream = open_stream(recipe, sources, sizes.labels, group, plan, queries.preparing())
    writer = CheckpointWriter(run, recipe.checkpoint.keep, recipe.checkpoint.background, group, claim)
    to_notify = [each for each in negative_sources if type(each).touch is not NegativeSource.touch]

    def before_change(candidates: Candidates, merged: torch.Tensor | None) -> None:
        if writer.copies_rows:
            writer.before_change(candidates.ids if merged is None else merged)
        if to_notify:
            rows = candidates.touched
            for source in to_notify:
                source.touch(rows)

    step = StepContext(
        model, planner, queries, group, negative_sources, clock, before_change, recipe.train.clip, second_loss
    )
    batches = GlobalBatches(stream, planner, group.for_another_thread(), recipe.order.threads, plans_ahead)
    tracker = Tracker(run, recipe.logging, recipe.model_dump(mode="json"), claim, say) if group.first else NoTracker()
    dumps = DumpWriter(run, recipe, group, claim, writer)
    opened = sizes, sources, stream, batches, step, dumps, validator, writer, tracker
    kernels = name_kernels(device) if forms else "none"
    return RunContext(recipe, data, run, group, say, claim, *opened, kernels)


def require_consistent_ranks(recipe: Recipe, sizes: DataSizes, group: Group, device: torch.device = CPU) -> None:
    """On all ranks, refuse different releases, a rank without memory for its part, or two ranks on one GPU."""
    refusal = ""
    try:
        require_memory(recipe, sizes, group.ranks)
    except InputError as error:
        refusal = str(error)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpu = None if device == CPU else (socket.gethostname(), visible, str(device))
    modules = digests(recipe.method, recipe.loss.kind).items()
    version = ", ".join([code_version(), *(f"{name} {digest[:12]}" for name, digest in modules)])
    fleet = group.all_gather_objects((version, refusal, gpu))
    gpus: dict[tuple[str, str | None, str], int] = {}
    for rank, (version, refused, gpu) in enumerate(fleet):
        name = f"rank {rank} of {group.ranks}: " if group.ranks > 1 else ""
        if version != fleet[0][0]:
            raise InputError(
                f"{name}this rank has Extremis {version}, but rank 0 has {fleet[0][0]}. Install the same version, and "
                "the same modules of your own, on all machines."
            )
        if refused:
            raise InputError(name + refused)
        if gpu is not None and gpus.setdefault(gpu, rank) != rank:
            raise InputError(
                f"ranks {gpus[gpu]} and {rank} of {group.ranks} are both on {gpu[2]} of {gpu[0]}: each rank needs its "
                "own GPU. Launch as many ranks as the machine has GPUs (torchrun --nproc-per-node), or set "
                "train.device = 'cpu'."
            )


def require_whole_epochs(recipe: Recipe) -> None:
    """Refuse mined tables and clusters if the recipe leaves rows of parts out of an epoch. Raises InputError."""
    if not recipe.data.by_parts or not any(recipe.table_epochs()):  # the table of epoch 0 has all rows
        return
    if recipe.is_clustered:
        raise InputError("order.cluster needs all rows of a split: leave out the keys that select or weight parts.")
    if recipe.data.replay < 1:
        raise InputError(
            "data.replay leaves rows out of an epoch, so the embeddings of the epoch cannot be mined. Use an index "
            "inside the trainer (refresh.source = 'in-trainer'), or random negatives only (negatives.hard = 0)."
        )


def require_label_texts(data: DataLayout, recipe: Recipe, say: Say) -> None:
    """Report labels without a text if the recipe encodes texts, and refuse many. Raises InputError, TableError."""
    uses = {
        f"method = {recipe.method!r}": recipe.encodes_labels,
        "data.label_texts = true": recipe.data.label_texts,
        f"data.mix.{LABEL_TEXTS}": LABEL_TEXTS in recipe.data.mix,
        "refresh.by = 'labels'": not recipe.encodes_labels
        and recipe.tables is not None
        and recipe.table_parameters.get("by") == "labels",
        "train.new_labels = 'texts'": recipe.train.start_from and recipe.train.new_labels == "texts",
        "classifier.initial = 'labels'": isinstance(recipe, ClassifierRecipe) and recipe.classifier.initial == "labels",
    }
    used = ", ".join(name for name, value in uses.items() if value)
    described, too_many = describe_textless_labels(data, recipe.encoder.inputs, recipe.data) if used else ("", False)
    if too_many:
        raise InputError(
            f"{data.labels}: {described}. These settings need the texts: {used}. Add the texts and shard again, or "
            f"train without texts of labels, for example astra with {option('set', {'data.label_texts': False})}."
        )
    if described:
        say(f"odd: {described}. These settings use the texts of labels: {used}")


def open_replay(data: DataLayout, recipe: Recipe) -> Replay | None:
    """Return the parts that the run `train.start_from` was trained on, whose rows are dealt less often."""
    times, url = recipe.data.replay, recipe.train.start_from
    if times == 1:
        return None
    if not url:
        raise InputError(f"data.replay needs an earlier run: name the run with {option('from_run')}.")
    _, _, new = find_earlier(data, RunLayout(url))
    parts = Version.of(Table.open(data.root, "data").manifest).parts
    return Replay(frozenset(parts) - frozenset(new), times)


def open_planner(
    recipe: Recipe,
    data: DataLayout,
    labels: int,
    group: Group,
    say: Say,
    device: torch.device = CPU,
    bounds: Sequence[int] = (),
) -> Planner:
    """Build a rank's planner; `bounds` [G + 1] of the labels of all ranks. Raises TableError."""
    # If labels are encoded, a rank plans for all labels, because it takes a share of the labels in each batch.
    label_ranges = () if group.ranks == 1 or recipe.encodes_labels else tuple(itertools.pairwise(bounds))
    weights = positive_weights(data, recipe.train, say, recipe.data)
    frequency = label_statistics(data, recipe.data).frequency if recipe.negatives.by_frequency else None
    return Planner(
        recipe.negatives_of(labels),
        labels,
        recipe.train.seed,
        weights,
        label_ranges,
        group.rank,
        recipe.negative_counts(),
        frequency,
        positives=recipe.positives,
        retired=retired_labels(data),
        merges=not merges_on(device, recipe),
    )


def open_negative_sources(recipe: Recipe, model: Model, group: Group) -> NegativeSources:
    """Open the sources that need embeddings. Raises InputError if one of them cannot run on several ranks."""
    on_device = group.ranks == 1 and recipe.keeps_negatives_on_device and merges_on(model.device, recipe)
    context = SourceContext(model.head, group, recipe.train.seed, on_device=on_device)
    opened = NegativeSources(recipe.open_sources(context))
    stateful = [source.name for source in opened if source.stateful]
    if stateful and group.ranks > 1:
        raise InputError(
            f"negatives.{stateful[0]} on {group.ranks} ranks: this sampler works on a single rank only. Train on one "
            "rank, or use negatives from tables or from the index inside the trainer (negatives.hard)."
        )
    return opened


def open_query_embeddings(recipe: Recipe, model: Model, group: Group, clock: Clock) -> QueryEmbeddings:
    """Choose how queries are encoded in training."""
    if recipe.train.freeze_encoder:
        return FrozenQueries(model.encoder)
    if recipe.train.accumulate > 1 or recipe.encodes_labels:
        return SubBatches(model.encoder, recipe.train.accumulate)
    return WholeBatch(model.encoder, group, clock.lap)


def open_stream(
    recipe: Recipe,
    sources: list[Source],
    labels: int,
    group: Group,
    plan: Callable[[Batch], Candidates | None] | None = None,
    prepare: Callable[[Batch], Any] | None = None,
) -> JoinedStream:
    """Open the rank's stream over `sources`; `plan` plans the candidates of a batch, `prepare` prepares a batch."""
    order, reading = recipe.order, recipe.storage
    return JoinedStream(
        sources,
        labels,
        inputs=recipe.encoder.inputs,
        clusters=order.clusters,
        seed=recipe.train.seed,
        rank=group.rank,
        ranks=group.ranks,
        plan=plan,
        prepare=prepare,
        damaged=reading.damaged,
        reading=ReadOptions(
            verify=reading.verify, threads=reading.fetch_threads, cache=reading.cache, cache_bytes=reading.cache_bytes
        ),
        **order.model_dump(include={"batch", "streams", "batches", "window_groups", "threads"}),
    )


def require_room_for_run(context: RunContext) -> None:
    """Refuse to start a run if its checkpoints and dumps do not fit on the disk. Raises InputError."""
    if not context.group.first:
        return
    recipe, vectors = context.recipe, context.labels * label_bytes(context.recipe).parameters
    checkpoints = (recipe.checkpoint.keep + 1) * (vectors + encoder_bytes(recipe, context.sizes))
    rows = sum(source.rows for source in context.sources)
    tables = len(recipe.table_epochs())
    if recipe.tables is not None and recipe.tables.keep:
        tables = min(tables, recipe.checkpoint.keep)
    dumps = (vectors + 2 * rows * recipe.encoder.dimension) * tables
    needs = {f"checkpoints ({recipe.checkpoint.keep} are kept while one is written)": checkpoints, "dumps": dumps}
    remedy = "Choose another path, or lower encoder.dimension, checkpoint.keep or the number of refreshes"
    require_room(context.run.root, needs, f"{remedy} (refresh.every).")


def initialise_model(context: RunContext) -> None:
    """Initialise the model from the data and from another run. Raises InputError, TableError."""
    recipe, model = context.recipe, context.model
    if initialise_from_run(model, context.data, recipe, context.say):
        return
    began = load_encoder_of_run(model, context.data, recipe)
    for name, encoder in model.encoders.items():
        if not (began and name == "encoder"):
            encoder.begin(context.data)
            batches = open_stream(recipe, context.sources, context.labels, context.group)
            queries = (batch.inputs for batch in batches)
            encoder.fit(itertools.chain(queries, model.head.label_inputs()), context.group)
    if isinstance(recipe, ClassifierRecipe) and recipe.classifier.initial == "labels":
        initialise_from_texts(model, context.data, recipe.classifier.initial_scale)


def require_streamable(recipe: Recipe, sources: list[Source], data: str, group: Group) -> None:
    """Refuse tables without row groups, and waits so long that a waiting rank would seem lost. Raises InputError."""
    waits = recipe.tables.wait_seconds if recipe.tables else 0.0
    if group.ranks > 1 and waits >= SILENCE_SECONDS:
        raise InputError(
            f"refresh.wait_seconds = {waits:g}: ranks treat a rank that is silent for {SILENCE_SECONDS:g} seconds as "
            "lost. Set a lower value."
        )
    if None in {source.table.manifest.row_group_rows for source in sources}:
        raise InputError(f"{data}: this table has no row groups, which training needs. Shard the data again.")


def require_same_recipe(started: dict[str, Any], stated: dict[str, Any], run: str) -> None:
    """Refuse to resume a run with a different recipe. Raises InputError, which lists the differences."""
    before, after = flatten(started), flatten(stated)
    after = {**{key: None for key in before if key.startswith("data.mix.")}, **after}
    same_sources = started["data"]["mix"].keys() == stated["data"]["mix"].keys()  # their shares may differ
    differing = [
        f"{key} was {before.get(key)!r}, now {value!r}"
        for key, value in after.items()
        if value != before.get(key)
        and key not in _RESUMABLE_OPTIONS
        and not key.startswith("storage.")  # how data are read, not which data
        and not (same_sources and key.startswith("data.mix"))
        and (key, value) != ("train.threads", 0)  # the run keeps its number of threads
    ]
    if differing:
        raise InputError(
            f"{run}: this run was started with another recipe: {'; '.join(differing)}. Resume with the recipe and the "
            f"{option('set')} options of the start, or choose another RUN."
        )
