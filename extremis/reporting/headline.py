"""Headline of the page: a few metrics of each split, of the runs and of the baselines beside them."""

from collections.abc import Iterable, Sequence
from typing import Any

from extremis.reporting.charts import SHOWN_METRICS
from extremis.reporting.run_records import Run, baselines_of, ordered_splits

HEADLINE = ("P@1", "P@5", "R@10", "PSP@5")


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
            cells = []
            for name in names:
                value = body["metrics"].get(name)
                cells.append(
                    {"value": value, "half": _half(body, name), "best": len(bodies) > 1 and value == best[name]}
                )
            rows.append({"run": run_name, "step": body["step"], "queries": body["queries"], "cells": cells})
        for name, baseline in baselines_of(runs, split).items():
            cells = [{"value": baseline.metrics.get(metric), "half": None, "best": False} for metric in names]
            rows.append({"run": name, "step": None, "queries": baseline.queries, "cells": cells})
        seen = [body["seen"]["queries"] for body in bodies.values() if "seen" in body]
        tables.append(
            {
                "split": split,
                "names": names,
                "rows": rows,
                "parts": _parts(bodies, names),
                "seen": max(seen, default=None),
            }
        )
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
    baselines = baselines_of(runs, split).items()
    return bars + [
        {"name": title, "value": baseline.metrics[name], "half": None, "color": None}
        for title, baseline in baselines
        if name in baseline.metrics
    ]


def _half(body: dict[str, Any], name: str) -> float:
    """Return half of the 95 % interval of a metric."""
    low, high = body["intervals"].get(name, (0, 0))
    return (high - low) / 2
