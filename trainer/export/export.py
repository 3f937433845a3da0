"""`extremis export`: a run's checkpoint as files that serve, published whole by a manifest written last."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout, shard_name
from schemas.manifest import Manifest, Shard, is_published, open_manifest, publish, unpublish
from schemas.reuse import Request, find_reusable
from schemas.shard_files.parquet import ShardFile, list_column
from schemas.shard_files.shards import iterate, iterate_shard
from schemas.storage import join
from trainer.checkpoints.checkpoint import Checkpoint
from trainer.config import Recipe
from trainer.encoders import Encoder
from trainer.evaluation.evaluate import label_statistics
from trainer.evaluation.fusion.fit import open_fusion
from trainer.evaluation.fusion.fused import Fused
from trainer.export.encoders import write_encoder
from trainer.export.exported import (
    INDEX,
    KIND,
    LABELS,
    TEXTS,
    THRESHOLDS,
    TREE,
    VECTORS,
    Serving,
    iterate_ranked,
)
from trainer.export.index import choose_index, write_indexes
from trainer.export.thresholds import Ranked
from trainer.export.vectors import DTYPES, Vectors, map_vectors, write_vectors
from trainer.inputs import columns_of, scored_columns
from trainer.label_embeddings import embed_labels, embed_texts
from trainer.model import DataFacts, Model, find_checkpoint, has_bias, load_encoder
from trainer.stream import open_queries

ROWS_A_FILE = 1 << 22  # vectors of a file, and of an index
DEPTH = 10  # predictions of a query that thresholds are made on
_TUNING_QUERIES = 512
_LABEL_COLUMNS = ("label_id", "key", "text", "frequency")

Say = Callable[[str], None]
Embed = Callable[[Model, DataLayout, int, int], Iterator[tuple[int, torch.Tensor]]]
RowsOf = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class ExportOptions:
    """How a run is exported. `split` None: thresholds from `val` where DATA has it. `index`: none, auto, a factory.

    `scores`: "classifier"; "sum" with embeddings of the labels' texts, in one vector a label; or "fused" by the run's
    tree, which goes along with these embeddings.
    """

    step: int | None = None
    dtype: str = "float32"
    index: str = "auto"
    target_recall: float = 0.98
    precisions: tuple[float, ...] = (0.5, 0.7, 0.9)
    split: str | None = None
    scores: str = "classifier"
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise InputError(f"--dtype {self.dtype}: expected one of {', '.join(DTYPES)}.")
        if not 0 < self.target_recall <= 1:
            raise InputError(f"--target-recall {self.target_recall:g}: expected a share in (0, 1].")


def export(data: str, run: str, out: str, options: ExportOptions | None = None, say: Say = print) -> Manifest:
    """Export a checkpoint of RUN (the newest by default), made from DATA, to OUT.

    What is there already, made from the same checkpoint with the same options, is returned as it is.
    Raises InputError: no checkpoint, other data, no such split, something else at OUT; TableError, StorageError.
    """
    options = options or ExportOptions()
    layout = DataLayout(data)
    recipe, checkpoint = find_checkpoint(layout, RunLayout(run), options.step)
    split = _threshold_split(layout, options.split)
    wanted = {**_wanted(options), "threshold_split": split}
    parents = {"data": open_manifest(data, "data").digest, "checkpoint": checkpoint.manifest.digest}
    if options.scores != "classifier" and recipe.head.kind == "label-encoder":
        raise InputError(f"--scores {options.scores}: labels of {run} have the scores of their texts alone.")
    fusion = open_fusion(data, run, checkpoint) if options.scores == "fused" else None
    if fusion is not None:
        parents["fusion"] = fusion[1].digest
    request = Request(KIND, parents, {"options": wanted})
    finished = find_reusable(out, request, "Give --overwrite, or another OUT.", overwrite=options.overwrite)
    if finished is not None:
        say(f"{out}: exported already")
        return finished
    if is_published(out):
        unpublish(out)
        storage.remove(out, recursive=True)
    model = load_encoder(layout, RunLayout(run), options.step)
    facts = DataFacts.of(layout)
    tokens = _tokens(layout, facts.manifest, recipe, say)
    shards = [*_encoders(layout, model, recipe, tokens, out), *_labels(layout, out)]
    with tempfile.TemporaryDirectory(prefix="extremis-export-") as scratch:
        files = options.dtype, out, Path(scratch)
        rows_of = functools.partial(_rows, checkpoint)
        texts_of = functools.partial(_embedded, embed_texts, model, layout)
        if recipe.head.kind == "label-encoder":
            rows_of = functools.partial(_embedded, embed_labels, model, layout)
        elif options.scores == "sum":
            rows_of = functools.partial(_added, rows_of, texts_of)
        written, vectors = _vectors(VECTORS, checkpoint.labels, rows_of, *files)
        fused = None
        if fusion is not None:
            tree, fitted = fusion
            more, texts = _vectors(TEXTS, checkpoint.labels, texts_of, *files)
            written += [*more, _write(out, TREE, tree.to_json())]
            fused = Fused(tree, texts, label_statistics(layout).frequency, int(fitted.parameters["shortlist"]))
        exact = Serving(model, vectors, fused=fused)
        built: list[Shard] = []
        index = None
        spec = choose_index(options.index, facts.labels)
        if spec is not None:
            queries = _some_queries(layout, exact, recipe)
            width = DEPTH if fused is None else fused.shortlist
            built, index = write_indexes(spec, vectors, queries, width, options.target_recall, join(out, INDEX))
        thresholds = _thresholds(layout, exact, split, options.precisions, say)
    shards += [*written, *(_below(INDEX, shard) for shard in built)]
    body = json.dumps(thresholds, indent=1, sort_keys=True).encode()
    shards.append(_write(out, THRESHOLDS, body))
    manifest = Manifest(
        kind=KIND,
        shards=tuple(shards),
        rows=facts.labels,
        id_range=(0, facts.labels),
        parents=parents,
        parameters={
            "options": wanted,
            "recipe": recipe.model_dump(mode="json"),
            "vocabulary": facts.vocabulary,
            "features": facts.features,
            "max_tokens": tokens,
            "dimension": vectors.shape[1],
            "bias": has_bias(recipe),
            "step": checkpoint.step,
            "index": index,
            "shortlist": None if fused is None else fused.shortlist,
            "thresholds": thresholds,
        },
    )
    return publish(out, manifest)


def _wanted(options: ExportOptions) -> dict[str, Any]:
    body = asdict(options)
    return {name: body[name] for name in ("dtype", "index", "target_recall")} | {
        "precisions": [*options.precisions],
        **({} if body["scores"] == "classifier" else {"scores": body["scores"]}),
    }


def _threshold_split(data: DataLayout, split: str | None) -> str | None:
    """The split to make thresholds on; never `test` or `train` unless it is named. Raises InputError."""
    if split == "none":
        return None
    if split is not None:
        open_queries(data, split)
        return split
    return "val" if "queries/val" in open_manifest(data.root, "data").parents else None


def _tokens(layout: DataLayout, data: Manifest, recipe: Recipe, say: Say) -> int:
    """Tokens of a text, at most: as DATA cut them, and the encoder once more."""
    stored = recipe.encoder.max_tokens
    if "tokenizer" in data.parents:
        stored = int(open_manifest(layout.tokenizer, "tokenizer").parameters.get("max_tokens", stored))
    if recipe.encoder.kind == "transformer" and recipe.encoder.max_tokens < stored:
        say(
            f"encoder.max_tokens = {recipe.encoder.max_tokens} is below the {stored} tokens of the data: texts longer "
            "than that lost their last special token in training, and keep it in the exported encoder"
        )
        return recipe.encoder.max_tokens
    return stored


def _encoders(data: DataLayout, model: Model, recipe: Recipe, tokens: int, out: str) -> Iterator[Shard]:
    """The directory of the queries' encoder, and of the labels' where they have another, with the tokenizer's files."""
    for name, encoder in model.encoders.items():
        yield from _encoder(data, encoder, recipe, tokens, out, name)


def _encoder(data: DataLayout, encoder: Encoder, recipe: Recipe, tokens: int, out: str, name: str) -> Iterator[Shard]:
    with tempfile.TemporaryDirectory(prefix="extremis-export-") as scratch:
        folder = Path(scratch)
        write_encoder(encoder, recipe.encoder, tokens, folder)
        if "tokenizer" in open_manifest(data.root, "data").parents:
            for shard in open_manifest(data.tokenizer, "tokenizer").shards:
                (folder / shard.path).write_bytes(storage.read_bytes(join(data.tokenizer, shard.path)))
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                yield _write(out, f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def _labels(data: DataLayout, out: str) -> Iterator[Shard]:
    """Key, text and training frequency of every label, shard by shard."""
    manifest = open_manifest(data.labels, "labels")
    for number, shard in enumerate(manifest.shards):
        groups = iterate_shard(data.labels, shard, _LABEL_COLUMNS)
        first = next(groups, None)
        if first is None:
            continue
        file = ShardFile(join(out, LABELS), number, len(manifest.shards), first.schema, manifest.row_group_rows or 1)
        with file as table:
            table.write(first)
            for group in groups:
                table.write(group)
        yield _below(LABELS, table.entry)


def _vectors(
    folder: str, labels: int, rows_of: RowsOf, dtype: str, out: str, scratch: Path
) -> tuple[list[Shard], Vectors]:
    """Files of rows [labels, D], and the rows, mapped where the files are on a local disk.

    `rows_of(start, stop)` [stop - start, D]: a range of them, one held at a time.
    """
    shards, mapped = [], []
    starts = range(0, max(labels, 1), ROWS_A_FILE)
    for number, start in enumerate(starts):
        name = f"{folder}/{shard_name(number, len(starts), 'safetensors')}"
        rows = rows_of(start, min(start + ROWS_A_FILE, labels))
        copy = scratch / f"{folder}-{number}"
        with storage.writing(join(out, name)) as path:
            write_vectors(Path(path), rows, start, dtype)
            size, digest = Path(path).stat().st_size, storage.file_sha256(path)
            if not storage.is_local(out):
                shutil.copyfile(path, copy)
        shards.append(Shard(path=name, rows=len(rows), bytes=size, sha256=digest))
        mapped.append(map_vectors(Path(storage.filesystem(join(out, name))[1]) if storage.is_local(out) else copy))
    return shards, Vectors(mapped)


def _rows(checkpoint: Checkpoint, start: int, stop: int) -> torch.Tensor:
    """The classifier's vectors of labels [start, stop)."""
    return torch.cat([tensors["weight"] for _, tensors in checkpoint.rows(start, stop)])


def _added(rows_of: RowsOf, texts_of: RowsOf, start: int, stop: int) -> torch.Tensor:
    """Both of labels [start, stop) added; a bias stays."""
    rows, texts = rows_of(start, stop).float(), texts_of(start, stop)
    return rows + torch.nn.functional.pad(texts, (0, rows.shape[1] - texts.shape[1]))


def _embedded(embed: Embed, model: Model, data: DataLayout, start: int, stop: int) -> torch.Tensor:
    """The texts of labels [start, stop), as `embed` gives them."""
    return torch.cat([rows for _, rows in embed(model, data, start, stop)])


def _some_queries(data: DataLayout, serving: Serving, recipe: Recipe) -> torch.Tensor:
    """x of the first training queries: shards are pre-shuffled."""
    table = open_queries(data, "train")
    wanted = columns_of(recipe.encoder.inputs)
    for group in iterate(table.url, table.manifest, wanted):
        return serving.embed(group.slice(0, _TUNING_QUERIES))
    return torch.empty(0, serving.vectors.shape[1])


def _thresholds(
    data: DataLayout, serving: Serving, split: str | None, precisions: tuple[float, ...], say: Say
) -> dict[str, Any] | None:
    """Scores for precisions, measured on the best DEPTH predictions of each query of the split."""
    if split is None:
        say(
            f"no thresholds: {data.root} has no split val (extremis shard --validation makes one); "
            "--threshold-split names another"
        )
        return None
    table = open_queries(data, split)
    wanted = scored_columns(table.manifest, serving.model.columns)
    ranked = Ranked()
    for rows, scores, ids in iterate_ranked(serving, iterate(table.url, table.manifest, wanted), DEPTH):
        ranked.add(ids, scores, *list_column(rows, "label_ids"))
    found = ranked.thresholds(precisions)
    return {
        "split": split,
        "depth": DEPTH,
        "rule": "the lowest score t such that, of all predictions of score >= t among the best `depth` of every query "
        "of `split`, at least the share `precision` is right",
        "thresholds": [one._asdict() for one in found],
    }


def _write(out: str, name: str, data: bytes) -> Shard:
    storage.write_bytes(join(out, name), data)
    return Shard(path=name, rows=0, bytes=len(data), sha256=storage.sha256(data))


def _below(folder: str, shard: Shard) -> Shard:
    return shard.model_copy(update={"path": f"{folder}/{shard.path}"})
