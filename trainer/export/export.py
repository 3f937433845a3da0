"""Writes an export: a run's checkpoint as files for serving. The manifest is written last and publishes the files."""

import functools
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, Shard, write_file
from schemas.owners.build import building, clean_up
from schemas.owners.outputs import require_output_folder
from schemas.ragged import Ragged
from schemas.reuse import Request, find_reusable
from schemas.shard_files.parquet import filters_of, list_column, writing_shard
from schemas.shard_files.viewed import RETIRED
from schemas.sizes import require_room
from schemas.storage import join, relative
from schemas.table import Table
from schemas.text_model import DENSE, DENSE_MODEL, DenseModel
from schemas.version import VERSION, Version
from search.factory import AUTO
from trainer.checkpoints.checkpoint import Checkpoint
from trainer.device import open_device
from trainer.encoders.torch_inference import TorchInference
from trainer.evaluation.calibration import calibrate
from trainer.evaluation.fragments import open_fragments
from trainer.evaluation.fusion import Reranker, Scorers
from trainer.evaluation.fusion_files import RunFusion, open_fusion, scored_step, scores_of
from trainer.evaluation.memory import FACTS
from trainer.evaluation.split import HOLDOUT, label_statistics, open_held_out, open_split, retired_labels
from trainer.evaluation.thresholds import DEPTH, ScoredPredictions, require_fractions
from trainer.evaluation.tree import FusionTree
from trainer.export.exported import (
    INDEX,
    KIND,
    POINTS,
    TEXTS,
    THRESHOLDS,
    TREE,
    VECTORS,
    WEIGHTS,
    ExportVersion,
    Serving,
)
from trainer.export.forms import AUTO_FORM, ConvertedEncoder, choose_form
from trainer.export.vectors import DTYPES, EarlierIndex, choose_index, write_indexes
from trainer.export.writer import EarlierExport, ReadLabelRows, Target, in_folder, write_label_files, write_vector_files
from trainer.input_kinds import input_names
from trainer.inputs import Inputs, scored_columns
from trainer.methods.recipe import Recipe
from trainer.methods.sections import Data
from trainer.model import DataSizes, Model, embed_labels, embed_texts, find_checkpoint, has_bias, load_encoder
from trainer.stream import open_queries

_TUNING_QUERIES = 512
_COMPARED, _GROUPS = 256, 16  # number of queries to compare a form with PyTorch on; row groups to take queries from
_KEYS = 1 << 14  # training points in a row group
_TOKENS = 128  # maximum number of tokens of a text, if neither the data nor the encoder has a limit

Say = Callable[[str], None]
Embed = Callable[[Model, DataLayout, int, int], Iterator[tuple[int, torch.Tensor]]]


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export. `index`: none, auto, or a factory string. `step`: as in `scored_step`.

    `split`: the split for thresholds; None means `val` or, without `val`, the run's held-out rows. `calibrate`: fit
    probabilities on the same rows. `scores`: "classifier"; "sum" adds the embedding of the label's
    text to each label vector; "fused" uses the run's fusion and the fusion's data; None: "fused" if the run has a
    fusion. `device`: the device that computes the vectors, which the export does not record. `onto`: an earlier export,
    or a folder with a current export; the new export refers to files of the earlier export instead of copying the
    files. `form`: form of the encoder, as in `choose_form`.
    """

    step: int | str | None
    dtype: str
    index: str
    target_recall: float
    precisions: tuple[float, ...]
    split: str | None
    scores: str | None
    overwrite: bool
    device: str
    onto: str | None
    calibrate: bool = False
    form: str | None = AUTO_FORM

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}.")
        if not 0 < self.target_recall <= 1:
            raise InputError(f"--target-recall {self.target_recall:g}: expected a fraction in (0, 1].")
        require_fractions(self.precisions)


def export(data: str, run: str, out: str, options: ExportOptions, say: Say = print) -> Manifest:
    """Export a checkpoint of RUN, which was trained on DATA, to OUT.

    If OUT already contains an export of the same checkpoint with the same options, returns this export. Raises
    InputError if there is no checkpoint or no such split, if RUN used other data, or if OUT has other content. Raises
    TableError, StorageError.
    """
    layout = DataLayout(data)
    recipe, checkpoint = find_checkpoint(layout, RunLayout(run), scored_step(RunLayout(run), options.step))
    options = replace(options, step=checkpoint.step, scores=options.scores or scores_of(run, checkpoint.step))
    parents = {"data": Table.open(data, "data").digest, "checkpoint": checkpoint.table.digest}
    if options.scores == "sum" and recipe.encodes_labels:
        raise InputError(
            f"--scores {options.scores}: labels of {run} are scored only by their texts. Leave --scores out."
        )
    fusion = open_fusion(data, run, checkpoint) if options.scores == "fused" else None
    if fusion is not None:
        parents["fusion"] = fusion.table.digest
    earlier = None if options.onto is None else EarlierExport.open(options.onto, out, layout)
    before = None if earlier is None else earlier.table.parameters["options"]
    options = replace(options, form=choose_form(options.form or AUTO_FORM, recipe.encoder, before))
    if before is not None:  # an update of an export keeps what a service may ask the export for
        precisions = tuple(dict.fromkeys([*options.precisions, *before["precisions"]]))
        options = replace(options, calibrate=options.calibrate or "calibrate" in before, precisions=precisions)
    split = _threshold_split(layout, options, recipe)
    described = {**_describe(options), "threshold_split": split}
    require_output_folder(out, "exported", [data, run, None if earlier is None else earlier.table.url])
    plan = _Plan(layout, RunLayout(run), options, recipe, checkpoint, fusion, split, earlier)
    onto = None if earlier is None else earlier.table.digest
    request = Request(KIND, parents, {"options": {**described, **({"onto": onto} if onto else {})}})

    def find_finished() -> Manifest | None:
        return find_reusable(out, request, "Give --overwrite, or another OUT.", overwrite=options.overwrite)

    finished = find_finished()
    if finished is None:
        width, item = recipe.encoder.dimension + int(has_bias(recipe)), DTYPES[options.dtype].itemsize
        vectors = Table.open(layout.labels, "labels").rows * width * item
        require_room(out, {"vectors": vectors}, "Give another OUT, or --dtype float16.")
        with building(out, "exported", say) as build:
            finished = find_finished()  # the previous owner of OUT may have finished the export
            if finished is None:
                return build.publish(_write(plan, build.url, request, say))
    clean_up(out, "exported")
    say(f"{out}: exported already")
    return finished


@dataclass(frozen=True)
class _Plan:
    data: DataLayout
    run: RunLayout
    options: ExportOptions
    recipe: Recipe
    checkpoint: Checkpoint
    fusion: RunFusion | None
    split: str | None
    earlier: EarlierExport | None


def _write(plan: _Plan, url: str, request: Request, say: Say) -> Manifest:
    """Write all files of an export at `url`; return the manifest that will publish the files."""
    layout, recipe, checkpoint, options = plan.data, plan.recipe, plan.checkpoint, plan.options
    model = load_encoder(layout, plan.run, options.step, open_device(options.device))
    facts = DataSizes.of(layout)
    tokens = _limit_tokens(layout, facts.manifest, recipe, say)
    with tempfile.TemporaryDirectory(prefix="extremis-export-") as scratch:
        shards, converted = _write_encoders(plan, model, tokens, Path(scratch), url)
        shards += write_label_files(layout, url, plan.earlier)
        target = Target(url, options.dtype, Path(scratch), plan.earlier)
        rows_of = _rows_to_score(model, layout, checkpoint, recipe, options.scores)
        written, serving = _write_serving(plan, model, converted, rows_of, target)
        index_shards, index = _write_index(plan, serving, url, say)
        thresholds = _measure_thresholds(plan, serving, say)
        agreement = converted[0].compare(serving, say) if converted else {}
    if serving.fused is not None and serving.fused.scorers.memory is not None:
        memory = serving.fused.scorers.memory
        written.append(_write_keys(layout, recipe.data, memory.trained, len(memory.vectors), url))
    body = json.dumps(thresholds, indent=1, sort_keys=True).encode()
    shards += [*written, *index_shards, write_file(url, THRESHOLDS, body)]
    return Manifest(
        kind=KIND,
        shards=tuple(shards),
        rows=facts.labels,
        id_range=(0, facts.labels),
        parents=dict(request.parents or {}),
        parameters={
            **request.parameters,
            VERSION: asdict(_version(plan, shards)),
            "recipe": recipe.model_dump(mode="json"),
            "vocabulary": facts.vocabulary,
            "features": facts.features,
            **_dense_facts(facts, recipe, layout),
            "max_tokens": tokens,
            "texts": {name: facts.manifest.parameters.get("options", {}).get(name) for name in ("fields", "text")},
            "training_points": Table.open(layout.labels, "labels").parameters.get("training_points"),
            "dimension": serving.vectors.shape[1],
            "bias": has_bias(recipe),
            "step": checkpoint.step,
            "index": index,
            **({"agreement": agreement} if agreement else {}),
            "shortlist": None if serving.fused is None else serving.fused.shortlist,
            FACTS: None if plan.fusion is None else plan.fusion.table.parameters.get(FACTS),
            "thresholds": thresholds,
            **({} if serving.retired is None else {RETIRED: int(serving.retired.sum())}),
        },
    )


def _dense_facts(facts: DataSizes, recipe: Recipe, layout: DataLayout) -> dict[str, Any]:
    """Return the length of dense vectors and the model that computes the vectors, if the encoder reads such vectors."""
    if DENSE not in input_names(recipe.encoder.inputs):
        return {}
    model = DenseModel.from_parameters(facts.manifest.parameters, layout.root)
    return {DENSE: facts.dense, **({DENSE_MODEL: model.as_json()} if model else {})}


def _version(plan: _Plan, shards: list[Shard]) -> ExportVersion:
    """Return the export's version: the part of the data, and the earlier exports that the files `shards` refer to."""
    part, earlier = Version.of(Table.open(plan.data.root, "data").manifest).part, plan.earlier
    if earlier is None:
        return ExportVersion(part)
    onto = relative(earlier.out, earlier.table.url)
    return ExportVersion(part, onto, earlier.table.digest, earlier.needs(shards))


def _describe(options: ExportOptions) -> dict[str, Any]:
    """Return the options that determine the export's content, for the manifest."""
    scores: dict[str, Any] = {} if options.scores == "classifier" else {"scores": options.scores}
    scores |= {"calibrate": True} if options.calibrate else {}
    scores |= {"form": options.form} if options.form else {}
    names = ("dtype", "index", "target_recall")
    return {**{name: getattr(options, name) for name in names}, "precisions": [*options.precisions], **scores}


def _threshold_split(data: DataLayout, options: ExportOptions, recipe: Recipe) -> str | None:
    """Return the split for the thresholds; `test` and `train` are used only if named in options. Raises InputError."""
    split, has_val = options.split, "queries/val" in Table.open(data.root, "data").parents
    if options.calibrate:
        named = None if split == "none" else split or ("val" if has_val else None)
        return open_held_out(data, named, recipe.data, "A calibration")[0]
    if split == "none":
        return None
    if split is not None:
        open_split(data, split, recipe.data)
        return split
    return "val" if has_val else HOLDOUT if recipe.data.holdout else None


def _limit_tokens(layout: DataLayout, data: Manifest, recipe: Recipe, say: Say) -> int:
    """Return the maximum number of tokens per text: the smaller of DATA's limit and the encoder's own limit."""
    limit = recipe.encoder.token_limit
    stored = limit or _TOKENS
    if "tokenizer" in data.parents:
        stored = int(Table.open(layout.tokenizer, "tokenizer").parameters.get("max_tokens", stored))
    if limit is not None and limit < stored:
        say(
            f"encoder.max_tokens = {limit} is below the data's limit of {stored} tokens: longer texts lost the last "
            "special token in training, but keep this token in the exported encoder"
        )
        return limit
    return stored


def _write_encoders(
    plan: _Plan, model: Model, tokens: int, place: Path, url: str
) -> tuple[list[Shard], list[ConvertedEncoder]]:
    """Write each encoder's folder at `url`, with the tokenizer's files; return encoders in a non-default form."""
    data, form = plan.data, plan.options.form
    shards, converted = list[Shard](), list[ConvertedEncoder]()
    for name, encoder in model.encoders.items():
        folder = place / name
        folder.mkdir()
        encoder.write(folder, tokens)
        if form is not None:
            converted.append(ConvertedEncoder.write(form, plan.recipe.encoder, folder, _compared_rows(plan, model)))
            folder = converted[-1].folder
        if "tokenizer" in Table.open(data.root, "data").parents:
            for file, content in Table.open(data.tokenizer, "tokenizer").read_files().items():
                (folder / file).write_bytes(content)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                written = write_file(join(url, name), path.relative_to(folder).as_posix(), path.read_bytes())
                shards.append(in_folder(name, written))
    return shards, converted


def _compared_rows(plan: _Plan, model: Model) -> Inputs:
    """Read some rows from the split for thresholds, else from the held-out rows, else from the training rows."""
    split = plan.split or (HOLDOUT if plan.recipe.data.holdout else plan.recipe.data.split)
    table, share = open_split(plan.data, split, plan.recipe.data)
    groups = [*itertools.islice(share.batches(table, model.columns), _GROUPS)]
    rows = pa.concat_tables(groups).slice(0, _COMPARED).combine_chunks() if groups else None
    return Inputs(Ragged.empty(0)) if rows is None else Inputs.of(rows)


def _rows_to_score(
    model: Model, data: DataLayout, checkpoint: Checkpoint, recipe: Recipe, scores: str | None
) -> ReadLabelRows:
    """Return a function that reads the vectors of a range of labels, against which x is scored."""
    if recipe.encodes_labels:
        return functools.partial(_concatenate, embed_labels, model, data)

    classifier_rows = functools.partial(checkpoint.vectors, "weight")

    def summed_rows(start: int, stop: int) -> torch.Tensor:  # a bias is kept
        rows, texts = classifier_rows(start, stop).float(), _concatenate(embed_texts, model, data, start, stop)
        return rows + torch.nn.functional.pad(texts, (0, rows.shape[1] - texts.shape[1]))

    return summed_rows if scores == "sum" else classifier_rows


def _concatenate(embed: Embed, model: Model, data: DataLayout, start: int, stop: int) -> torch.Tensor:
    """Embed the texts of labels [start, stop)."""
    return torch.cat([rows.cpu() for _, rows in embed(model, data, start, stop)])


def _write_serving(
    plan: _Plan, model: Model, converted: list[ConvertedEncoder], rows_of: ReadLabelRows, target: Target
) -> tuple[list[Shard], Serving]:
    """Write the vectors and the fusion's data, and open both for exact search."""
    data, fusion, labels = plan.data, plan.fusion, plan.checkpoint.labels
    shards, vectors = write_vector_files(VECTORS, labels, rows_of, target)
    by_model = (converted[0].served if converted else TorchInference(model.encoder)), model.inputs
    if fusion is None:
        return shards, Serving(*by_model, vectors, model.head.bias, retired=retired_labels(data))
    texts, memory, linear = None, fusion.memory(), fusion.ranker()
    if fusion.fusion.reads_texts:
        embed = functools.partial(_concatenate, embed_texts, model, data)
        text_shards, texts = write_vector_files(TEXTS, labels, embed, target)
        shards += text_shards
    if memory is not None:
        shards += memory.write(target.out)
    if linear is not None:
        shards.append(linear.write(target.out))
    name = TREE if isinstance(fusion.fusion, FusionTree) else WEIGHTS
    shards.append(write_file(target.out, name, fusion.fusion.to_json()))
    fused = Reranker(fusion.fusion, Scorers(texts, memory, linear), label_statistics(data).frequency, fusion.shortlist)
    return shards, Serving(*by_model, vectors, model.head.bias, fused=fused, retired=retired_labels(data))


def _write_keys(data: DataLayout, training_data: Data, trained: int, points: int, out: str) -> Shard:
    """Write the keys of a memory's `points` points, of which the first `trained` are training rows of the run."""
    table = open_queries(data, training_data.split)
    with writing_shard(join(out, POINTS), 0, 1, pa.schema({"key": pa.string()}), _KEYS) as shard:
        for share, count in ((training_data.training_rows, trained), (training_data.held_out_rows, points - trained)):
            for rows in share.batches(table, ["key"], count):
                shard.write(rows)
    return in_folder(POINTS, shard.entry)


def _write_index(plan: _Plan, serving: Serving, out: str, say: Say) -> tuple[list[Shard], dict[str, Any] | None]:
    """Write an index if the options request it; return the index files and the facts needed to open the files."""
    earlier = _earlier_index(plan.earlier)
    spec = choose_index(plan.options.index, len(serving.vectors))
    if plan.options.index == AUTO and earlier is not None:
        spec = earlier.facts["factory"]
    if spec is None:
        return [], None
    queries = np.empty((0, serving.vectors.shape[1]), np.float32)
    for group in itertools.islice(open_queries(plan.data, "train").batches(serving.columns), 1):  # pre-shuffled shards
        queries = serving.embed(Inputs.of(group.slice(0, _TUNING_QUERIES)))
    width = DEPTH if serving.fused is None else serving.fused.shortlist
    recall = plan.options.target_recall
    shards, facts = write_indexes(spec, serving.vectors, queries, width, recall, join(out, INDEX), earlier)
    found = min(
        (effort["recall"] for effort in facts["efforts"] if effort and effort["recall"] is not None), default=None
    )
    said = "not measured: there are no training queries" if found is None else f"{found:.4f}"
    say(f"index {spec}: recall {said} of the best {width} labels of {len(queries):,} training queries")
    return [shard if shard.view else in_folder(INDEX, shard) for shard in shards], facts


def _earlier_index(earlier: EarlierExport | None) -> EarlierIndex | None:
    facts = None if earlier is None else earlier.table.parameters["index"]
    if earlier is None or facts is None:
        return None
    vectors, indexes = earlier.files.of(VECTORS), iter(earlier.files.of(INDEX))
    shards = [None if effort is None else next(indexes) for effort in facts["efforts"]]
    files = [None if shard is None else (earlier.files.path(shard), earlier.named(shard)) for shard in shards]
    return EarlierIndex(facts, files, lambda number: earlier.files.vectors(vectors[number]))


def _measure_thresholds(plan: _Plan, serving: Serving, say: Say) -> dict[str, Any] | None:
    """Fit thresholds, and a calibration, to the best DEPTH predictions for each query of the split."""
    split = plan.split
    if split is None:
        say(
            f"no thresholds, because {plan.data.root} has no split val and no rows were held out. Create val with "
            "extremis shard --validation, or name another split with --threshold-split"
        )
        return None
    if split == HOLDOUT and plan.fusion is not None and serving.fused is not None:  # a row would find itself
        unseen = replace(serving.fused.scorers, memory=plan.fusion.memory(split), linear=plan.fusion.ranker(split))
        serving = replace(serving, fused=replace(serving.fused, scorers=unseen))
    table, share = open_split(plan.data, split, plan.recipe.data)
    columns = scored_columns(table, serving.columns)
    predictions = ScoredPredictions(open_fragments(plan.data, serving.columns))
    for rows in share.batches(table, columns):
        inputs, positives = Inputs.of(rows.select(serving.columns)), list_column(rows, "label_ids")
        scores, ids = serving.rank(inputs, DEPTH, filters_of(rows))
        if serving.retired is not None:
            positives = positives.keep(~serving.retired[positives.values])
        labelled = np.flatnonzero(positives.counts)  # all rows, unless labels are retired
        predictions.collect(ids[labelled], scores[labelled], positives.take(labelled), inputs.take(labelled))
    facts: dict[str, Any] = {
        "split": split,
        "depth": DEPTH,
        "rule": "the lowest score t such that at least the fraction `precision` of predictions with score >= t is "
        "correct; the predictions are the `depth` best labels of every query in `split`",
        "thresholds": [threshold._asdict() for threshold in predictions.thresholds(plan.options.precisions)],
    }
    if plan.options.calibrate:
        curve, measured = calibrate(predictions)
        for row in facts["thresholds"]:
            row["probability"] = float(curve(np.array(row["score"])))
        facts["calibration"] = {"queries": predictions.queries, **curve.described(measured)}
    return facts
