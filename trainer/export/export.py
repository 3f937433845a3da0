"""Writing of an export: a run's checkpoint as files for serving, published by a manifest written last."""

import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout, shard_name
from schemas.manifest import Manifest, Shard, describe_file, open_manifest, read_files, write_file
from schemas.owners.build import building, clean_up
from schemas.reuse import Request, find_reusable
from schemas.shard_files.parquet import list_column, writing_shard
from schemas.shard_files.shards import iterate, iterate_shard
from schemas.shard_files.viewed import RETIRED
from schemas.sizes import require_room
from schemas.storage import join
from trainer.checkpoints.checkpoint import Checkpoint
from trainer.config import Recipe
from trainer.device import open_device
from trainer.encoders import Encoder
from trainer.evaluation.evaluate import label_statistics
from trainer.evaluation.fusion.files import RunFusion, fused_step, open_fusion
from trainer.evaluation.fusion.fused import Fused
from trainer.evaluation.fusion.scored import Scorers
from trainer.evaluation.fusion.tree import Fusion
from trainer.evaluation.label_embeddings import embed_labels, embed_texts
from trainer.evaluation.retired import retired_labels
from trainer.export.exported import (
    INDEX,
    KIND,
    LABELS,
    TEXTS,
    THRESHOLDS,
    TREE,
    VECTORS,
    WEIGHTS,
    Serving,
    iterate_ranked,
)
from trainer.export.index import choose_index, write_indexes
from trainer.export.thresholds import ScoredPredictions
from trainer.export.vectors import DTYPES, Vectors, map_vectors, write_vectors
from trainer.inputs import scored_columns
from trainer.model import DataFacts, Model, find_checkpoint, has_bias, load_encoder
from trainer.stream import open_queries

ROWS_A_FILE = 1 << 22  # vectors of a file, and of an index
DEPTH = 10  # predictions of a query that thresholds are made on
_TUNING_QUERIES = 512
_TOKENS = 128  # of a text, where neither the data nor the encoder says
_LABEL_COLUMNS = ("label_id", "key", "text", "frequency")

Say = Callable[[str], None]
Embed = Callable[[Model, DataLayout, int, int], Iterator[tuple[int, torch.Tensor]]]
RowsOf = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export. `split` None: thresholds from `val` where DATA has it. `index`: none, auto, a factory.

    `scores`: "classifier"; "sum" with embeddings of the labels' texts, in one vector a label; or "fused" by the run's
    tree, which is exported with these embeddings. `device`: where they are made, of which the export knows nothing.
    """

    step: int | None = None
    dtype: str = "float32"
    index: str = "auto"
    target_recall: float = 0.98
    precisions: tuple[float, ...] = (0.5, 0.7, 0.9)
    split: str | None = None
    scores: str = "classifier"
    overwrite: bool = False
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}.")
        if not 0 < self.target_recall <= 1:
            raise InputError(f"--target-recall {self.target_recall:g}: expected a share in (0, 1].")


@dataclass(frozen=True)
class _Target:
    """Place of vectors: OUT, their `dtype`, and a local folder for copies of them where OUT is remote."""

    out: str
    dtype: str
    scratch: Path


def export(data: str, run: str, out: str, options: ExportOptions | None = None, say: Say = print) -> Manifest:
    """Export a checkpoint of RUN (the newest by default), made from DATA, to OUT.

    An export that is there already, of the same checkpoint with the same options, is returned as it is.
    Raises InputError: no checkpoint, other data, no such split, something else at OUT; TableError, StorageError.
    """
    options = options or ExportOptions()
    layout = DataLayout(data)
    if options.step is None and options.scores == "fused":
        options = replace(options, step=fused_step(RunLayout(run)))
    recipe, checkpoint = find_checkpoint(layout, RunLayout(run), options.step)
    split = _threshold_split(layout, options.split)
    described = {**_describe(options), "threshold_split": split}
    parents = {"data": open_manifest(data, "data").digest, "checkpoint": checkpoint.manifest.digest}
    if options.scores == "sum" and recipe.head.encodes_labels:
        raise InputError(f"--scores {options.scores}: labels of {run} have the scores of their texts alone.")
    fusion = open_fusion(data, run, checkpoint) if options.scores == "fused" else None
    if fusion is not None:
        parents["fusion"] = fusion.manifest.digest
    plan = _Plan(layout, RunLayout(run), options, recipe, checkpoint, fusion, split)
    request = Request(KIND, parents, {"options": described})

    def find_finished() -> Manifest | None:
        return find_reusable(out, request, "Give --overwrite, or another OUT.", overwrite=options.overwrite)

    finished = find_finished()
    if finished is None:
        width, item = recipe.encoder.dimension + int(has_bias(recipe)), DTYPES[options.dtype].itemsize
        vectors = open_manifest(layout.labels, "labels").rows * width * item
        require_room(out, {"vectors": vectors}, "Give another OUT, or --dtype float16.")
        with building(out, "exported", say) as build:
            finished = find_finished()  # the last owner may have made it
            if finished is None:
                return build.publish(_write(plan, build.url, request, say))
    clean_up(out, "exported")
    say(f"{out}: exported already")
    return finished


@dataclass(frozen=True)
class _Plan:
    """Content of an export: a checkpoint of a run, what is scored beside it, and the split of its thresholds."""

    data: DataLayout
    run: RunLayout
    options: ExportOptions
    recipe: Recipe
    checkpoint: Checkpoint
    fusion: RunFusion | None
    split: str | None


def _write(plan: _Plan, url: str, request: Request, say: Say) -> Manifest:
    """Write all files of an export at `url`; their manifest, to be published with them."""
    layout, recipe, checkpoint, options = plan.data, plan.recipe, plan.checkpoint, plan.options
    model = load_encoder(layout, plan.run, options.step, open_device(options.device))
    facts = DataFacts.of(layout)
    tokens = _limit_tokens(layout, facts.manifest, recipe, say)
    shards = []
    for name, encoder in model.encoders.items():  # of queries, and of labels where they have one of their own
        files = _write_encoder(layout, encoder, tokens, join(url, name))
        shards += [_in_folder(name, shard) for shard in files]
    shards += _write_labels(layout, url)
    with tempfile.TemporaryDirectory(prefix="extremis-export-") as scratch:
        target = _Target(url, options.dtype, Path(scratch))
        rows_of = _rows_to_score(model, layout, checkpoint, recipe, options.scores)
        written, serving = _write_serving(model, layout, checkpoint.labels, rows_of, plan.fusion, target)
        index_shards, index = _write_index(layout, serving, options, url)
        thresholds = _measure_thresholds(layout, serving, plan.split, options.precisions, say)
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
            "recipe": recipe.model_dump(mode="json"),
            "vocabulary": facts.vocabulary,
            "features": facts.features,
            "max_tokens": tokens,
            "dimension": serving.vectors.shape[1],
            "bias": has_bias(recipe),
            "step": checkpoint.step,
            "index": index,
            "shortlist": None if serving.fused is None else serving.fused.shortlist,
            "thresholds": thresholds,
            **({} if serving.retired is None else {RETIRED: int(serving.retired.sum())}),
        },
    )


def _describe(options: ExportOptions) -> dict[str, Any]:
    """Return the options that decide what the export holds, as the manifest states them."""
    scores = {} if options.scores == "classifier" else {"scores": options.scores}
    names = ("dtype", "index", "target_recall")
    return {**{name: getattr(options, name) for name in names}, "precisions": [*options.precisions], **scores}


def _threshold_split(data: DataLayout, split: str | None) -> str | None:
    """Return the split to make thresholds on; never `test` or `train` unless it is named. Raises InputError."""
    if split == "none":
        return None
    if split is not None:
        open_queries(data, split)
        return split
    return "val" if "queries/val" in open_manifest(data.root, "data").parents else None


def _limit_tokens(layout: DataLayout, data: Manifest, recipe: Recipe, say: Say) -> int:
    """Return the greatest number of tokens of a text: as DATA cut them, and the encoder once more."""
    limit = recipe.encoder.token_limit
    stored = limit or _TOKENS
    if "tokenizer" in data.parents:
        stored = int(open_manifest(layout.tokenizer, "tokenizer").parameters.get("max_tokens", stored))
    if limit is not None and limit < stored:
        say(
            f"encoder.max_tokens = {limit} is below the {stored} tokens of the data: texts longer "
            "than that lost their last special token in training, and keep it in the exported encoder"
        )
        return limit
    return stored


def _write_encoder(data: DataLayout, encoder: Encoder, tokens: int, url: str) -> Iterator[Shard]:
    """Write the folder of an encoder at `url`, with the tokenizer's files."""
    with tempfile.TemporaryDirectory(prefix="extremis-export-") as scratch:
        folder = Path(scratch)
        encoder.write(folder, tokens)
        if "tokenizer" in open_manifest(data.root, "data").parents:
            for name, content in read_files(data.tokenizer, "tokenizer").items():
                (folder / name).write_bytes(content)
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield write_file(url, path.relative_to(folder).as_posix(), path.read_bytes())


def _write_labels(data: DataLayout, out: str) -> Iterator[Shard]:
    """Write key, text and training frequency of every label, shard by shard."""
    manifest = open_manifest(data.labels, "labels")
    columns = (*_LABEL_COLUMNS, *(column.name for column in manifest.columns if column.name == RETIRED))
    for number, shard in enumerate(manifest.shards):
        groups = iterate_shard(data.labels, shard, columns)
        first = next(groups, None)
        if first is None:
            continue
        group_rows = manifest.group_rows(number)
        with writing_shard(join(out, LABELS), number, len(manifest.shards), first.schema, group_rows) as table:
            for group in itertools.chain([first], groups):
                table.write(group)
        yield _in_folder(LABELS, table.entry)


def _write_vectors(folder: str, labels: int, rows_of: RowsOf, target: _Target) -> tuple[list[Shard], Vectors]:
    """Write files of rows [labels, D] and map them: from OUT where it is a local disk, or from copies.

    `rows_of(start, stop)` [stop - start, D]: a range of them, one held at a time.
    """
    shards, mapped = [], []
    starts = range(0, max(labels, 1), ROWS_A_FILE)
    for number, start in enumerate(starts):
        name = f"{folder}/{shard_name(number, len(starts), 'safetensors')}"
        url = join(target.out, name)
        rows = rows_of(start, min(start + ROWS_A_FILE, labels))
        local = Path(storage.filesystem(url)[1]) if storage.is_local(url) else target.scratch / f"{folder}-{number}"
        with storage.writing(url) as path:
            write_vectors(Path(path), rows, start, target.dtype)
            shards.append(describe_file(path, name, len(rows)))
            if not storage.is_local(url):
                shutil.copyfile(path, local)
        mapped.append(map_vectors(local))
    return shards, Vectors(mapped)


def _rows_to_score(model: Model, data: DataLayout, checkpoint: Checkpoint, recipe: Recipe, scores: str) -> RowsOf:
    """Return the reader of the vectors that x is scored against, by ranges of labels."""
    if recipe.head.encodes_labels:
        return functools.partial(_concatenate, embed_labels, model, data)

    def classifier_rows(start: int, stop: int) -> torch.Tensor:
        return torch.cat([tensors["weight"] for _, tensors in checkpoint.rows(start, stop)])

    def summed_rows(start: int, stop: int) -> torch.Tensor:  # a bias stays
        rows, texts = classifier_rows(start, stop).float(), _concatenate(embed_texts, model, data, start, stop)
        return rows + torch.nn.functional.pad(texts, (0, rows.shape[1] - texts.shape[1]))

    return summed_rows if scores == "sum" else classifier_rows


def _concatenate(embed: Embed, model: Model, data: DataLayout, start: int, stop: int) -> torch.Tensor:
    """Embed the texts of labels [start, stop)."""
    return torch.cat([rows.cpu() for _, rows in embed(model, data, start, stop)])


def _write_serving(
    model: Model,
    data: DataLayout,
    labels: int,
    rows_of: RowsOf,
    fusion: RunFusion | None,
    target: _Target,
) -> tuple[list[Shard], Serving]:
    """Write the vectors, and with `fusion` what it reads beside them; open them for exact search."""
    shards, vectors = _write_vectors(VECTORS, labels, rows_of, target)
    if fusion is None:
        return shards, Serving(model, vectors, retired=retired_labels(data))
    texts, memory = None, fusion.memory()
    if fusion.fusion.reads_texts:
        embed = functools.partial(_concatenate, embed_texts, model, data)
        text_shards, texts = _write_vectors(TEXTS, labels, embed, target)
        shards += text_shards
    if memory is not None:
        shards += memory.write(target.out)
    name = TREE if isinstance(fusion.fusion, Fusion) else WEIGHTS
    shards.append(write_file(target.out, name, fusion.fusion.to_json()))
    fused = Fused(fusion.fusion, Scorers(texts, memory), label_statistics(data).frequency, fusion.shortlist)
    return shards, Serving(model, vectors, fused=fused, retired=retired_labels(data))


def _write_index(
    data: DataLayout, serving: Serving, options: ExportOptions, out: str
) -> tuple[list[Shard], dict[str, Any] | None]:
    """Write an index where `options` ask for one, and return its files and the facts to open them."""
    spec = choose_index(options.index, serving.labels)
    if spec is None:
        return [], None
    queries = _embed_some_queries(data, serving)
    width = DEPTH if serving.fused is None else serving.fused.shortlist
    shards, facts = write_indexes(spec, serving.vectors, queries, width, options.target_recall, join(out, INDEX))
    return [_in_folder(INDEX, shard) for shard in shards], facts


def _embed_some_queries(data: DataLayout, serving: Serving) -> torch.Tensor:
    """Embed the first training queries: shards are pre-shuffled."""
    table = open_queries(data, "train")
    for group in iterate(table.url, table.manifest, serving.model.columns):
        return serving.embed(group.slice(0, _TUNING_QUERIES))
    return torch.empty(0, serving.vectors.shape[1])


def _measure_thresholds(
    data: DataLayout, serving: Serving, split: str | None, precisions: tuple[float, ...], say: Say
) -> dict[str, Any] | None:
    """Find scores for `precisions`, measured on the best DEPTH predictions of each query of the split."""
    if split is None:
        say(
            f"no thresholds: {data.root} has no split val (extremis shard --validation makes one); "
            "--threshold-split names another"
        )
        return None
    table = open_queries(data, split)
    columns = scored_columns(table.manifest, serving.model.columns)
    predictions = ScoredPredictions()
    for rows, scores, ids in iterate_ranked(serving, iterate(table.url, table.manifest, columns), DEPTH):
        predictions.add(ids, scores, list_column(rows, "label_ids"))
    return {
        "split": split,
        "depth": DEPTH,
        "rule": "the lowest score t such that, of all predictions of score >= t among the best `depth` of every query "
        "of `split`, at least the share `precision` is right",
        "thresholds": [threshold._asdict() for threshold in predictions.thresholds(precisions)],
    }


def _in_folder(folder: str, shard: Shard) -> Shard:
    return shard.model_copy(update={"path": f"{folder}/{shard.path}"})
