"""An open export: from rows of token ids or sparse features to the best labels with their scores."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from schemas import PAD
from schemas.errors import ExtremisError, InputError, TableError
from schemas.ragged import Ragged
from schemas.shard_files.parquet import filters_of
from schemas.shard_files.viewed import RETIRED
from schemas.table import Table
from schemas.text_model import DENSE, DenseModel
from schemas.version import follow, require_needed
from trainer.config.load import restore_recipe
from trainer.device import CPU
from trainer.evaluation.calibration import Calibration
from trainer.evaluation.fusion import Fused, Fusion, Scorers, Weights
from trainer.evaluation.memory import Memory
from trainer.evaluation.search import LabelRows, filtered_top_k
from trainer.evaluation.tree import Tree
from trainer.export.files import Files
from trainer.export.vectors import Indexed, Vectors, open_indexes, search_indexes
from trainer.inputs import Inputs
from trainer.linear.ranker import LinearRanker
from trainer.methods.recipe import Recipe
from trainer.model import Model
from trainer.rows.threads import set_threads

KIND = "export"
ENCODER, VECTORS, LABELS, INDEX, THRESHOLDS = "encoder", "vectors", "labels", "index", "thresholds.json"
TEXTS, TREE, WEIGHTS = "label-texts", "fusion.json", "fusion-weights.json"  # where scores are fused
_MORE = 4  # times as many are fetched from an index, at most, where labels are retired


@dataclass(frozen=True)
class Serving:
    """A model's encoder, the vectors [L, D] it is scored against, and an index over each of their ranges, or none.

    With `fused` the best by these vectors are ranked anew. `rows`: the vectors where the model computes. `retired` [L]
    bool: labels that are never predicted. `files`: those that vectors may be mapped from.
    """

    model: Model
    vectors: Vectors
    index: tuple[Indexed, ...] = ()
    fused: Fused | None = None
    rows: torch.Tensor | None = None
    retired: np.ndarray | None = None
    files: Files | None = None

    @cached_property
    def candidates(self) -> np.ndarray | None:
        """Labels [C] that may be predicted, ascending; None: all."""
        return None if self.retired is None else np.flatnonzero(~self.retired)

    @property
    def _label_rows(self) -> LabelRows:
        return LabelRows(self.vectors if self.rows is None else self.rows)

    def embed(self, rows: pa.Table) -> torch.Tensor:
        """Embed rows with the columns `model.columns`: x [B, D], as the vectors are scored against it."""
        return self.model.embed_table(rows)

    def rank(
        self, rows: pa.Table, k: int, filters: Ragged | None = None, exact: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what `top_k` does for rows with the columns `model.columns`."""
        return self.top_k(self.embed(rows), k, filters, exact, Inputs.of(rows.select(self.model.columns)))

    def top_k(
        self, x: torch.Tensor, k: int, filters: Ragged | None = None, exact: bool = False, inputs: Inputs | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return (scores float32 [B, k], ids int64 [B, k]) of the best labels, best first; -inf and -1 where k > L.

        `filters`: the label ids that each row leaves out. An index, where there is one and not `exact`, finds
        candidates that are scored exactly. `inputs`: what x was embedded from, which a linear ranker reads. Raises
        TableError where the export's files were written over.
        """
        if self.files is not None:
            self.files.require_unchanged()
        filters = filters or Ragged.empty(len(x))
        if self.fused is not None:
            shortlisted = replace(self, fused=None, files=None).top_k(x, max(k, self.fused.shortlist), filters, exact)
            return self.fused.rank(x, self._label_rows, shortlisted, k, filters, self.candidates, inputs)
        if exact or not self.index:
            return filtered_top_k(x, self._label_rows, k, filters, self.candidates)
        depth = k + filters.longest
        if self.retired is not None:
            depth += min(int(self.retired.sum()), _MORE * depth)
        ids, scores = search_indexes(self.index, x.cpu().numpy(), depth)
        if self.retired is not None:  # an index has them; of a row that finds many, fewer than k others are left
            gone = (ids >= 0) & self.retired[ids]
            ids, scores = np.where(gone, PAD, ids), np.where(gone, -np.inf, scores).astype(scores.dtype)
        ids, scores = filters.filter_ranking(ids, scores, k)
        return scores, ids


@dataclass(frozen=True)
class Exported:
    """An open export, with its files on a local disk."""

    table: Table
    recipe: Recipe
    files: Files
    serving: Serving
    calibration: Calibration | None = None

    @classmethod
    def open(cls, url: str, exact: bool = False, device: torch.device = CPU) -> "Exported":
        """Open the export at `url`, or the current one of a folder; files beyond a local disk are copied to TMPDIR.

        What is open is one version, whatever becomes current later. `exact`: without an index. The encoder, and what is
        searched without an index, go to `device`.

        Raises TableError: no export there, unfinished, or damaged; StorageError.
        """
        while True:
            version = follow(url)
            try:
                return cls._open(version, exact, device)
            except TableError:
                if follow(url) == version:  # else another one is current by now, and this one may be gone
                    raise

    @classmethod
    def _open(cls, url: str, exact: bool, device: torch.device) -> "Exported":
        table = Table.open(url, KIND)
        recipe = restore_recipe(table.parameters["recipe"], url)
        with _naming_damage(url):
            require_needed(table)
            files = Files(table)
            serving = cls._open_serving(files, recipe, exact, device)
            files.check_all()
            learned = (table.parameters["thresholds"] or {}).get("calibration")
            calibration = Calibration.read(learned["curve"], url) if learned else None
        return cls(table, recipe, files, serving, calibration)

    @staticmethod
    def _open_serving(files: Files, recipe: Recipe, exact: bool, device: torch.device) -> Serving:
        table, folder = files.table, files.folder
        vectors, texts = (Vectors([files.vectors(s) for s in files.of(part)]) for part in (VECTORS, TEXTS))
        files.check_all()
        recipe = recipe.model_copy(update={"encoder": recipe.encoder.at_folder(str(folder / ENCODER))})
        # No rows: the vectors are those of the files.
        sizes = table.parameters["vocabulary"], 0, table.parameters["features"]
        model = Model.build(recipe, *sizes, dense=table.parameters.get(DENSE) or 0)
        model.encoder.load(folder / ENCODER)
        model.encoder.move(device)
        if vectors.shape != (table.rows, table.parameters["dimension"]):
            raise ValueError(f"vectors of shape {vectors.shape}")
        if sum(pq.read_metadata(files.path(shard)).num_rows for shard in files.of(LABELS)) != table.rows:
            raise ValueError("another number of labels than of vectors")
        indexed: tuple[Indexed, ...] = ()
        if table.parameters["index"] and not exact:
            paths = [str(files.path(shard)) for shard in files.of(INDEX)]
            indexed = open_indexes(paths, table.parameters["index"], vectors)
        fused = None
        if table.parameters.get("shortlist"):
            local = Table(str(folder), table.manifest)
            memory = Memory.read(local)
            files.watch(memory.file if memory else None)
            scorers = Scorers(texts if len(texts) else None, memory, LinearRanker.read(local))
            file = folder / (WEIGHTS if (folder / WEIGHTS).exists() else TREE)
            parse: Callable[[bytes, str], Fusion] = Weights.parse if file.name == WEIGHTS else Tree.parse
            frequency = files.read(LABELS, ("frequency",))["frequency"].to_numpy()
            fusion = parse(file.read_bytes(), str(file))
            fused = Fused(fusion, scorers, frequency, table.parameters["shortlist"])
        rows = vectors.to(device) if device != CPU and not indexed else None
        has_retired = table.parameters.get(RETIRED)
        retired = files.read(LABELS, (RETIRED,))[RETIRED].to_numpy() if has_retired else None
        return Serving(model, vectors, indexed, fused, rows, retired, files)

    @property
    def dense_model(self) -> DenseModel | None:
        """Model of the dense vectors that the encoder reads; None: it reads none, or those of the user."""
        return DenseModel.stated(self.table.parameters, self.table.url)

    def label_table(self, columns: tuple[str, ...] = ("key",)) -> pa.Table:
        """Read columns of all labels, label 0 first. Raises TableError."""
        with _naming_damage(self.table.url):
            return self.files.read(LABELS, columns)

    def threshold(self, precision: float) -> float:
        """Return the score from which on predictions had `precision` on the split of the thresholds.

        Of a calibrated export any `precision` has one: the score from which on each label is right so probably.
        Raises InputError for a precision without a threshold.
        """
        with _naming_damage(self.table.url):
            thresholds = self.table.parameters["thresholds"]
            rows = thresholds["thresholds"] if thresholds else []
            scores = {float(row["precision"]): float(row["score"]) for row in rows}
        if precision in scores:
            return scores[precision]
        lowest = None if self.calibration is None else self.calibration.score_of(precision)
        if lowest is not None:
            return lowest
        stated = ", ".join(f"{share:g}" for share in scores)
        raise InputError(
            f"{self.table.url}: no threshold for a precision of {precision:g}; it states {stated or 'none'}. "
            f"Export with --precision {precision:g} and a split to measure it on, or give --threshold SCORE."
        )


@contextlib.contextmanager
def _naming_damage(url: str) -> Iterator[None]:
    """Turn whatever libraries raise over files that are not those of an export into a TableError that names `url`."""
    try:
        yield
    except ExtremisError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200].rstrip(".")
        raise TableError(f"{url}: damaged, or no export of this version: {reason}. Export the run again.") from None


def use_threads(threads: int | None, indexed: bool) -> None:
    """Set the threads of torch, and of Faiss where an index is open; None: all cores, and one in a forked child."""
    if threads:
        set_threads(threads)
    if indexed:
        from search.index import set_up

        set_up(threads)


def iterate_ranked(
    serving: Serving, rows: Iterator[pa.Table], k: int, *, filter: bool = True
) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
    """Yield (rows, scores [B, k], ids [B, k]) for every table of `rows`; with `filter` by their `filter_label_ids`."""
    for table in rows:
        filters = filters_of(table) if filter else None
        scores, ids = serving.rank(table, k, filters)
        yield table, scores, ids
