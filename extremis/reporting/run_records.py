"""Records and evaluations of runs, and tables of metrics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from extremis.auto.run_auto import AUTO_REPORT
from extremis.ranks import read_commands
from schemas import storage
from schemas.json_files import read_json
from schemas.layout import RunLayout
from schemas.manifest import Manifest
from schemas.run_tables import RunTable, run_tables
from schemas.secrets import redact
from schemas.storage import join
from schemas.table import Table
from trainer.checkpoints.checkpoint import Checkpoint, open_step
from trainer.config.load import load_config
from trainer.config.merging import flatten
from trainer.evaluation.fusion_files import KIND, scored_step, scores_of
from trainer.model import trained_digest
from trainer.tracking.tracker import read_metrics

SHOWN_METRICS = ("P@1", "P@5", "nDCG@5", "R@5", "PSP@1", "PSP@5")  # the same k in all tables
CURVE_POINTS = 1000  # maximum of points of a curve; longer curves are averaged
_FUSED_SCORES = {"texts": "labels' texts", "votes": "votes of training points", "linear": "linear ranker"}


class RepresentativeScores(NamedTuple):
    """The step and the kind of scores that represent a run; `fusion`: results of the fit if scores are fused."""

    step: int
    scores: str
    fusion: Mapping[str, Any]

    @classmethod
    def of(cls, run: RunLayout, checkpoint: Checkpoint) -> "RepresentativeScores":
        """Read the step and scores that represent a run. Raises TableError."""
        scores = scores_of(run.root, checkpoint.step)
        fusion = Table.open(run.fusion(checkpoint.step), KIND).parameters if scores == "fused" else {}
        return cls(checkpoint.step, scores, fusion)

    @property
    def formula(self) -> str:
        """Format the fused score as a weighted sum."""
        weights = [(self.fusion.get(field), name) for field, name in _FUSED_SCORES.items()]
        return " + ".join(["vectors", *(f"{weight:.2f} × {name}" for weight, name in weights if weight)])


@dataclass(frozen=True)
class Run:
    """Information about a run for the page; the name consists of path and recipe."""

    name: str
    layout: RunLayout
    config: dict[str, Any]
    records: dict[str, list[dict[str, Any]]]  # by kind
    tables: list[RunTable]  # by source, oldest first
    evaluations: dict[str, dict[str, Any]]  # by split
    finished: bool
    commands: list[str]  # command lines that made the run
    representative: RepresentativeScores | None  # None: no checkpoint yet
    auto: dict[str, Any] | None  # record of `auto`, if it made the run

    def curve(self, kind: str, name: str, over: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (step or epoch [n], value [n]) from records of `kind` with a number `name`; n <= CURVE_POINTS."""
        rows = [row for row in self.records.get(kind, []) if isinstance(row.get(name), int | float)]
        return downsample(
            np.asarray([row[over] for row in rows]), np.asarray([row[name] for row in rows], float), CURVE_POINTS
        )


def ordered_splits(names: Iterable[str]) -> list[str]:
    """Sort splits, with test first and train last."""
    return sorted(names, key=lambda name: (name == "train", name != "test", name))


def say_split(split: str) -> str:
    """Return the name of a split for a heading; the metrics of train are marked."""
    return f"{split} (training queries, not a test)" if split == "train" else split


def open_run(url: str, name: str, data: Manifest | None = None) -> Run:
    """Read the run at `url`, with evaluations on `data` (default: the run's own data); add the recipe to `name`.

    Raises InputError if there is no run, or if the config cannot be read.
    """
    layout = RunLayout(url)
    config = load_config(layout.config)
    later = data.digest if data is not None and trained_digest(config) != data.digest else None
    recipe, checkpoint = config.get("recipe", {}), open_step(layout, scored_step(layout))
    records: dict[str, list[dict[str, Any]]] = {}
    for record in read_metrics(layout):
        records.setdefault(str(record.get("kind")), []).append(record)
    return Run(
        f"{name} ({recipe.get('name') or recipe.get('method')})",
        layout,
        config,
        records,
        sorted(run_tables(layout), key=lambda table: (table.source, table.epoch)),
        _evaluations(layout.evaluations_on(later), checkpoint),
        storage.exists(layout.finished),
        read_commands(layout),
        None if checkpoint is None else RepresentativeScores.of(layout, checkpoint),
        read_json(join(layout.root, AUTO_REPORT)) if storage.exists(join(layout.root, AUTO_REPORT)) else None,
    )


def names_of(urls: Sequence[str]) -> list[str]:
    """Return a short, unique name for each run: the last two parts of the URL, or more parts if necessary."""
    parts = [redact(url).rstrip("/").split("/") for url in urls]
    for length in range(2, max(2, *map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [redact(url) for url in urls]


def recipe_differences(configs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """List the recipe keys whose values differ between runs: (dotted key, value in each run)."""
    flat = [flatten(config.get("recipe", {})) for config in configs.values()]
    keys = sorted({key for values in flat for key in values})
    rows = [(key, [values.get(key) for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def downsample(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a curve to at most `most` points: the mean of each group of neighbours, at the group's last step."""
    if len(values) <= most:
        return steps, values
    edges = np.linspace(0, len(values), most + 1).astype(int)
    return steps[edges[1:] - 1], np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def _evaluations(folder: str, checkpoint: Checkpoint | None) -> dict[str, dict[str, Any]]:
    """Return one evaluation per split: that of the run's representative checkpoint, else the newest evaluation."""

    def rank(body: dict[str, Any]) -> tuple[bool, int]:
        return checkpoint is not None and body["step"] == checkpoint.step, body["step"]

    chosen: dict[str, dict[str, Any]] = {}
    for name in storage.list_names(folder):
        if name.endswith(".json"):
            body = read_json(join(folder, name))
            if rank(body) >= rank(chosen.get(body["split"], body)):
                chosen[body["split"]] = body
    return chosen


def evaluated_splits(runs: Iterable[Run]) -> list[str]:
    """List the splits on which any run has been evaluated, test first."""
    return ordered_splits({split for run in runs for split in run.evaluations})


def metric_tables(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Make a table per evaluated split, test first: one row per run, and the best of each metric on equal queries.

    A row is a run's evaluation, with the run's name and colour number. Baselines come last, without a colour. `parts`:
    run, "seen" or "unseen", and evaluation of these queries.
    """
    tables = []
    for split in evaluated_splits(runs):
        numbered = [(number, run) for number, run in enumerate(runs) if split in run.evaluations]
        rows = [{**run.evaluations[split], "run": run.name, "color": number} for number, run in numbered]
        names = [name for name in SHOWN_METRICS if any(name in row["metrics"] for row in rows)]
        is_comparable = len(rows) > 1 and len({row["queries"] for row in rows}) == 1
        best = {name: max(row["metrics"].get(name, -np.inf) for row in rows) for name in names if is_comparable}
        parts = [(row["run"], part, row.get(part, {})) for row in rows for part in ("seen", "unseen")]
        baselines: dict[str, dict[str, Any]] = {}
        for row in rows:
            for name, metrics in row.get("baselines", {}).items():
                queries = row["beside_baselines"]["queries"]
                baselines.setdefault(name, {"run": name, "queries": queries, "metrics": metrics})
        tables.append(
            {
                "split": split,
                "title": say_split(split),
                "names": names,
                "rows": [*rows, *baselines.values()],
                "best": best,
                "calibrated": [(row["run"], row["calibration"]) for row in rows if "calibration" in row],
                "parts": [part for part in parts if "metrics" in part[2]],
                "seen": max((row["seen"]["queries"] for row in rows if "seen" in row), default=None),
            }
        )
    return tables
