"""`extremis report`: gathers the facts, draws the page, and publishes it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from extremis.inspecting.examples import splits_of
from extremis.reporting.charts import SHOWN_METRICS, data_charts, metric_charts, table_charts, training_charts
from extremis.reporting.data_facts import describe
from extremis.reporting.page import render
from extremis.reporting.queries import Sample, sample
from extremis.reporting.run_records import Run, baselines_of, differing, names_of, open_run
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import is_published, open_manifest
from schemas.storage import join
from trainer.model import require_same_data


def build(
    urls: Sequence[str], out: str | None, say: Callable[[str], None], queries: int = 300, predict: bool = True
) -> dict[str, Any]:
    """Write the page about `urls`: a DATA, if the first is one, and runs that were made from it.

    `queries`: how many to show; `predict`: with the predictions of each run's newest checkpoint.
    Returns {"out", "bytes", "seconds", "runs"}. Raises InputError, TableError, StorageError.
    """
    began = time.perf_counter()
    data, runs = _open(urls)
    out = out or join(runs[0].layout.root, "report.html")
    facts = None if data is None else describe(data)
    examples = Sample([], {}, ["give DATA before the runs to see queries as text"])
    if data is not None and queries:
        say(f"reading {queries} queries of {data.root}")
        splits = [split for split in splits_of(data) if split in ("train", "test", "val")] or splits_of(data)
        examples = sample(data, runs, splits[:2], queries, predict)
    values = {
        "runs": runs,
        "data": facts,
        "differences": differing({run.name: run.config for run in runs}),
        "metrics": _metric_tables(runs),
        "notes": examples.notes,
        "queries": len(examples.queries),
    }
    charts = {
        "data": data_charts(facts) if facts else [],
        "training": training_charts(runs),
        "tables": table_charts(runs),
        "metrics": metric_charts(runs),
    }
    names = [run.name for run in runs]
    page = render(values, {"charts": charts, "runs": names, "queries": examples.queries, "labels": examples.labels})
    storage.write_bytes(out, page)
    seconds = round(time.perf_counter() - began, 2)
    return {"out": out, "bytes": len(page), "seconds": seconds, "runs": {run.name: run.layout.root for run in runs}}


def _open(urls: Sequence[str]) -> tuple[DataLayout | None, list[Run]]:
    first = urls[0]
    data = DataLayout(first) if is_published(first) and open_manifest(first).kind == "data" else None
    places = list(urls[1:] if data is not None else urls)
    if not places:
        raise InputError(f"{first}: a DATA alone has no report. Name the runs: extremis report DATA RUN [RUN…].")
    if len(set(places)) < len(places):
        raise InputError(f"the same run is named twice: {' '.join(places)}.")
    runs = [open_run(url, name) for url, name in zip(places, names_of(places), strict=True)]
    for run in runs:
        if data is not None:
            require_same_data(run.config, open_manifest(data.root, "data"), data.root, run.layout.root)
    return data, runs


def _metric_tables(runs: list[Run]) -> list[dict[str, Any]]:
    """Make a table per split: metrics by run, with half of their intervals, and the best of each column marked.

    Baselines come last, on the first queries of the split alone.
    """
    tables = []
    for split in sorted({split for run in runs for split in run.evaluations}):
        bodies = {run.name: run.evaluations[split] for run in runs if split in run.evaluations}
        names = [name for name in SHOWN_METRICS if any(name in body["metrics"] for body in bodies.values())]
        best = {name: max(body["metrics"].get(name, float("-inf")) for body in bodies.values()) for name in names}
        rows = []
        for run_name, body in bodies.items():
            cells = []
            for name in names:
                value, (low, high) = body["metrics"].get(name), body["intervals"].get(name, (0, 0))
                half = (high - low) / 2
                cells.append({"value": value, "half": half, "best": len(bodies) > 1 and value == best[name]})
            rows.append({"run": run_name, "step": body["step"], "queries": body["queries"], "cells": cells})
        for name, baseline in baselines_of(runs, split).items():
            cells = [{"value": baseline.metrics.get(metric), "half": None, "best": False} for metric in names]
            rows.append({"run": name, "step": None, "queries": baseline.queries, "cells": cells})
        tables.append({"split": split, "names": names, "rows": rows})
    return tables
