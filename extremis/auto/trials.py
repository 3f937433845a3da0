"""Trials: short trainings of contenders on an excerpt of the data, scored on held-out rows.

After half of its epochs, a trial is stopped if the best earlier trial was better at the same epoch. An excerpt is a
data set that contains some labels with all their training points. A sample of rows with all labels would have too few
points per label, which favours recipes that need few points.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from extremis.auto.survey import Contender, Survey
from extremis.console import output, say
from extremis.supervisor import train
from schemas import storage
from schemas.hashing import hash_strings
from schemas.json_files import read_json, write_json
from schemas.layout import DataLayout
from schemas.manifest import Manifest, is_published, publish
from schemas.randomness import Purpose, generator
from schemas.shard_files import shards
from schemas.shard_files.parquet import list_array, list_column
from schemas.shares import ALL_ROWS, seed_of
from schemas.storage import join
from schemas.table import PARTS, Table
from schemas.version import VERSION
from trainer.config.load import applicable_overrides
from trainer.evaluation.metrics import half_interval
from trainer.methods.recipe import Recipe
from trainer.progress import EpochReport
from trainer.settings.data_statistics import measure
from trainer.settings.resolve import resolve
from trainer.stream import open_queries

METRIC = "nDCG@5"  # reflects P@1 and P@5 together
SHOWN_METRICS = "P@1", "P@5", METRIC
QUERIES = 2_000  # maximum for the scores of a trial
_FEW_QUERIES = (
    200  # queries, for which up to a tenth of the rows is held out: 50 of 1,000 rows gave random weights of scores
)
_ROWS = 100_000  # rows of a trial, fewer if texts are long
_ROW_TOKENS = 200  # tokens that cost about as much as the rest of a row
_EPOCHS = 2, 4  # minimum and maximum; a trial passes over about _ROWS rows
_COMPARABLE_EPOCHS = 2  # epochs after which a variation of a recipe can lose
_WIDTH = 128  # D of a trial: shows the ranking of recipes at a quarter of the cost
SCANNED_ROWS = 5_000_000  # maximum of rows read from the training split
_SPLIT = "train"
_SEED = 0  # seed of the excerpt


@dataclass(frozen=True)
class Trial:
    """Scores of a contender on the held-out rows, and the seconds of its trial.

    `course`: METRIC after each validation. `ended`: the trial lost, and training stopped early. `epoch`: seconds that
    the last epoch took.
    """

    contender: Contender
    metrics: dict[str, float]
    course: list[float]
    ended: bool
    seconds: float
    epoch: float = 0.0

    @property
    def score(self) -> float:
        return self.metrics[METRIC]

    def to_json(self) -> dict[str, Any]:
        """Return the information about the trial that a run records."""
        metrics = {name: round(self.metrics[name], 2) for name in SHOWN_METRICS}
        fields = {"recipe": self.contender.recipe, "changes": list(self.contender.changes), **metrics}
        return {**fields, "ended": True} if self.ended else fields

    def beats(self, other: Contender, course: Sequence[float], queries: int, epochs: int) -> bool:
        """Return whether `other` has lost, given its scores `course` after `epochs` epochs, on `queries` queries.

        A variation of the same recipe loses if it is behind after two epochs or more. A different recipe loses if it
        is behind by more than half of the 95 % interval. On WordNet, n-grams with full weight are 3.4 points behind
        after one epoch and 0.7 points ahead after two epochs.
        """
        is_change = other.recipe == self.contender.recipe
        if len(course) > len(self.course) or (is_change and epochs < _COMPARABLE_EPOCHS):
            return False
        own = self.course[len(course) - 1]
        margin = 0.0 if is_change else half_interval(own, queries)
        return course[-1] < own - margin


@dataclass(frozen=True)
class TrialData:
    """Rows for training and scoring all trials: the fraction `share` of the `rows` rows at `data`.

    Each trial trains for `epochs` epochs on `device`, with `threads` threads, and is stored in `folder`.
    """

    data: str
    rows: int
    share: float
    epochs: int
    folder: str
    device: str
    threads: int

    @classmethod
    def prepare(cls, data: str, survey: Survey, folder: str, device: str, threads: int = 0) -> "TrialData":
        """Write an excerpt of DATA into `folder` if DATA itself is too large for trials. Raises ExtremisError."""
        facts = survey.facts
        rows, drawn, share = round(_ROWS / (1 + facts.tokens / _ROW_TOKENS)), facts.queries, 1.0
        passed = drawn + round(survey.texts * facts.labels)  # texts of labels are also rows
        epochs = min(max(round(rows / max(1, passed)), _EPOCHS[0]), _EPOCHS[1])
        if drawn > rows and survey.is_symmetric:
            share = float(f"{rows / drawn:.3g}")
        elif drawn > rows:
            excerpt = join(folder, "data")
            write_excerpt(DataLayout(data), excerpt, rows)
            data, drawn = excerpt, measure(DataLayout(excerpt), "train", ALL_ROWS, label_texts=False).queries
        return cls(data, drawn, share, epochs, folder, device, threads)

    @property
    def queries(self) -> int:
        """Number of rows on which a trial is scored."""
        return round(self.rows * holdout_share(self.rows))

    def run_trial(self, contender: Contender, title: str, best: Trial | None = None, minutes: float = 0.0) -> Trial:
        """Train a contender without negative tables, for at most `minutes` (0: no limit), or until it loses to `best`.

        Prints only lines that begin with `title`, and logs all lines. An existing trial is not run again.
        Raises ExtremisError.
        """
        place, run = join(self.folder, f"{contender.name}.json"), join(self.folder, contender.name)
        if storage.exists(place):
            return Trial(contender, **read_json(place))
        storage.remove(run, recursive=True)
        began, course, ended = time.perf_counter(), list[float](), False

        def should_continue(report: EpochReport) -> bool:
            nonlocal ended
            if report.metrics:
                course.append(report.metrics[METRIC])
                lost = best is not None and best.beats(contender, course, self.queries, report.epoch + 1)
                ended = lost and report.epoch + 1 < report.epochs
            return not ended

        with output(log_only=True):
            outcome = train(
                self.data, run, self.recipe(contender, minutes), should_continue=should_continue, title=title
            )
        metrics = outcome["epochs"][-1]["validation"]
        seconds, epoch = round(time.perf_counter() - began, 1), outcome["epochs"][-1]["seconds"]
        trial = Trial(contender, metrics, course, ended, seconds, epoch)
        scores = "  ".join(f"{name} {metrics[name]:.2f}" for name in SHOWN_METRICS)
        say(f"{title}: {scores}  {trial.seconds:.0f} s{', stopped early: behind the best trial' if ended else ''}")
        write_json(place, {name: value for name, value in vars(trial).items() if name != "contender"})
        return trial

    def recipe(self, contender: Contender, minutes: float = 0.0) -> Recipe:
        """Return the recipe of a trial. Raises InputError, TableError."""
        changes = [
            *contender.changes,
            f"data.share={self.share}",
            f"data.holdout={holdout_share(self.rows)}",
            f"train.epochs={self.epochs}",
            f"encoder.dimension={_WIDTH}",
            f"encoder.hidden={2 * _WIDTH}",
            f"train.device={self.device}",
            f"train.threads={self.threads}",
            "checkpoint.every_epochs=0",
            f"train.minutes={minutes}",
            f"validation.every_epochs={-(-self.epochs // 2)}",
            f"validation.queries={QUERIES}",
            f"validation.metric={METRIC}",
            "logging.tensorboard=false",
            "logging.wandb=",
            "logging.mlflow=",
            f"refresh.start={self.epochs}",  # no table: a whole trial takes less time than the start of a miner
        ]
        return resolve(contender.recipe, applicable_overrides(contender.recipe, changes), self.data).recipe


def holdout_share(rows: int, queries: int = QUERIES) -> float:
    """Return the fraction of `rows` to hold out for `queries` queries: at most 1/20, or 1/10 if there are few rows."""
    most = min(0.1, max(0.05, _FEW_QUERIES / max(1, rows)))
    return float(f"{min(most, queries / max(1, rows)):.3g}")  # rounded as in recipes, also without rows


def best_trial(trials: Sequence[Trial], queries: int) -> Trial:
    """Return the best finished trial, measured on `queries` queries; the first if several are equally good.

    All trials are scored on the same queries. A dual encoder wins unless another trial leads by more than a quarter of
    the 95 % interval, because trials lack hard negatives, which help dual encoders most. On 20,000 rows of YSO, a dual
    encoder reached a final P@1 of 22.9. Another contender led by 0.2 in the trials, but reached only 14.6.
    """
    finished = [trial for trial in trials if not trial.ended]
    best = max(trial.score for trial in finished)
    near = [trial for trial in finished if best - trial.score <= half_interval(best, queries) / 2]
    return max([trial for trial in near if trial.contender.is_dual_encoder] or near, key=lambda trial: trial.score)


def write_excerpt(data: DataLayout, root: str, rows: int) -> None:
    """Write an excerpt of about `rows` training rows at `root`, unless it exists. Raises StorageError, TableError."""
    if is_published(root):
        return
    layout, source_data, drawn = DataLayout(root), Table.open(data.root, "data"), draw_labels(data, rows)
    parents: dict[str, str] = {}
    if "tokenizer" in source_data.parents:
        tokenizer = Table.open(data.tokenizer, "tokenizer")
        for name, content in tokenizer.read_files().items():
            storage.write_bytes(join(layout.tokenizer, name), content)
        shards_here = tuple(shard.model_copy(update={"view": None}) for shard in tokenizer.shards)
        parents["tokenizer"] = publish(
            layout.tokenizer, tokenizer.manifest.model_copy(update={"shards": shards_here})
        ).digest
    queries, label_table = _write_queries(data, layout, drawn), Table.open(data.labels, "labels")
    drawn_labels = label_table.rows_at(np.flatnonzero(drawn))
    labels = _write_table(layout.labels, "label_id", [drawn_labels], label_table, label_table.parameters)
    parents |= {f"queries/{_SPLIT}": queries.digest, "labels": labels.digest}
    parameters = {**_plain(source_data.parameters), "labels": labels.rows, "rows": {_SPLIT: queries.rows}}
    publish(root, Manifest(kind="data", parents=parents, parameters=parameters))


def draw_labels(data: DataLayout, rows: int) -> np.ndarray:
    """Draw labels until about `rows` training rows have a drawn label; return the drawn labels as bool [L].

    Raises TableError.
    """
    labels = Table.open(data.labels, "labels").rows
    place = generator(_SEED, Purpose.EXCERPT).permutation(labels)
    firsts = [np.empty(0, np.int64)]  # for each row with labels, the first position of its labels in the random order
    for group in ALL_ROWS.batches(open_queries(data, _SPLIT), ["label_ids"], SCANNED_ROWS):
        ids, offsets = list_column(group, "label_ids")
        if len(ids):
            firsts.append(np.minimum.reduceat(place[ids], offsets[:-1][np.diff(offsets) > 0]))
    first = np.concatenate(firsts)
    if len(first) <= rows:
        return np.ones(labels, bool)
    drawn: np.ndarray = place <= np.partition(first, rows - 1)[rows - 1]
    return drawn


def _write_queries(data: DataLayout, layout: DataLayout, kept: np.ndarray) -> Manifest:
    queries = open_queries(data, _SPLIT)
    columns, ids, parts = [*queries.columns], np.cumsum(kept) - 1, []
    for group in ALL_ROWS.batches(queries, columns, SCANNED_ROWS):
        for name in (name for name in ("filter_label_ids", "label_ids") if name in columns):
            labels = list_column(group, name)
            labels = labels.keep(kept[labels.values])
            field = group.schema.field(name)
            column = list_array(ids[labels.values], labels.offsets, field.type.value_type)
            group = group.set_column(columns.index(name), field, column)
        parts.append(group.filter(pa.array(labels.counts > 0)))
    rows = pa.concat_tables(parts)
    in_order = np.argsort(hash_strings(rows["key"], seed_of(queries)), kind="stable")
    parts, parameters = [rows.take(pa.array(in_order))], {**queries.parameters, "labels": int(kept.sum())}
    return _write_table(layout.queries(_SPLIT), "query_id", parts, queries, parameters)


def _write_table(url: str, key: str, parts: list[pa.Table], whole: Table, parameters: Mapping[str, Any]) -> Manifest:
    """Publish the rows of `parts` as a table, with new ids in the column `key`, and the row-group size of `whole`."""
    rows = pa.concat_tables(parts).combine_chunks()
    place = rows.schema.get_field_index(key)
    rows = rows.set_column(place, rows.schema.field(key), pa.array(np.arange(rows.num_rows)))
    groups, ids = whole.manifest.row_group_rows or 1, (0, rows.num_rows)
    return shards.write_table(url, whole.kind, [rows], groups, parameters=_plain(parameters), id_range=ids)


def _plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters without version parameters, because an excerpt has no version."""
    return {name: value for name, value in parameters.items() if name not in (VERSION, PARTS)}
