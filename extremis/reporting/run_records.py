"""Records and evaluations of runs, and the tables of their metrics."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from extremis.auto.run_auto import REPORT
from extremis.inspecting.examples import require_run
from extremis.ranks import commands_of
from extremis.reporting.standing import Standing
from schemas import storage
from schemas.json_files import read_json
from schemas.layout import RunLayout
from schemas.manifest import Manifest
from schemas.run_tables import RunTable, run_tables
from schemas.secrets import redact
from schemas.storage import join
from trainer.checkpoints.checkpoint import Checkpoint, open_step
from trainer.config import flatten, load_config
from trainer.model import trained_digest
from trainer.tracking import read_metrics

SHOWN_METRICS = ("P@1", "P@5", "nDCG@5", "R@5", "PSP@1", "PSP@5")  # at the k of all tables
POINTS = 1000  # most points of a curve; more are averaged


@dataclass(frozen=True)
class Run:
    """Facts of the page about a run; it is named by its path and recipe."""

    name: str
    layout: RunLayout
    config: dict[str, Any]
    records: dict[str, list[dict[str, Any]]]  # by kind
    tables: list[RunTable]  # by source, oldest first
    evaluations: dict[str, dict[str, Any]]  # by split
    finished: bool
    commands: list[str]  # that made it
    standing: Standing | None  # None: no checkpoint yet
    auto: dict[str, Any] | None  # what `auto` recorded, where it made the run
    later: str | None = None  # digest of the data of the page, where it is a later version than the run's

    def curve(self, kind: str, name: str, over: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (step or epoch [n], value [n]) of the records of `kind` with a number `name`, at most POINTS."""
        rows = [row for row in self.records.get(kind, []) if isinstance(row.get(name), int | float)]
        return thin(np.asarray([row[over] for row in rows]), np.asarray([row[name] for row in rows], float), POINTS)

    @property
    def seconds(self) -> float:
        """Seconds of all epochs."""
        return sum(row.get("seconds", 0.0) for row in self.records.get("epoch", []))

    @property
    def loss(self) -> float | None:
        """Mean loss of the last epoch; None before the first one ends."""
        epochs = self.records.get("epoch", [])
        return epochs[-1]["loss"] if epochs else None

    def epochs_on(self, table_epoch: int) -> list[int]:
        """List the epochs that trained on the table of `table_epoch`."""
        return [row["epoch"] for row in self.records.get("epoch", []) if row.get("table_epoch") == table_epoch]


def baselines_of(runs: Sequence[Run], split: str) -> dict[str, tuple[int, dict[str, float]]]:
    """Return by name the number of queries, the first, and metrics of baselines, of the first run that has each."""
    baselines: dict[str, tuple[int, dict[str, float]]] = {}
    for body in (run.evaluations[split] for run in runs if split in run.evaluations):
        for name, metrics in body.get("baselines", {}).items():
            baselines.setdefault(name, (body["beside_baselines"]["queries"], metrics))
    return baselines


def ordered_splits(names: Iterable[str]) -> list[str]:
    """Put the splits that are not trained on first, test before all."""
    return sorted(names, key=lambda name: (name == "train", name != "test", name))


def open_run(url: str, name: str, data: Manifest | None = None) -> Run:
    """Read the run at `url`, with its evaluations on `data`, by default those on its own; its recipe joins its `name`.

    Raises TableError where there is none, or its config cannot be read.
    """
    layout = require_run(url)
    config = load_config(layout.config)
    later = data.digest if data is not None and trained_digest(config) != data.digest else None
    recipe, checkpoint = config.get("recipe", {}), open_step(layout)
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
        commands_of(layout),
        None if checkpoint is None else Standing.of(layout, checkpoint, later is not None),
        read_json(join(layout.root, REPORT)) if storage.exists(join(layout.root, REPORT)) else None,
        later,
    )


def names_of(urls: Sequence[str]) -> list[str]:
    """Make a short name for each run: the last parts of its URL, two or as many as differ from the others."""
    parts = [redact(url).rstrip("/").split("/") for url in urls]
    for length in range(2, max(2, *map(len, parts)) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(names):
            return names
    return [redact(url) for url in urls]


def differing(configs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """List (dotted key, its value in each run) of every recipe value that differs between runs."""
    flat = [flatten(config.get("recipe", {})) for config in configs.values()]
    keys = sorted({key for values in flat for key in values})
    rows = [(key, [values.get(key) for values in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def thin(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Reduce a curve to at most `most` points: means of neighbours, each at its last step."""
    if len(values) <= most:
        return steps, values
    edges = np.linspace(0, len(values), most + 1).astype(int)
    return steps[edges[1:] - 1], np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def _evaluations(folder: str, checkpoint: Checkpoint | None) -> dict[str, dict[str, Any]]:
    """Return the evaluation of each split: that of the checkpoint that stands for the run, else the newest."""

    def rank(body: dict[str, Any]) -> tuple[bool, int]:
        return checkpoint is not None and body["step"] == checkpoint.step, body["step"]

    chosen: dict[str, dict[str, Any]] = {}
    for name in storage.list_names(folder):
        if name.endswith(".json"):
            body = read_json(join(folder, name))
            if rank(body) >= rank(chosen.get(body["split"], body)):
                chosen[body["split"]] = body
    return chosen


HEADLINE = ("P@1", "P@5", "R@5", "PSP@5")


def headlines(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return {"split", "cards": {metric: bars}} for each evaluated split, test first.

    A bar is {"name", "value", "half", "color"}; `half` of the interval and the number of its `color` are None for a
    baseline.
    """
    cards = []
    for split in evaluated_splits(runs):
        bars = {name: _bars(runs, split, name) for name in HEADLINE}
        cards.append({"split": split, "cards": {name: rows for name, rows in bars.items() if rows}})
    return cards


def evaluated_splits(runs: Iterable[Run]) -> list[str]:
    """List the splits that a run was evaluated on, test first."""
    return ordered_splits({split for run in runs for split in run.evaluations})


def metric_tables(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Make a table per split: metrics by run, with half of their intervals, and the best of each column marked.

    Baselines come last, on the first queries of the split alone. `parts`: metrics of seen and unseen queries.
    """
    tables = []
    for split in evaluated_splits(runs):
        bodies = {run.name: run.evaluations[split] for run in runs if split in run.evaluations}
        names = [name for name in SHOWN_METRICS if any(name in body["metrics"] for body in bodies.values())]
        best = {name: max(body["metrics"].get(name, float("-inf")) for body in bodies.values()) for name in names}
        rows = []
        for run_name, body in bodies.items():
            values = {name: body["metrics"].get(name) for name in names}
            cells = [
                {"value": value, "half": _half(body, name), "best": len(bodies) > 1 and value == best[name]}
                for name, value in values.items()
            ]
            facts = {name: body[name] for name in ("scores", "step", "queries")}
            rows.append({"run": run_name, **facts, "cells": cells})
        for name, (queries, metrics) in baselines_of(runs, split).items():
            cells = [{"value": metrics.get(metric), "half": None, "best": False} for metric in names]
            rows.append({"run": name, "scores": None, "step": None, "queries": queries, "cells": cells})
        seen = max((body["seen"]["queries"] for body in bodies.values() if "seen" in body), default=None)
        parts = _parts(bodies, names)
        tables.append({"split": split, "names": names, "rows": rows, "parts": parts, "seen": seen})
    return tables


def _parts(bodies: dict[str, dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return rows {"run", "part", "queries", "values"} of seen and unseen queries."""
    return [
        {"run": run, "part": part, "queries": body[part]["queries"], "values": [metrics.get(name) for name in names]}
        for run, body in bodies.items()
        for part in ("seen", "unseen")
        if (metrics := body.get(part, {}).get("metrics"))
    ]


def _bars(runs: Sequence[Run], split: str, name: str) -> list[dict[str, Any]]:
    bars = [
        {"name": run.name, "value": body["metrics"][name], "half": _half(body, name), "color": number}
        for number, run in enumerate(runs)
        if name in (body := run.evaluations.get(split, {"metrics": {}}))["metrics"]
    ]
    return bars + [
        {"name": title, "value": metrics[name], "half": None, "color": None}
        for title, (_, metrics) in baselines_of(runs, split).items()
        if name in metrics
    ]


def _half(body: dict[str, Any], name: str) -> float:
    """Return half of the 95 % interval of a metric."""
    low, high = body["intervals"].get(name, (0, 0))
    return (high - low) / 2
