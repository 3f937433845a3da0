"""What runs left behind: their recipes, what was recorded while they trained, their tables and their evaluations."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from extremis.inspecting.examples import require_run
from extremis.inspecting.run_tables import Mined, mined
from schemas import storage
from schemas.layout import RunLayout
from schemas.secrets import redact
from schemas.storage import join
from trainer.config import load_config
from trainer.tracking import read_metrics

POINTS = 1000  # of a curve: more are averaged


@dataclass(frozen=True)
class Run:
    """All that the page says about one run."""

    name: str
    layout: RunLayout
    config: dict[str, Any]
    records: dict[str, list[dict[str, Any]]]  # by kind
    tables: list[Mined]  # by source, oldest first
    evaluations: dict[str, dict[str, Any]]  # the newest of each split
    finished: bool

    def curve(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(step [n], value [n]) of what was recorded under `kind`, at most POINTS of them."""
        found = [(row["step"], row[name]) for row in self.records.get(kind, []) if _is_number(row.get(name))]
        steps, values = np.asarray([one for one, _ in found], float), np.asarray([one for _, one in found], float)
        return thin(steps, values, POINTS)


def open_run(url: str, name: str) -> Run:
    """Raises TableError where no run is at `url`, or its config cannot be read."""
    layout = require_run(url)
    records: dict[str, list[dict[str, Any]]] = {}
    for record in read_metrics(layout):
        records.setdefault(str(record.get("kind")), []).append(record)
    return Run(
        name,
        layout,
        load_config(layout.config),
        records,
        sorted(mined(layout), key=lambda one: (one.source, one.epoch)),
        _evaluations(layout),
        storage.exists(layout.finished),
    )


def names_of(urls: Sequence[str]) -> list[str]:
    """A short name for each run: the last parts of its URL that tell it from the others."""
    parts = [redact(url).rstrip("/").split("/") for url in urls]
    for length in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return [redact(url) for url in urls]


def differing(configs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """(dotted key, its value in each run) of every recipe value that is not the same everywhere."""
    flat = [_flat(config.get("recipe", {})) for config in configs.values()]
    keys = sorted({key for one in flat for key in one})
    rows = [(key, [one.get(key) for one in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def thin(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `most` points: means of runs of neighbours, each at its last step."""
    if len(values) <= most:
        return steps, values
    edges = np.linspace(0, len(values), most + 1).astype(int)
    return steps[edges[1:] - 1], np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def _evaluations(layout: RunLayout) -> dict[str, dict[str, Any]]:
    newest: dict[str, dict[str, Any]] = {}
    for name in storage.list_names(layout.evaluations):
        if name.endswith(".json"):
            body = json.loads(storage.read_bytes(join(layout.evaluations, name)))
            if body["step"] >= newest.get(body["split"], body)["step"]:
                newest[body["split"]] = body
    return newest


def _flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
