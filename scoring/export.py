"""Write an export, whole or onto an earlier one."""

import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from schemas import storage
from schemas.arrow import DENSE, DENSE_MODEL, DenseModel
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout, shard_name
from schemas.manifest import Manifest, Patch, Shard, View, describe_file, write_file
from schemas.mapped import MappedFile
from schemas.owners import building, clean_up, require_output_folder
from schemas.ragged import Ragged
from schemas.shard_files.parquet import encode, filters_of, list_column, writing_shard
from schemas.shard_files.shards import POSITION, RETIRED, iterate_shard
from schemas.storage import join, relative, require_room, resolve
from schemas.table import Request, Table, find_reusable
from schemas.versions import VERSION, Version, move_view, parts_since
from scoring.calibration import DEPTH, ScoredPredictions, calibrate, open_fragments, require_fractions
from scoring.encoders import AUTO_FORM, ConvertedEncoder, TorchInference, choose_form
from scoring.exported import (
    INDEX,
    KIND,
    LABELS,
    POINTS,
    TEXTS,
    THRESHOLDS,
    TREE,
    VECTORS,
    WEIGHTS,
    ExportFiles,
    ExportVersion,
    Serving,
    require_needed_exports,
    resolve_export,
)
from scoring.fitting import RunFusion, open_fusion, scored_step, scores_of
from scoring.fusion import FusionTree, Reranker, Scorers
from scoring.memory import FACTS
from scoring.vectors import (
    DTYPES,
    NAME,
    POSITIONS,
    EarlierIndex,
    Vectors,
    changed_rows,
    choose_index,
    map_vectors,
    write_indexes,
)
from search.index import AUTO
from trainer.checkpoints import Checkpoint, save_tensors
from trainer.device import open_device
from trainer.evaluation.evaluate import HOLDOUT, label_statistics, open_held_out, open_split, retired_labels
from trainer.input_kinds import input_names
from trainer.inputs import Inputs, scored_columns
from trainer.methods.recipe import Recipe
from trainer.methods.sections import Data
from trainer.model import DataSizes, Model, embed_labels, embed_texts, find_checkpoint, has_bias, load_encoder
from trainer.stream import open_queries

_SMALL = 8  # rows that versions added are rewritten together if fewer than 1 / _SMALL of the labels
ROWS_A_FILE = 1 << 22  # vectors in a file, and in an index
MOST_CHANGED = 4  # a file is rewritten if more than a quarter of its rows changed
_COLUMNS = ("label_id", "key", "text", "frequency")  # columns of labels
_OVER = ("frequency", RETIRED)  # columns that change for many labels at once
_PATCH_ROWS = 1 << 16  # rows in a row group


class FileRange(NamedTuple):
    """Rows [start, stop) of a part of an export; `entry`: the earlier export's file with these rows, if reused.

    `number` is the index of the file among `files` files.
    """

    start: int
    stop: int
    number: int
    files: int
    entry: Shard | None = None


@dataclass(frozen=True)
class EarlierExport:
    """An earlier export, `table`, that the export at `out` is based on."""

    table: Table
    out: str

    @classmethod
    def open(cls, onto: str, out: str, data: DataLayout) -> "EarlierExport":
        """Open the export at `onto`, or a folder's current export; the data must be `data` or an earlier version.

        If OUT is already current, return the export that OUT was based on. Raises InputError, TableError.
        """
        url = resolve(resolve_export(onto), ".")
        if url == resolve(out, "."):
            before = Table.find(out, KIND)
            place = None if before is None else ExportVersion.of(before.manifest).onto
            if place is None:
                raise InputError(f"--onto {onto}: this is OUT itself. Name an earlier export.")
            url = resolve(out, place)
        export = Table.open(url, KIND)
        require_needed_exports(export)
        if parts_since(Table.open(data.root, "data").manifest, export.parents["data"]) is None:
            raise InputError(
                f"--onto {url}: this export was built neither from {data.root} nor from an earlier version. Name an "
                "export of this data, or leave --onto out."
            )
        return cls(export, out)

    @cached_property
    def files(self) -> ExportFiles:
        """Local files of the earlier export."""
        return ExportFiles(self.table)

    @cached_property
    def version(self) -> ExportVersion:
        """Version of the earlier export."""
        return ExportVersion.of(self.table.manifest)

    def named(
        self, shard: Shard, first: int = 0, group_rows: int = 1, patches: Mapping[str, Patch] | None = None
    ) -> Shard:
        """Return the entry of an earlier file for the new manifest, with only the given `patches`.

        `first`: the file's first label; `group_rows`: number of rows per row group, if the file has row groups.
        """
        view, table = shard.view and move_view(shard.view, self.table.url, self.out), relative(self.out, self.table.url)
        view = view or View(
            table=table, part=self.version.part, first=first, rows=shard.rows, row_group_rows=group_rows
        )
        bare = view.model_copy(update={"gone": None, "columns": None, "changed": None, **(patches or {})})
        return shard.model_copy(update={"view": bare})

    def needs(self, shards: Sequence[Shard]) -> tuple[tuple[str, str, str], ...]:
        """Return (part, place, digest) of each earlier export that `shards` refer to."""
        places = {entry.view.table for entry in shards if entry.view is not None}
        own = (self.version.part, relative(self.out, self.table.url), self.table.digest)
        return tuple(each for each in (*self.version.moved(self.table.url, self.out), own) if each[1] in places)

    def ranges(self, part: str, labels: int, rows_a_file: int) -> list[FileRange]:
        """Return the files of `part` for all `labels`: earlier files that are reused, and new files for later rows."""
        kept = list(self.files.of(part))
        covered = sum(shard.rows for shard in kept)
        if self.version.onto is not None and covered < labels:
            while kept and kept[-1].view is None and _SMALL * (labels - covered + kept[-1].rows) < labels:
                covered -= kept.pop().rows
        return plan_ranges(kept, labels, rows_a_file)


def plan_ranges(kept: Sequence[Shard], labels: int, rows_a_file: int) -> list[FileRange]:
    """Return the files' ranges of labels: the ranges of `kept` files, then new files of at most `rows_a_file` rows."""
    bounds = [*itertools.accumulate((shard.rows for shard in kept), initial=0)]
    while bounds[-1] < labels or len(bounds) == 1:
        bounds.append(min(bounds[-1] + rows_a_file, labels))
    entries = [*kept, *[None] * (len(bounds) - 1 - len(kept))]
    return [FileRange(bounds[n], bounds[n + 1], n, len(entries), entry) for n, entry in enumerate(entries)]


ReadLabelRows = Callable[[int, int], torch.Tensor]


@dataclass(frozen=True)
class Target:
    """Where and how vectors are written: OUT, the `dtype`, and a local folder for copies if OUT is remote.

    `earlier`: the export that OUT is based on.
    """

    out: str
    dtype: str
    scratch: Path
    earlier: EarlierExport | None = None


def write_vector_files(folder: str, labels: int, rows_of: ReadLabelRows, target: Target) -> tuple[list[Shard], Vectors]:
    """Write rows [labels, D] to files and map the files: from OUT if OUT is on a local disk, else from copies.

    `rows_of(start, stop)` returns rows [start, stop); only one range of rows is in memory at a time.
    """
    earlier = target.earlier
    ranges = plan_ranges([], labels, ROWS_A_FILE) if earlier is None else earlier.ranges(folder, labels, ROWS_A_FILE)
    shards, mapped = [], []
    for piece in ranges:
        rows = rows_of(piece.start, piece.stop).detach().to(getattr(torch, target.dtype))
        kept = _keep(folder, piece, rows.cpu().numpy(), target)
        shard, array = kept or _write_files(folder, piece, rows, target)
        shards.append(shard)
        mapped.append(array)
    return shards, Vectors(mapped)


def _write_files(folder: str, piece: FileRange, rows: torch.Tensor, target: Target) -> tuple[Shard, np.ndarray]:
    name = f"{folder}/{shard_name(piece.number, piece.files, 'safetensors')}"
    url = join(target.out, name)
    local = Path(storage.filesystem(url)[1]) if storage.is_local(url) else target.scratch / f"{folder}-{piece.number}"
    with storage.writing(url) as path:
        write_vectors(Path(path), rows, piece.start)
        shard = describe_file(path, name, len(rows))
        if not storage.is_local(url):
            shutil.copyfile(path, local)
    return shard, map_vectors(MappedFile(str(local), private=True))


def write_vectors(path: Path, rows: torch.Tensor, start: int) -> None:
    """Write `rows` [n, D], the vectors of labels [start, start + n), to a file."""
    save_tensors(str(path), {NAME: rows.detach().cpu().contiguous()}, {"start": str(start)})


def write_patch(path: Path, positions: np.ndarray, rows: np.ndarray) -> None:
    """Write `rows` [n, D], which replace the rows at `positions` int64 [n] of a file of vectors."""
    save_tensors(str(path), {POSITIONS: torch.from_numpy(positions), NAME: torch.from_numpy(rows)})


def _keep(folder: str, piece: FileRange, rows: np.ndarray, target: Target) -> tuple[Shard, np.ndarray] | None:
    """Reuse the earlier file of these rows, with a patch for changed rows; None if too many rows have changed."""
    earlier = target.earlier
    if earlier is None or piece.entry is None:
        return None
    before = map_vectors(MappedFile(str(earlier.files.path(piece.entry)), private=True))
    changed = changed_rows(before, rows)
    if changed is None or MOST_CHANGED * len(changed) > len(rows):
        return None
    patches = {}
    if len(changed):
        place = f"{folder}/_changed-{piece.number:05d}.safetensors"
        patches["changed"] = _write_patch(target.out, place, lambda path: write_patch(path, changed, rows[changed]))
        before[changed] = rows[changed]
    return earlier.named(piece.entry, piece.start, patches=patches), before


def write_label_files(data: DataLayout, out: str, earlier: EarlierExport | None) -> Iterator[Shard]:
    """Write the labels of `data` under `out`, shard by shard; with `earlier`, only new and changed labels."""
    labels = Table.open(data.labels, "labels")
    columns = (*_COLUMNS, *(name for name in labels.columns if name == RETIRED))
    if earlier is not None:
        yield from _write_changes(labels, columns, out, earlier)
        return
    for number in range(len(labels.shards)):
        groups = labels.batches_of(number, columns)
        first = next(groups, None)
        if first is None:
            continue
        group_rows = labels.manifest.group_rows(number)
        with writing_shard(join(out, LABELS), number, len(labels.shards), first.schema, group_rows) as table:
            for group in itertools.chain([first], groups):
                table.write(group)
        yield in_folder(LABELS, table.entry)


def _write_changes(labels: Table, columns: tuple[str, ...], out: str, earlier: EarlierExport) -> Iterator[Shard]:
    ranges = earlier.ranges(LABELS, labels.rows, max(1, labels.rows))
    for piece in ranges:
        table = labels.read(columns, piece.start, piece.stop)
        if piece.entry is not None:
            yield _patched(piece, table, out, earlier)
        else:
            place, size = join(out, LABELS), labels.manifest.row_group_rows or _PATCH_ROWS
            with writing_shard(place, piece.number, piece.files, table.schema, size) as writer:
                writer.write(table)
            yield in_folder(LABELS, writer.entry)


def _patched(piece: FileRange, after: pa.Table, out: str, earlier: EarlierExport) -> Shard:
    """Reuse the earlier file of these labels, with patches for the changes in `after`."""
    assert piece.entry is not None
    metadata = pq.read_metadata(earlier.files.path(piece.entry))
    size = metadata.row_group(0).num_rows if metadata.num_row_groups else 1
    bare = earlier.named(piece.entry, piece.start, size)
    before = pa.concat_tables(iterate_shard(earlier.out, bare, [*_COLUMNS, RETIRED]))
    if RETIRED not in after.column_names:
        after = after.append_column(RETIRED, pa.array(np.zeros(len(after), bool)))
    patched = {}
    if any(not np.array_equal(before[name].to_numpy(), after[name].to_numpy()) for name in _OVER):
        patched["columns"] = after.select([*_OVER])
    texts = [pc.not_equal(before[name], after[name]).combine_chunks() for name in ("key", "text")]
    changed = np.flatnonzero(pc.or_(*texts).to_numpy(zero_copy_only=False))
    if len(changed):
        patched["changed"] = after.select(["key", "text"]).take(changed).add_column(0, POSITION, pa.array(changed))
    patches = {}
    for kind, rows in patched.items():
        place, content = f"{LABELS}/_{kind}-{piece.number:05d}.parquet", encode(rows, _PATCH_ROWS)
        patches[kind] = _write_patch(out, place, partial(Path.write_bytes, data=content))
    return earlier.named(piece.entry, piece.start, size, patches)


def _write_patch(out: str, place: str, write: Callable[[Path], object]) -> Patch:
    with storage.writing(join(out, place)) as path:
        write(Path(path))
        written = describe_file(path, place, 0)
    return Patch(place=place, bytes=written.bytes, sha256=written.sha256)


def in_folder(folder: str, shard: Shard) -> Shard:
    """Return the entry of a file in a folder of the export."""
    return shard.model_copy(update={"path": f"{folder}/{shard.path}"})


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
