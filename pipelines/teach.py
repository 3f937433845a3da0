"""`extremis teach`: score the negatives of a table with a cross-encoder, to keep, drop or weight them.

Workers load the model. Memory is bounded by the model and the texts of one row group.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from pipelines.common.progress import Progress
from pipelines.job import Summary
from pipelines.mining.candidates import has_margin, rows_of_table, score_limits
from pipelines.mining.derived import DerivedPlan, first_positions, make_derived, open_tables, write_derived
from pipelines.models import once_a_process
from pipelines.options import TeachOptions
from pipelines.runners.local import for_workers
from schemas import arrow
from schemas.errors import InputError, TableError
from schemas.manifest import Manifest
from schemas.owners.outputs import require_output_folder
from schemas.ragged import Ragged
from search.candidates import EMPTY, unpack
from search.exclusions import Exclusions
from trainer.device import open_device
from trainer.encoders.teacher import Teacher, TeacherFiles

_open_teacher = once_a_process(TeacherFiles.open)


@dataclass(frozen=True, kw_only=True)
class TeachPlan(DerivedPlan):
    """Plan of one run."""

    teacher: TeacherFiles
    options: TeachOptions
    device: str

    @property
    def schema(self) -> pa.Schema:
        """Schema of the table."""
        return arrow.negatives(self.width, arrow.label_type(self.labels.rows), teacher=True)


def teach(
    data: str,
    table: str,
    teacher: str,
    out: str,
    options: TeachOptions | None = None,
    beam_options: Sequence[str] = (),
    progress: Progress | None = None,
    device: str = "auto",
) -> Manifest:
    """Score the negatives of a table with the cross-encoder in the directory `teacher`, and write the table OUT.

    OUT has a column `teacher` (float16 [K], aligned with `label_ids`). With a margin, negatives that score too close to
    the weakest positive are dropped. Raises InputError (no teacher, a teacher with several outputs, OUT contains
    something else), TableError (other rows or labels, no texts, damaged), StorageError.
    """
    data, table, teacher, out = (for_workers(beam_options, url) for url in (data, table, teacher, out))
    options = options or TeachOptions()
    require_output_folder(out, "mined", [data, table, teacher])
    if not beam_options:  # remote workers may have packages or devices that this machine lacks
        open_device(device)
    rows, (opened,), labels = open_tables(data, [table])
    if "text" not in rows.columns:
        raise TableError(
            f"{rows.url}: this table has no texts, which the teacher needs. Shard the data again with --keep-text."
        )
    files, most = TeacherFiles.find(teacher, options.label), opened.width("label_ids")
    width = options.width or most
    if width > most:
        raise InputError(
            f"--width {width}: the table has {most} negatives for each row. Give a smaller --width, or mine more "
            "negatives."
        )
    plan = TeachPlan(rows, (opened,), labels, out, width, teacher=files, options=options, device=device)
    parents = {"labels": labels.digest, "teacher": files.digest}
    return make_derived(plan, parents, options.model_dump(), teach_shard, beam_options, progress)


def teach_shard(shard: int, plan: TeachPlan) -> Summary:
    """Write shard `shard` of the table. Raises InputError, TableError, StorageError."""
    options, teacher = plan.options, _open_teacher(plan.teacher, open_device(plan.device))

    def make(points: pa.Table, ids: pa.Array, offered: list[np.ndarray], counts: Counter[str]) -> pa.Table:
        keys, queries = offered[0], points.column("text").to_pylist()
        negatives = unpack(keys)[0]
        scores = np.full(keys.shape, -np.inf, np.float32)
        some = negatives >= 0
        scores[some] = _score(plan, teacher, queries, np.nonzero(some)[0], negatives[some])
        counts.update(candidates=int(some.sum()), above_teacher_margin=0)
        if has_margin(options):
            positives: Ragged = Exclusions.of(points).positives
            weakest = np.full(len(keys), np.inf, np.float32)
            of = positives.row_of()
            np.minimum.at(weakest, of, _score(plan, teacher, queries, of, positives.entries))
            gone = some & (scores >= score_limits(options, weakest)[:, None])
            counts.update(above_teacher_margin=int(gone.sum()))
            keys = np.where(gone, EMPTY, keys)
        places = first_positions(keys, plan.width, counts)
        keys, scores = (np.take_along_axis(each, places, axis=1) for each in (keys, scores))
        return rows_of_table(ids, keys, plan.schema, scores)

    return write_derived(shard, plan, ["label_ids", "text"], make)


def _score(plan: TeachPlan, teacher: Teacher, queries: list[str], rows: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Score pairs of a query, given by its row, and a label, float32 [V]. Raises TableError if no label has a text."""
    if not len(labels):
        return np.empty(0, np.float32)
    unique, at = np.unique(labels, return_inverse=True)
    texts = plan.labels.rows_at(unique, ["text"]).column("text").to_pylist()
    if not any(texts):
        raise TableError(
            f"{plan.labels.url}: this table has no texts, which the teacher needs. Shard the data again with texts of "
            "labels."
        )
    pairs = [queries[row] for row in rows.tolist()], [texts[label] for label in at.tolist()]
    return teacher.score(*pairs, plan.options.batch)
