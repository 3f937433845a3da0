"""An open export: its files, checked and mapped (`ExportFiles`); its scores (`Serving`); its answers (`Exported`)."""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ValidationError

from pipelines.sharding.tokenizer import FILE
from schemas import PAD, storage
from schemas.arrow import DENSE, DenseModel
from schemas.errors import ExtremisError, InputError, TableError, missing_extra, option
from schemas.manifest import Shard, find_shard, read_patch, shard_url, verify_shard
from schemas.mapped import MappedFile, file_stamp
from schemas.ragged import Ragged, pad_columns, take_per_row
from schemas.shard_files.parquet import number_column
from schemas.shard_files.shards import RETIRED, ViewedShard, open_shard, read_group
from schemas.storage import join, require_room
from schemas.table import Table
from scoring.calibration import DEPTH, NONE_THRESHOLD, Calibration, fragments_of, share_of_fragments, sigmoid
from scoring.decision import Decision, LabelIds, Rule, choose, parse_decision, reached
from scoring.export_versions import KIND, require_needed_exports, resolve_export
from scoring.fusion import EXPORTED_FILES, Reranker, Scorers, Search, parse_fusion
from scoring.memory import Memory
from scoring.vectors import IndexedRange, Vectors, map_vectors, open_indexes, patch_vectors, search_indexes
from search.topk import CPU
from trainer.input_kinds import InputKind
from trainer.inputs import Inputs, columns_of
from trainer.methods.keys import explain
from trainer.methods.kinds import ENCODERS, EncoderSection, import_name, options_of

REMEDY = "Export the run again."
_HASHED = 256 << 20  # only the length of a larger file is checked; `extremis inspect --verify` reads everything
_COPY_BYTES = 1 << 20  # bytes of a copy in memory at a time


class ExportFiles:
    """Files of the export `table`; remote files are copied to TMPDIR on demand.

    Every file is checked before the first read; reads raise TableError if a file was overwritten.
    """

    def __init__(self, table: Table) -> None:
        self.table, self.url = table, table.url
        self._checked: dict[str, tuple[int, int, int]] = {}
        self.mapped: list[MappedFile] = []  # files that `require_unchanged` checks

    @cached_property
    def folder(self) -> Path:
        """Folder of the export's own files."""
        return Path(storage.filesystem(self.url)[1] if storage.is_local(self.url) else self._copies.name)

    @cached_property
    def _copies(self) -> tempfile.TemporaryDirectory:
        return tempfile.TemporaryDirectory(prefix="extremis-export-")

    def of(self, folder: str) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.table.shards if shard.path.startswith(f"{folder}/"))

    def path(self, shard: Shard) -> Path:
        """Check a file once, and return its path. Raises TableError for a damaged or changed file; StorageError."""
        place = shard_url(self.url, shard)
        is_local = storage.is_local(place)
        path = storage.filesystem(place)[1] if is_local else join(self._copies.name, shard.path)
        if path in self._checked:
            if file_stamp(path) != self._checked[path]:
                raise _changed(path)
            return Path(path)
        if not is_local:
            self._fetch(shard, Path(path))
        before = file_stamp(path)
        if is_local:
            check = verify_shard if shard.bytes <= _HASHED else find_shard
            check(self.url, shard, remedy=REMEDY)
        self._checked[path] = before
        return Path(path)

    def check_all(self) -> None:
        """Check, or download, all files; a second call checks that no file changed. Raises TableError, StorageError."""
        for shard in self.table.shards:
            self.path(shard)

    def require_unchanged(self) -> None:
        """Raise TableError if a mapped file was overwritten, because the mapped rows would then mix two exports."""
        for file in self.mapped:
            if file.has_changed():
                raise _changed(file.path)

    def map(self, name: str) -> MappedFile:
        """Map a file, and let `require_unchanged` check the file. Changes to the mapped bytes stay in memory."""
        shard = self.find(name)
        self.mapped.append(MappedFile(str(self.path(shard)), shard.bytes, private=True))
        return self.mapped[-1]

    def find(self, name: str) -> Shard:
        """Return the entry of a file. Raises TableError if there is none."""
        shard = next((shard for shard in self.table.shards if shard.path == name), None)
        if shard is None:
            raise TableError(f"{self.url}: this export contains no {name}. {REMEDY}")
        return shard

    @cached_property
    def decision(self) -> Decision:
        """The decision of the export. Raises TableError, InputError."""
        return parse_decision(self.path(self.find(DECISION)).read_bytes(), join(self.url, DECISION))

    def vectors(self, shard: Shard) -> Any:
        """Return the rows [n, D] of a mapped file of vectors, after later changes to rows are applied."""
        rows = map_vectors(self.map(shard.path))
        if shard.view is not None and shard.view.changed is not None:
            patch_vectors(rows, read_patch(self.url, shard.view.changed))
        return rows

    def read(self, folder: str, columns: tuple[str, ...]) -> pa.Table:
        """Read columns of all rows of the Parquet files in `folder`. Raises TableError."""
        tables = []
        for shard in self.of(folder):
            path = self.path(shard)
            if shard.view is None:
                tables.append(pq.ParquetFile(path).read([*columns]))
                continue
            root = str(path).removesuffix(shard.path)
            with open_shard(root, shard.model_copy(update={"view": None})) as file:
                viewed = ViewedShard(file, self.url, shard.view)
                for group in range(viewed.num_row_groups):
                    tables.append(read_group(viewed, group, columns, str(path)).select([*columns]))
        rows = pa.concat_tables(tables).combine_chunks()
        for shard in self.of(folder):
            self.path(shard)  # checks that the file has not changed
        return rows

    def _fetch(self, shard: Shard, path: Path) -> None:
        place = find_shard(self.url, shard, REMEDY)
        require_room(str(path.parent), {f"copies of {self.url}": shard.bytes}, "Set TMPDIR to a folder with more room.")
        path.parent.mkdir(parents=True, exist_ok=True)

        def copy() -> str:
            with storage.open_read(place) as source, path.open("wb") as out:
                shutil.copyfileobj(source, out, _COPY_BYTES)
            return storage.file_sha256(str(path))

        if storage.read_matching(copy, lambda digest: digest == shard.sha256) != shard.sha256:
            raise TableError(f"{place}: damaged: the SHA-256 does not match the manifest. {REMEDY}")


def _changed(path: str) -> TableError:
    return TableError(
        f"{path}: changed since the export was opened. Open the export again. Write each new export to a new folder, "
        f"and switch to it with {option('current', True)}, instead of overwriting files in use."
    )


ENCODER, VECTORS, LABELS, INDEX = "encoder", "vectors", "labels", "index"
CALIBRATION, DECISION = "calibration.json", "decision.toml"
POINTS = "points"  # keys of a memory's training points
TEXTS = "label-texts"
_BATCH = 1024  # number of rows encoded at a time
_LONG = 1 << 12  # tokens of a row that is not answered alone

# Places of classes by kind of encoder and form, the default form first. `open` of a class reads the encoder's files.
_TORCH = {"torch": "scoring.encoders:TorchInference"}  # for any encoder
FORMS: Mapping[str, Mapping[str, str]] = {
    "bag": {"numpy": "trainer.encoders.bag:BagInference"},
    "transformer": {
        **_TORCH,
        "onnx": "scoring.onnx_inference:OnnxInference",
        "onnx-int8": "scoring.onnx_inference:OnnxInt8Inference",
    },
}


def forms_of(section: EncoderSection) -> Mapping[str, str]:
    """Return the forms that an encoder can be exported in, as in FORMS."""
    return FORMS.get(section.kind, _TORCH)


class Answer(NamedTuple):
    """Best labels of B rows: `scores` float32 and `ids` int64 [B, k], best first; padded with -inf and -1.

    `probabilities` float32 [B, k] and `none_of_these` bool [B] (as in a `Calibration`), if the export is calibrated.
    `unfamiliar` [B] bool: texts with more fragments than the held-out texts, whose scores say nothing.
    """

    scores: np.ndarray
    ids: np.ndarray
    probabilities: np.ndarray | None
    none_of_these: np.ndarray | None
    unfamiliar: np.ndarray

    def take(self, rows: np.ndarray) -> "Answer":
        """Return the answers of `rows` [B']."""
        return Answer(*(None if each is None else each[rows] for each in self))  # type: ignore[arg-type]

    def packed(self) -> "Answer":
        """Return the answers with padding at the end of rows, and as narrow as the longest one."""
        present = self.ids != PAD
        order = np.argsort(~present, axis=1, kind="stable")[:, : int(present.sum(axis=1).max(initial=0))]
        ids, scores = take_per_row(self.ids, order), take_per_row(self.scores, order)
        found = None if self.probabilities is None else take_per_row(self.probabilities, order)
        scores = np.where(ids == PAD, np.float32(-np.inf), scores)
        return self._replace(ids=ids, scores=scores, probabilities=found)

    @classmethod
    def join(cls, parts: "Sequence[Answer]", order: np.ndarray) -> "Answer":
        """Return the rows of all `parts`, then in `order` [B]."""
        width = max((part.ids.shape[1] for part in parts), default=0)
        filled = []
        for part in parts:
            found = None if part.probabilities is None else pad_columns(part.probabilities, width)
            ids, scores = pad_columns(part.ids, width, PAD), pad_columns(part.scores, width, -np.inf)
            filled.append(part._replace(ids=ids, scores=scores, probabilities=found))
        columns = (None if each[0] is None else np.concatenate(each) for each in zip(*filled, strict=True))
        return cls(*columns).take(order)  # type: ignore[arg-type]


class Embedder(Protocol):
    def embed(self, inputs: Inputs, /) -> np.ndarray:
        """Return x float32 [B, D]."""


@dataclass(frozen=True, eq=False)
class Serving:
    """An encoder for `inputs`, the vectors [L, D] that x is scored against, and optionally an index of the vectors.

    `fused` reranks the best labels. `bias`: the last column of the vectors is a bias, and x gets a 1 in this column.
    `retired` [L] bool: labels that are never predicted. `files`: the mapped files. `alone`: answers single rows, with
    equal results, once it is compiled.
    """

    encoder: Embedder
    inputs: InputKind
    vectors: Vectors
    bias: bool = False
    index: tuple[IndexedRange, ...] = ()
    fused: Reranker | None = None
    retired: np.ndarray | None = None
    files: ExportFiles | None = None
    alone: "Serving | None" = None

    @property
    def columns(self) -> list[str]:
        """Names of the columns that the encoder reads."""
        return columns_of(self.inputs)

    @cached_property
    def candidates(self) -> np.ndarray | None:
        """Labels [C] that may be predicted, ascending; None: all."""
        return None if self.retired is None else np.flatnonzero(~self.retired)

    def embed(self, inputs: Inputs) -> np.ndarray:
        """Embed the inputs of B rows: x float32 [B, D], ready for products with the vectors.

        Raises TableError if the export's files were overwritten.
        """
        if self.files is not None:
            self.files.require_unchanged()
        x = np.ones((inputs.rows, self.vectors.shape[1]), np.float32)
        for start in range(0, len(x), _BATCH):
            part = slice(start, min(start + _BATCH, len(x)))
            x[part, : x.shape[1] - self.bias] = self.encoder.embed(inputs.slice(part.start, part.stop))
        return x

    def suited(self, inputs: Inputs) -> "Serving":
        """Return what answers these inputs: `alone` for a single row."""
        if self.alone is not None and inputs.rows == 1 and inputs.tokens is not None and inputs.tokens.longest < _LONG:
            return self.alone if self.retired is None else replace(self.alone, retired=self.retired)
        return self

    def rank(self, inputs: Inputs, k: int, filters: Ragged | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Return the result of `top_k` for the inputs of B rows."""
        return self.top_k(self.embed(inputs), k, filters, inputs=inputs)

    def top_k(
        self, x: np.ndarray, k: int, filters: Ragged | None = None, exact: bool = False, inputs: Inputs | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores float32 [B, k], ids int64 [B, k]) of the best labels, best first; padded with -inf and -1.

        `filters`: label ids to exclude for each row. If there is an index, the index finds candidates, which are scored
        exactly; `exact` ignores the index. `inputs`: the inputs that x was computed from, which a linear ranker reads.
        Raises TableError if the export's files were overwritten, ExtremisError if a score is not a number.
        """
        if self.files is not None and inputs is None:
            self.files.require_unchanged()  # otherwise `embed` has checked the files
        filters = filters or Ragged.empty(len(x))
        search = self._search(x, exact)
        if self.fused is None:
            return search(k, filters, self.candidates)
        return self.fused.rank(x, self.vectors, search, k, filters, self.candidates, inputs)

    def _search(self, x: np.ndarray, exact: bool = False) -> Search:
        """Return a search for the labels with the best products with x, as `Reranker.rank` needs it."""
        searched = self.vectors.indexed if exact or not self.index else self.index

        def search(k: int, filters: Ragged, candidates: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
            wanted, width = min(k, len(self.vectors)), k + filters.longest
            while True:
                ids, scores = search_indexes(searched, x, min(width, len(self.vectors)))
                if candidates is not None and self.retired is not None:
                    ids = np.where((ids >= 0) & self.retired[ids], PAD, ids)
                ids, scores = filters.filter_ranking(ids, scores, k)
                # Some of the best labels are retired: search deeper for rows with too few other labels.
                if candidates is None or width >= len(self.vectors) or (ids[:, :wanted] != PAD).all():
                    return scores, ids
                width *= 4

        return search

    def explain(self, inputs: Inputs, label: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return the terms of the score of a label for one row, and all scorers' scores, both by name."""
        x = self.embed(inputs)
        if self.fused is not None:
            return self.fused.parts(x, self.vectors, self._search(x), label, inputs)
        scores = {"vector": float(self.vectors.score(x, np.array([[label]]))[0, 0])}
        return scores, scores


@dataclass(frozen=True)
class Exported:
    """An open export with its files on a local disk."""

    table: Table
    files: ExportFiles
    serving: Serving
    calibration: Calibration | None = None

    @classmethod
    def open(cls, url: str, exact: bool = False, device: str = CPU) -> "Exported":
        """Open the export at `url`, or the current export in a folder; remote files are copied to TMPDIR.

        An open export does not change, even if another version becomes current. `exact`: open no index. The encoder,
        and vectors that are searched without an index, are placed on `device`.

        Raises TableError if there is no export, or if the export is unfinished or damaged. Raises StorageError.
        """
        while True:
            version = resolve_export(url)
            try:
                return cls._open(version, exact, device)
            except TableError:
                if resolve_export(url) == version:  # else another export is current now, and this one may be gone
                    raise

    @classmethod
    def _open(cls, url: str, exact: bool, device: str) -> "Exported":
        table = Table.open(url, KIND)
        with _naming_damage(url):
            try:
                section = restore_encoder(table.parameters["recipe"], url)
                form = table.parameters["options"].get("form", next(iter(forms_of(section))))
                served = import_name(forms_of(section)[form])
            except ImportError as error:
                extra = "onnx" if error.name == "onnxruntime" else "trainer"
                raise missing_extra(f"{url}: the encoder needs {error.name}", extra) from None
            require_needed_exports(table)
            files = ExportFiles(table)
            facts, bias = table.parameters, bool(table.parameters["bias"])
            vectors, texts = (Vectors([files.vectors(s) for s in files.of(name)], device) for name in (VECTORS, TEXTS))
            files.check_all()
            sizes = facts["vocabulary"], facts["features"], facts.get(DENSE) or 0
            folder = files.folder / ENCODER
            encoder = served.open(section, folder, lambda name: files.map(f"{ENCODER}/{name}"), sizes, device)
            if vectors.shape != (table.rows, facts["dimension"]) or section.dimension + bias != facts["dimension"]:
                raise ValueError(f"vectors of shape {vectors.shape}")
            if sum(pq.read_metadata(files.path(shard)).num_rows for shard in files.of(LABELS)) != table.rows:
                raise ValueError("the number of labels differs from the number of vectors")
            indexed: tuple[IndexedRange, ...] = ()
            for each in vectors.indexed if exact or not facts["index"] else ():
                each.block.prepare()
            if facts["index"] and not exact:
                paths = [str(files.path(shard)) for shard in files.of(INDEX)]
                indexed = open_indexes(paths, facts["index"], vectors)
            fused = None
            if facts.get("shortlist"):
                local = Table(str(files.folder), table.manifest)
                memory = Memory.read(local, coded=True)
                scorers = Scorers.read(local, texts if len(texts) else None, memory)
                files.mapped += [scorer.file for scorer in (memory, *scorers.of_words) if scorer and scorer.file]
                (file,) = (files.folder / name for name in EXPORTED_FILES.values() if (files.folder / name).exists())
                frequency = number_column(files.read(LABELS, ("frequency",)), "frequency")
                fused = Reranker(parse_fusion(file.read_bytes(), str(file)), scorers, frequency, facts["shortlist"])
            retired = number_column(files.read(LABELS, (RETIRED,)), RETIRED) if facts.get(RETIRED) else None
            serving = Serving(encoder, section.inputs, vectors, bias, indexed, fused, retired, files)
            files.check_all()
            learned = table.parameters.get("calibration")
            calibration = Calibration.read(learned, url) if learned else None
        pa.default_memory_pool().release_unused()  # memory that Arrow used for reading
        return cls(table, files, serving, calibration)

    @property
    def dense_model(self) -> DenseModel | None:
        """Model of the encoder's dense vectors; None without dense vectors, or if the user supplies the vectors."""
        return DenseModel.from_parameters(self.table.parameters, self.table.url)

    @cached_property
    def decision(self) -> Decision:
        """The decision of this export, which a call may change. Raises TableError."""
        with _naming_damage(self.table.url):
            return self.files.decision

    @cached_property
    def ids_of(self) -> LabelIds:
        """Finds ids of labels by key."""
        return LabelIds(self.table.url, lambda: self.label_table()["key"].to_pylist())

    @cached_property
    def look_up(self) -> Callable[[Decision], Rule]:
        """Looks up the labels of a decision, and checks its limit; the last ones are remembered. Raises InputError."""

        def look_up(decision: Decision) -> Rule:
            if decision.limit is not None:
                decision.require(self.calibration)
            rule, retired = Rule.of(decision, self.ids_of), self.serving.retired
            if retired is None:
                return rule
            return replace(rule, may_give=~retired if rule.may_give is None else rule.may_give & ~retired)

        return lru_cache(32)(look_up)

    def decide(
        self,
        inputs: Inputs,
        decision: Decision,
        never: Ragged | None = None,
        allowed: Ragged | None = None,
        known: np.ndarray | None = None,
    ) -> Answer:
        """Return the labels that `decision` gives to B rows; texts without known tokens choose by frequency.

        `never`, `allowed`: further ids of labels that a row may not have, or alone may have. `known` [B]: number of
        known tokens in each text. The score of a frequent label is the log odds that a training point has the label.
        Raises InputError for an unknown key, and for a limit that the calibration does not have or meet.
        """
        rule = self.look_up(decision)
        if allowed is None:
            return self._decide(inputs, rule, rule.may_give, never, known)
        rows_of_sets: dict[bytes, list[int]] = {}
        for row in range(inputs.rows):
            ids = np.unique(allowed.slice(row, row + 1).entries)
            rows_of_sets.setdefault(ids.astype(np.int64).tobytes(), []).append(row)
        parts = []
        for listed, places in rows_of_sets.items():
            own, rows = np.zeros(self.table.rows, bool), np.array(places)
            own[np.frombuffer(listed, np.int64)] = True
            may_give = own if rule.may_give is None else own & rule.may_give
            own_never, own_known = never and never.take(rows), None if known is None else known[rows]
            parts.append(self._decide(inputs.take(rows), rule, may_give, own_never, own_known))
        return Answer.join(parts, np.argsort(np.concatenate([*rows_of_sets.values()])))

    def _decide(
        self,
        inputs: Inputs,
        rule: Rule,
        may_give: np.ndarray | None,
        never: Ragged | None,
        known: np.ndarray | None,
    ) -> Answer:
        """Rank as many labels as the decision about each row needs; `may_give` [L]: labels of the rule and the rows."""
        serving, curve, decision = self.serving.suited(inputs), self.calibration, rule.decision
        if may_give is not None:
            serving = replace(serving, retired=~may_give)
        never = Ragged.empty(inputs.rows) if never is None else never
        share = np.broadcast_to(share_of_fragments(inputs.tokens, self._fragments), inputs.rows)
        unfamiliar = np.zeros(inputs.rows, bool) if curve is None else share > curve.most_fragments
        blank = np.zeros(inputs.rows, bool) if known is None else known == 0
        width = max(decision.at_least, decision.max_labels or DEPTH)
        if decision.limit is not None:
            width = DEPTH if serving.fused is None else serving.fused.shortlist
            width = max(decision.at_least, min(width, decision.max_labels or width))
        x, rows, parts, order = serving.embed(inputs), np.arange(inputs.rows), list[Answer](), list[np.ndarray]()
        while len(rows) or not parts:
            k, is_all = min(width, self.table.rows), len(rows) == inputs.rows
            some, left_out = (inputs, never) if is_all else (inputs.take(rows), never.take(rows))
            scores, ids = serving.top_k(x[rows], k, left_out, inputs=some)
            is_blank = blank[rows]
            if is_blank.any():
                ids[is_blank], scores[is_blank] = self._most_frequent(
                    k, left_out.take(np.flatnonzero(is_blank)), may_give
                )
            found, is_none, compared = None, None, scores
            if curve is not None:
                found, is_none = curve(scores), curve.is_none(scores[:, 0], share[rows])
                found[is_blank] = sigmoid(scores[is_blank])
                is_none[is_blank] = found[is_blank, 0] < NONE_THRESHOLD
                if is_blank.any():  # log odds are on another scale than scores
                    same = np.interp(found, curve.probabilities, curve.scores).astype(np.float32)
                    compared = np.where(is_blank[:, None], same, scores)
            is_reached = reached(decision, curve, compared, found)
            if decision.limit is not None:
                is_reached &= ~unfamiliar[rows, None]
            given, certain = choose(ids, is_reached, decision, rule.groups)
            certain |= k == self.table.rows
            answer = Answer(scores, np.where(given, ids, PAD), found, is_none, unfamiliar[rows])
            parts.append(answer.take(np.flatnonzero(certain)).packed())
            order.append(rows[certain])
            rows, width = rows[~certain], 4 * width
        return Answer.join(parts, np.argsort(np.concatenate(order)))

    def _most_frequent(self, k: int, left_out: Ragged, may_give: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return the most frequent labels [B, k] that B rows may have, and their log odds."""
        labels, odds = self.prior
        labels = labels if may_give is None else labels[may_give[labels]]
        most = np.tile(labels[: k + left_out.longest], (left_out.rows, 1))
        return left_out.filter_ranking(most, odds[most], k)

    @cached_property
    def _fragments(self) -> np.ndarray | None:
        """Return `fragments_of` the tokenizer; None without a calibration, or for an encoder that reads no tokens."""
        if self.calibration is None or "input_ids" not in self.serving.columns:
            return None
        return fragments_of((self.files.folder / ENCODER / FILE).read_bytes())

    @cached_property
    def prior(self) -> tuple[np.ndarray, np.ndarray]:
        """Labels with training points, most frequent first, and the log odds float32 [L] of all labels."""
        frequency = number_column(self.label_table(("frequency",)), "frequency").astype(np.float64)
        with _naming_damage(self.table.url):
            points = float(self.table.parameters.get("training_points") or frequency.sum())
        points = np.clip(points, frequency.max(initial=0), 2.0**53)
        odds = np.log((frequency + 0.5) / (points - frequency + 0.5)).astype(np.float32)
        return np.argsort(-frequency, kind="stable")[: np.count_nonzero(frequency)], odds

    def point_keys(self, points: np.ndarray) -> list[str]:
        """Return the keys of the memory's points `points` [n], or the points' numbers if the export has no keys."""
        shards = self.files.of(POINTS)
        if not shards:
            return [str(point) for point in points.tolist()]
        file = pq.ParquetFile(self.files.path(shards[0]))
        size = file.metadata.row_group(0).num_rows
        groups = {group: file.read_row_group(group, ["key"])["key"] for group in {*(points // size).tolist()}}
        return [groups[point // size][point % size].as_py() for point in points.tolist()]

    def label_table(self, columns: tuple[str, ...] = ("key",)) -> pa.Table:
        """Read `columns` of all labels, in the order of label ids. Raises TableError."""
        with _naming_damage(self.table.url):
            return self.files.read(LABELS, columns)


@contextlib.contextmanager
def _naming_damage(url: str) -> Iterator[None]:
    """Convert any library's error about damaged files to a TableError that names `url`."""
    try:
        yield
    except ExtremisError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
        raise TableError(f"{url}: damaged, or not an export of this version: {reason}. Export the run again.") from None


def restore_encoder(body: Mapping[str, Any], source: str) -> EncoderSection:
    """Read only the `encoder` section of a run's or an export's recipe; reading other sections may load PyTorch."""
    if not isinstance(section := body.get("encoder"), Mapping):
        raise InputError(f"recipe {source}: encoder = {section!r:.80}: expected a section.")
    try:
        kind = options_of(ENCODERS, section.get("kind", next(iter(ENCODERS))), "encoder.kind")
        return kind.model_validate(section)  # type: ignore[no-any-return]
    except ValidationError as error:
        faults = [{**fault, "loc": ("encoder", *fault["loc"])} for fault in error.errors()]
        raise InputError(f"recipe {source}: {'; '.join(explain(fault, body) for fault in faults)}.") from None
    except ValueError as error:
        raise InputError(f"recipe {source}: {error}.") from None
