"""Write an export, whole or onto an earlier one.

First what an earlier export leaves to write, then files of vectors and labels, then `export` and its writer.
"""

import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from schemas import storage
from schemas.arrow import DENSE, DENSE_MODEL, DenseModel
from schemas.errors import InputError, missing_extra, option
from schemas.layout import DataLayout, RunLayout, shard_name
from schemas.manifest import Manifest, Patch, Shard, View, describe_file, write_file
from schemas.mapped import MappedFile
from schemas.owners import building, clean_up, reading, require_output_folder
from schemas.ragged import Ragged
from schemas.shard_files.parquet import encode, filters_of, list_column, number_column, writing_shard
from schemas.shard_files.shards import POSITION, RETIRED, iterate_shard
from schemas.sizes import say_bytes
from schemas.storage import join, relative, require_room, resolve
from schemas.table import Request, Table, find_reusable
from schemas.versions import VERSION, Version, move_view, parts_since
from schemas.waits import Say
from scoring.calibration import DEEPEST, DEPTH, ScoredPredictions, calibrate, open_fragments
from scoring.card import CARD, card
from scoring.decision import BEST, Decision, LabelIds, Rule, decision_of
from scoring.encoders import ConvertedEncoder, TorchInference, choose_form
from scoring.export_versions import KIND, ExportVersion, require_needed_exports, resolve_export
from scoring.exported import CALIBRATION, DECISION, INDEX, LABELS, POINTS, TEXTS, VECTORS, ExportFiles, Serving
from scoring.fitting import RunFusion, open_fusion, scores_of
from scoring.fusion import EXPORTED_FILES, fusion_file
from scoring.memory import FACTS
from scoring.options import ExportOptions
from scoring.vectors import (
    BATCHES,
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
from search.index import AUTO, EXACT
from trainer.checkpoints import Checkpoint, save_tensors
from trainer.device import CPU, open_device
from trainer.evaluation.evaluate import HOLDOUT, open_held_out, open_split, retired_labels
from trainer.input_kinds import input_names
from trainer.inputs import Inputs, scored_columns
from trainer.methods.recipe import Recipe
from trainer.methods.sections import Data
from trainer.model import DataSizes, Model, embed_labels, embed_texts, find_checkpoint, has_bias, load_encoder
from trainer.stream import open_queries

_SMALL = 8  # rows that versions added are rewritten together if fewer than 1 / _SMALL of the labels
ROWS_A_FILE = 1 << 22  # vectors in a file, and in an index
_MOST_CHANGED = 4  # a file is rewritten if more than a quarter of its rows changed
_COLUMNS = ("label_id", "key", "text", "frequency")  # columns of labels
_OVER = ("frequency", RETIRED)  # columns that change for many labels at once
_PATCH_ROWS = 1 << 16  # rows in a row group


class FileRange(NamedTuple):
    """Rows [start, stop) of file `number` among `files`; `entry`: the earlier export's file of these, if reused."""

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
                raise InputError(f"{option('onto', onto)}: this is OUT itself. Name an earlier export.")
            url = resolve(out, place)
        export = Table.open(url, KIND)
        require_needed_exports(export)
        if parts_since(Table.open(data.root, "data").manifest, export.parents["data"]) is None:
            raise InputError(
                f"{option('onto', url)}: this export was built neither from {data.root} nor from an earlier version. "
                f"Name an export of this data, or leave {option('onto')} out."
            )
        return cls(export, out)

    @cached_property
    def files(self) -> ExportFiles:
        return ExportFiles(self.table)

    @cached_property
    def version(self) -> ExportVersion:
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

    def index(self) -> EarlierIndex | None:
        facts = self.table.parameters["index"]
        if facts is None:
            return None
        vectors, indexes = self.files.of(VECTORS), iter(self.files.of(INDEX))
        shards = [None if effort is None else next(indexes) for effort in facts["efforts"]]
        files = [None if shard is None else (self.files.path(shard), self.named(shard)) for shard in shards]
        return EarlierIndex(facts, files, lambda number: self.files.vectors(vectors[number]))

    def ranges(self, folder: str, labels: int, rows_a_file: int) -> list[FileRange]:
        """Return a folder's files for all `labels`: earlier files that are reused, and new files for later rows."""
        kept = list(self.files.of(folder))
        covered = sum(shard.rows for shard in kept)
        if self.version.onto is not None and covered < labels:
            while kept and kept[-1].view is None and _SMALL * (labels - covered + kept[-1].rows) < labels:
                covered -= kept.pop().rows
        return plan_ranges(kept, labels, rows_a_file)

    def reuse_vectors(self, folder: str, piece: FileRange, rows: np.ndarray) -> tuple[Shard, np.ndarray] | None:
        """Reuse the earlier file of these rows, with a patch for changed rows; None if too many rows have changed."""
        if piece.entry is None:
            return None
        before = map_vectors(MappedFile(str(self.files.path(piece.entry)), private=True))
        changed = changed_rows(before, rows)
        if changed is None or _MOST_CHANGED * len(changed) > len(rows):
            return None
        patches = {}
        if len(changed):
            place = f"{folder}/_changed-{piece.number:05d}.safetensors"
            tensors = {POSITIONS: torch.from_numpy(changed), NAME: torch.from_numpy(rows[changed])}
            patches["changed"] = _write_patch(self.out, place, lambda path: save_tensors(str(path), tensors))
            before[changed] = rows[changed]
        return self.named(piece.entry, piece.start, patches=patches), before


def plan_ranges(kept: Sequence[Shard], labels: int, rows_a_file: int) -> list[FileRange]:
    """Return the files' ranges of labels: the ranges of `kept` files, then new files of at most `rows_a_file` rows."""
    bounds = [*itertools.accumulate((shard.rows for shard in kept), initial=0)]
    while bounds[-1] < labels or len(bounds) == 1:
        bounds.append(min(bounds[-1] + rows_a_file, labels))
    entries = [*kept, *[None] * (len(bounds) - 1 - len(kept))]
    return [FileRange(bounds[n], bounds[n + 1], n, len(entries), entry) for n, entry in enumerate(entries)]


def write_vector_files(
    folder: str,
    labels: int,
    rows_of: Callable[[int, int], torch.Tensor],
    out: str,
    dtype: str,
    scratch: Path,
    earlier: EarlierExport | None = None,
) -> tuple[list[Shard], Vectors]:
    """Write rows [labels, D] as `dtype` to files in `folder` of OUT, and map the files; return both.

    `rows_of(start, stop)` returns rows [start, stop); only one range of rows is in memory at a time. If OUT is remote,
    copies in the local folder `scratch` are mapped. Files of `earlier` with few changed rows are reused.
    """
    ranges = plan_ranges([], labels, ROWS_A_FILE) if earlier is None else earlier.ranges(folder, labels, ROWS_A_FILE)
    shards, mapped = [], []
    for piece in ranges:
        rows = rows_of(piece.start, piece.stop).detach().to(getattr(torch, dtype))
        made = None if earlier is None else earlier.reuse_vectors(folder, piece, rows.cpu().numpy())
        if made is None:
            name = f"{folder}/{shard_name(piece.number, piece.files, 'safetensors')}"
            url = join(out, name)
            is_local = storage.is_local(url)
            local = Path(storage.filesystem(url)[1]) if is_local else scratch / f"{folder}-{piece.number}"
            with storage.writing(url) as path:
                save_tensors(path, {NAME: rows.cpu().contiguous()}, {"start": str(piece.start)})
                shard = describe_file(path, name, len(rows))
                if not is_local:
                    shutil.copyfile(path, local)
            made = shard, map_vectors(MappedFile(str(local), private=True))
        shards.append(made[0])
        mapped.append(made[1])
    return shards, Vectors(mapped)


def write_label_files(data: DataLayout, out: str, earlier: EarlierExport | None) -> Iterator[Shard]:
    """Write the labels of `data` under `out`, shard by shard; with `earlier`, only new and changed labels."""
    labels = Table.open(data.labels, "labels")
    columns = (*_COLUMNS, *(name for name in labels.columns if name == RETIRED))
    if earlier is not None:
        for piece in earlier.ranges(LABELS, labels.rows, max(1, labels.rows)):
            rows = labels.read(columns, piece.start, piece.stop)
            if piece.entry is not None:
                yield _patched(piece, rows, out, earlier)
                continue
            size = labels.manifest.row_group_rows or _PATCH_ROWS
            with writing_shard(join(out, LABELS), piece.number, piece.files, rows.schema, size) as table:
                table.write(rows)
            yield in_folder(LABELS, table.entry)
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


_OF_THE_CARD = ("license", "language")  # options
_TUNING_QUERIES = 512
_COMPARED, _GROUPS = 256, 16  # number of queries to compare a form with PyTorch on; row groups to take queries from
_KEYS = 1 << 14  # training points in a row group
_TOKENS = 128  # maximum number of tokens of a text, if neither the data nor the encoder has a limit


def export(data: str, run: str, out: str, options: ExportOptions, say: Say = print) -> Manifest:
    """Export a checkpoint of RUN, which was trained on DATA, to OUT.

    An export has the rest of its files in an earlier export, `onto`. The export does not record the device that
    computes the vectors. If OUT already contains an export of the same checkpoint with the same options, returns this
    export. Raises InputError if there is no checkpoint or no such split, if RUN used other data, or if OUT has other
    content. Raises TableError, StorageError.
    """
    layout = DataLayout(data)
    recipe, checkpoint = find_checkpoint(layout, RunLayout(run), RunLayout(run).scored_step(options.step))
    scores = options.scores or scores_of(run, checkpoint.step)
    parents = {"data": Table.open(data, "data").digest, "checkpoint": checkpoint.table.digest}
    if scores == "sum" and recipe.encodes_labels:
        raise InputError(f"{option('scores', scores)}: labels of {run} are scored only by their texts. Leave it out.")
    fusion = open_fusion(data, run, checkpoint) if scores == "fused" else None
    if fusion is not None:
        parents["fusion"] = fusion.table.digest
    earlier = None if options.onto is None else EarlierExport.open(options.onto, out, layout)
    before = None if earlier is None else earlier.table.parameters["options"]
    chosen_form = choose_form(options.form, recipe.encoder, before)
    decision = _read_decision(layout, options, earlier)
    split, reason = _calibration_split(layout, options.calibration_split, recipe.data)
    if reason:
        say(f"no probabilities: {reason}")
    if decision.limit is not None and split is None:
        raise InputError(f"{option(decision.limit)} needs probabilities, but there will be none: {reason}")
    recorded = {
        "dtype": options.dtype,
        "index": options.index,
        "purpose": options.purpose,
        "target_recall": options.target_recall,
        **({} if scores == "classifier" else {"scores": scores}),
        **({"form": chosen_form} if chosen_form else {}),
        "calibration_split": split,
        **options.model_dump(include={*_OF_THE_CARD}, exclude_defaults=True, mode="json"),
        "decision": decision.model_dump(mode="json", exclude_none=True),
    }
    require_output_folder(out, "exported", [data, run, None if earlier is None else earlier.table.url])
    based_on = {} if earlier is None else {"onto": earlier.table.digest}
    request = Request(KIND, parents, {"options": {**recorded, **based_on}})

    def find_finished() -> Manifest | None:
        return find_reusable(
            out, request, f"Give {option('overwrite', True)}, or another OUT.", overwrite=options.overwrite
        )

    finished = find_finished()
    if finished is None:
        width, item = recipe.encoder.dimension + int(has_bias(recipe)), DTYPES[options.dtype].itemsize
        vectors = Table.open(layout.labels, "labels").rows * width * item
        require_room(out, {"vectors": vectors}, f"Give another OUT, or {option('dtype', 'float16')}.")
        lease = contextlib.nullcontext() if earlier is None else reading(earlier.table.url, say)
        with building(out, "exported", say) as build, lease:
            finished = find_finished()  # the previous owner of OUT may have finished the export
            if finished is None:
                model = load_encoder(layout, RunLayout(run), checkpoint.step, open_device(options.device))
                with tempfile.TemporaryDirectory(prefix="extremis-export-") as scratch:
                    place = build.url, Path(scratch), earlier
                    writer = _Writer(
                        layout, run, recipe, checkpoint, model, fusion, split, decision, recorded, *place, say
                    )
                    return build.publish(writer.write(request))
    clean_up(out, "exported")
    say(f"{out}: exported already")
    return finished


def _read_decision(data: DataLayout, options: ExportOptions, earlier: EarlierExport | None) -> Decision:
    """Return the decision that `options` state, else the earlier export's. Raises InputError for unknown labels."""
    decision = decision_of(options)
    if earlier is not None and decision == Decision():  # an update keeps what a service does
        decision = earlier.files.decision
    Rule.of(decision, LabelIds.of_data(data))  # checks the keys
    return BEST.narrowed(decision)


def _calibration_split(data: DataLayout, split: str | None, training_data: Data) -> tuple[str | None, str]:
    """Return the split for the calibration, or why there is none; `test` only if named. Raises InputError."""
    if split == "none":
        return None, f"{option('calibration_split', split)}"
    named = split or ("val" if "queries/val" in Table.open(data.root, "data").parents else None)
    try:
        found = open_held_out(data, named, training_data, "A calibration")[0]
        if find_spec("sklearn") is None:
            raise missing_extra("a calibration needs scikit-learn", "trainer")
    except InputError as error:
        if split is not None:
            raise
        return None, str(error)
    return found, ""


@dataclass(frozen=True)
class _Writer:
    """Writes the files of an export at `out`, with the `options` that the manifest records, based on `earlier`."""

    data: DataLayout
    run: str
    recipe: Recipe
    checkpoint: Checkpoint
    model: Model
    fusion: RunFusion | None
    split: str | None  # for the calibration
    decision: Decision
    options: dict[str, Any]
    out: str
    scratch: Path  # a local folder for copies
    earlier: EarlierExport | None
    say: Say
    plans: dict[str, Any] = field(default_factory=dict)  # ways to search that were weighed

    def write(self, request: Request) -> Manifest:
        """Write all files; return the manifest that will publish the files."""
        facts, recipe = DataSizes.of(self.data), self.recipe
        tokens = self._limit_tokens(facts.manifest)
        shards, converted = self._write_encoders(tokens)
        shards += write_label_files(self.data, self.out, self.earlier)
        written, serving = self._write_serving(converted)
        index_shards, index = self._write_index(serving)
        calibration = self._calibrate(serving)
        agreement = converted.compare(serving, self.say) if converted else {}
        shards += [*written, *index_shards, write_file(self.out, DECISION, self.decision.to_toml())]
        if calibration is not None:
            body = json.dumps(calibration, indent=1, sort_keys=True).encode()
            shards.append(write_file(self.out, CALIBRATION, body))
        dense: dict[str, Any] = {}
        if DENSE in input_names(recipe.encoder.inputs):
            described = DenseModel.from_parameters(facts.manifest.parameters, self.data.root)
            dense = {DENSE: facts.dense, **({DENSE_MODEL: described.as_json()} if described else {})}
        version = ExportVersion(Version.of(Table.open(self.data.root, "data").manifest).part)
        if self.earlier is not None:
            table = self.earlier.table
            onto = relative(self.earlier.out, table.url)
            version = ExportVersion(version.part, onto, table.digest, self.earlier.needs(shards))
        manifest = Manifest(
            kind=KIND,
            shards=tuple(shards),
            rows=facts.labels,
            id_range=(0, facts.labels),
            parents=dict(request.parents or {}),
            parameters={
                **request.parameters,
                VERSION: asdict(version),
                "recipe": recipe.model_dump(mode="json"),
                "vocabulary": facts.vocabulary,
                "features": facts.features,
                **dense,
                "max_tokens": tokens,
                "texts": {name: facts.manifest.parameters.get("options", {}).get(name) for name in ("fields", "text")},
                "training_points": Table.open(self.data.labels, "labels").parameters.get("training_points"),
                "dimension": serving.vectors.shape[1],
                "bias": has_bias(recipe),
                "step": self.checkpoint.step,
                "index": index,
                "plans": self.plans,
                **({"agreement": agreement} if agreement else {}),
                "shortlist": None if serving.fused is None else serving.fused.shortlist,
                FACTS: None if self.fusion is None else self.fusion.table.parameters.get(FACTS),
                "calibration": calibration,
                **({} if serving.retired is None else {RETIRED: int(serving.retired.sum())}),
            },
        )
        stated = {name: self.options[name] for name in _OF_THE_CARD if name in self.options}
        frequency = number_column(Table.open(self.data.labels, "labels").read(("frequency",)), "frequency")
        place = RunLayout(self.run).evaluation("test", self.checkpoint.step)
        evaluation = storage.read_json(place) if storage.exists(place) else None
        splits = [name.partition("/")[2] for name in sorted(facts.manifest.parents) if name.startswith("queries/")]
        rows = {split: Table.open(self.data.queries(split), "queries").rows for split in splits}
        text = card(manifest, rows, self.decision, int((frequency == 0).sum()), evaluation, **stated)
        return manifest.model_copy(update={"shards": (*shards, write_file(self.out, CARD, text.encode()))})

    def _limit_tokens(self, data: Manifest) -> int:
        """Return the maximum number of tokens per text: the smaller of DATA's limit and the encoder's own limit."""
        limit = self.recipe.encoder.token_limit
        stored = limit or _TOKENS
        if "tokenizer" in data.parents:
            stored = int(Table.open(self.data.tokenizer, "tokenizer").parameters.get("max_tokens", stored))
        if limit is not None and limit < stored:
            self.say(
                f"encoder.max_tokens = {limit} is below the data's limit of {stored} tokens: longer texts lost the "
                "last special token in training, but keep this token in the exported encoder"
            )
            return limit
        return stored

    def _write_encoders(self, tokens: int) -> tuple[list[Shard], ConvertedEncoder | None]:
        """Write each encoder's folder, with the tokenizer's files; return the first encoder in a non-default form."""
        shards, converted = list[Shard](), list[ConvertedEncoder]()
        for name, encoder in self.model.encoders.items():
            folder = self.scratch / name
            folder.mkdir()
            encoder.write(folder, tokens)
            if form := self.options.get("form"):
                # Rows of the split for the calibration, else held-out rows, else training rows.
                split = self.split or (HOLDOUT if self.recipe.data.holdout else self.recipe.data.split)
                table, share = open_split(self.data, split, self.recipe.data)
                groups = [*itertools.islice(share.batches(table, self.model.columns), _GROUPS)]
                rows = pa.concat_tables(groups).slice(0, _COMPARED).combine_chunks() if groups else None
                compared = Inputs(Ragged.empty(0)) if rows is None else Inputs.of(rows)
                converted.append(ConvertedEncoder.write(form, self.recipe.encoder, folder, compared))
                folder = converted[-1].folder
            if "tokenizer" in Table.open(self.data.root, "data").parents:
                for file, content in Table.open(self.data.tokenizer, "tokenizer").read_files().items():
                    (folder / file).write_bytes(content)
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    file = path.relative_to(folder).as_posix()
                    shards.append(in_folder(name, write_file(join(self.out, name), file, path.read_bytes())))
        return shards, converted[0] if converted else None

    def _text_rows(self, start: int, stop: int) -> torch.Tensor:
        return torch.cat([rows.cpu() for _, rows in embed_texts(self.model, self.data, start, stop)])

    def _rows_to_score(self, start: int, stop: int) -> torch.Tensor:
        """Return the vectors of labels [start, stop) that x is scored against."""
        if self.recipe.encodes_labels:
            return torch.cat([rows.cpu() for _, rows in embed_labels(self.model, self.data, start, stop)])
        rows = self.checkpoint.vectors("weight", start, stop)
        if self.options.get("scores") != "sum":
            return rows
        texts = self._text_rows(start, stop)
        return rows.float() + torch.nn.functional.pad(texts, (0, rows.shape[1] - texts.shape[1]))  # a bias is kept

    def _write_serving(self, converted: ConvertedEncoder | None) -> tuple[list[Shard], Serving]:
        """Write the vectors and the fusion's data, and open both for exact search."""
        fusion, model, labels = self.fusion, self.model, self.checkpoint.labels
        place = self.out, self.options["dtype"], self.scratch, self.earlier
        shards, vectors = write_vector_files(VECTORS, labels, self._rows_to_score, *place)
        encoder = converted.served if converted else TorchInference(model.encoder)
        serving = Serving(encoder, model.inputs, vectors, model.head.bias, retired=retired_labels(self.data))
        if fusion is None:
            return shards, serving
        texts, scorers = None, fusion.scorers(None, CPU)
        memory = scorers.memory
        if fusion.fusion.reads_texts:
            text_shards, texts = write_vector_files(TEXTS, labels, self._text_rows, *place)
            shards += text_shards
        if memory is not None:
            self._say_plans("memory", memory.measured.get("plans", []), memory.factory.spec)
            shards += memory.write(self.out)
        shards += [scorer.write(self.out) for scorer in scorers.of_words]
        name, content = fusion_file(fusion.fusion.exported())
        shards.append(write_file(self.out, EXPORTED_FILES[name], content))
        if memory is not None:
            rows = self.recipe.data
            table, schema = open_queries(self.data, rows.split), pa.schema({"key": pa.string()})
            held_out = len(memory.vectors) - memory.trained
            with writing_shard(join(self.out, POINTS), 0, 1, schema, _KEYS) as shard:
                for share, count in ((rows.training_rows, memory.trained), (rows.held_out_rows, held_out)):
                    for keys in share.batches(table, ["key"], count):
                        shard.write(keys)
            shards.append(in_folder(POINTS, shard.entry))
        scorers = replace(scorers, texts=texts)
        return shards, replace(serving, fused=fusion.reranker(scorers, self.data, self.recipe.data))

    def _write_index(self, serving: Serving) -> tuple[list[Shard], dict[str, Any] | None]:
        """Write an index if the options request it; return the index files and the facts needed to open the files."""
        earlier = None if self.earlier is None else self.earlier.index()
        queries = np.empty((0, serving.vectors.shape[1]), np.float32)
        groups = open_queries(self.data, "train").batches(serving.columns)
        for group in itertools.islice(groups, 1):  # pre-shuffled shards
            queries = serving.embed(Inputs.of(group.slice(0, _TUNING_QUERIES)))
        width = DEPTH if serving.fused is None else serving.fused.shortlist
        recall, place, spec = self.options["target_recall"], join(self.out, INDEX), self.options["index"]
        if spec == AUTO and earlier is not None:
            spec = earlier.facts["factory"]
        batch = BATCHES[self.options["purpose"]]
        chosen, first, plans = choose_index(spec, serving.vectors, queries, width, recall, batch)
        self._say_plans("labels", [plan._asdict() for plan in plans], chosen or EXACT)
        if chosen is None:
            return [], None
        shards, facts = write_indexes(chosen, serving.vectors, queries, width, recall, place, earlier, first)
        measured = [effort["recall"] for effort in facts["efforts"] if effort and effort["recall"] is not None]
        said = f"{min(measured):.4f}" if measured else "not measured: there are no training queries"
        self.say(f"index {chosen}: recall {said} of the best {width} labels of {len(queries):,} training queries")
        return [shard if shard.view else in_folder(INDEX, shard) for shard in shards], facts

    def _say_plans(self, what: str, plans: Sequence[Mapping[str, Any]], chosen: str) -> None:
        """Print what was weighed, and record it without the time, which would change the manifest's digest."""
        for plan in plans:
            self.plans.setdefault(what, []).append({name: plan[name] for name in ("factory", "bytes", "recall")})
            found = "estimated" if plan["recall"] is None else f"recall {plan['recall']:.4f}"
            time = f"{plan['microseconds']:,.0f} µs per query on a core"
            mark = ", chosen" if plan["factory"] == chosen else ""
            self.say(f"{what}, {plan['factory']}: {found}, {say_bytes(plan['bytes'])}, {time}{mark}")

    def _calibrate(self, serving: Serving) -> dict[str, Any] | None:
        """Fit a calibration to the best predictions for each query of the split, and check the decision against it."""
        split = self.split
        if split is None:
            return None
        left_out: tuple[Sequence[int], ...] = ()
        if self.fusion is not None and serving.fused is not None:  # no row finds itself, or was fitted to itself
            scorers = self.fusion.scorers(serving.fused.scorers.texts, CPU, split)
            serving = replace(serving, fused=self.fusion.reranker(scorers, self.data, self.recipe.data, split))
            left_out = self.fusion.left_out(split)
        table, share = open_split(self.data, split, self.recipe.data)
        depth = DEEPEST if serving.fused is None else max(DEPTH, serving.fused.shortlist)
        predictions = ScoredPredictions(open_fragments(self.data, serving.columns), *left_out)
        for rows in share.batches(table, scored_columns(table, serving.columns)):
            inputs, positives = Inputs.of(rows, serving.columns), list_column(rows, "label_ids")
            scores, ids = serving.rank(inputs, min(depth, len(serving.vectors)), filters_of(rows))
            if serving.retired is not None:
                positives = positives.keep(~serving.retired[positives.values])
            labelled = np.flatnonzero(positives.counts)  # all rows, unless labels are retired
            predictions.collect(ids[labelled], scores[labelled], positives.take(labelled), inputs.take(labelled))
        try:
            curve, measured = calibrate(predictions)
        except InputError as error:
            if self.decision.limit is not None:
                raise
            self.say(f"no probabilities: {error}")
            return None
        self.decision.require(curve)
        return {"split": split, "queries": predictions.queries, **curve.described(measured)}
