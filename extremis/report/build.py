"""Gathers the facts, draws the page, and publishes it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from extremis.inspecting.examples import splits_of
from extremis.report import charts
from extremis.report.data import Facts, describe
from extremis.report.page import render
from extremis.report.queries import Sample, sample
from extremis.report.runs import Run, differing, names_of, open_run
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import is_published, open_manifest
from schemas.secrets import redact
from schemas.storage import join
from trainer.model import require_same_data


@dataclass(frozen=True)
class Options:
    """What the page holds beside the runs' own records."""

    queries: int = 300  # in the searchable sample
    predict: bool = True


def build(urls: Sequence[str], out: str | None, options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Write the page about `urls`: a DATA, if the first is one, and runs that were made from it.

    Returns {"out", "bytes", "seconds", "runs"}. Raises InputError, TableError, StorageError.
    """
    began = time.perf_counter()
    data, runs = _opened(urls)
    out = out or join(runs[0].layout.root, "report.html")
    facts = None if data is None else describe(data)
    found = Sample([], {}, ["give DATA before the runs to see queries as text"])
    if data is not None and options.queries:
        say(f"reading {options.queries} queries of {data.root}")
        splits = [split for split in splits_of(data) if split in ("train", "test", "val")] or splits_of(data)
        found = sample(data, runs, splits[:2], options.queries, options.predict)
    page = render(_facts(facts, runs, found), _body(facts, runs, found))
    storage.write_bytes(out, page)
    seconds = round(time.perf_counter() - began, 2)
    return {"out": out, "bytes": len(page), "seconds": seconds, "runs": {run.name: run.layout.root for run in runs}}


def _opened(urls: Sequence[str]) -> tuple[DataLayout | None, list[Run]]:
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


def _body(facts: Facts | None, runs: list[Run], found: Sample) -> dict[str, Any]:
    return {
        "charts": {
            "data": charts.of_data(facts) if facts else [],
            "training": charts.of_training(runs),
            "tables": charts.of_tables(runs),
            "metrics": charts.of_metrics(runs),
        },
        "runs": [run.name for run in runs],
        "queries": found.queries,
        "labels": {str(label): text for label, text in found.labels.items()},
    }


def _facts(facts: Facts | None, runs: list[Run], found: Sample) -> dict[str, Any]:
    return {
        "runs": [_run(run) for run in runs],
        "data": None if facts is None else _data(facts),
        "differences": differing({run.name: run.config for run in runs}) if len(runs) > 1 else [],
        "tables": [_table(run, len(runs) > 1) for run in runs],
        "metrics": _metrics(runs),
        "unevaluated": [redact(run.layout.root) for run in runs if not run.evaluations],
        "notes": found.notes,
        "queries": len(found.queries),
    }


def _run(run: Run) -> dict[str, Any]:
    epochs, recipe = run.records.get("epoch", []), run.config["recipe"]
    return {
        "name": run.name,
        "url": redact(run.layout.root),
        "method": recipe.get("method", ""),
        "epochs": f"{len(epochs)} of {recipe['train']['epochs']}",
        "state": "finished" if run.finished else "not finished",
        "seconds": sum(row.get("seconds", 0.0) for row in epochs),
        "loss": epochs[-1]["loss"] if epochs else None,
        "versions": run.config.get("versions", {}),
    }


def _data(facts: Facts) -> dict[str, Any]:
    rows = [
        {
            "name": one.name,
            "rows": one.manifest.rows,
            "shards": len(one.manifest.shards),
            "bytes": sum(shard.bytes for shard in one.manifest.shards),
            "labels": one.mean("labels"),
            "tokens": one.mean("tokens"),
            "truncated": one.manifest.counters.get("truncated"),
            "empty": one.manifest.counters.get("empty_texts"),
            "sampled": one.sampled,
        }
        for one in facts.splits
    ]
    return {
        "url": redact(facts.url),
        "digest": facts.manifest.digest,
        "labels": facts.tail.labels,
        "unseen": facts.tail.unseen,
        "head": 100 * facts.tail.head_share,
        "rejected": facts.rejected,
        "splits": rows,
    }


def _table(run: Run, several: bool) -> dict[str, Any]:
    """A line a table of the run; `used` says which epochs trained on it."""
    used: dict[int, list[int]] = {}
    for row in run.records.get("epoch", []):
        if row.get("table_epoch") is not None:
            used.setdefault(row["table_epoch"], []).append(row["epoch"])
    rows = []
    for one in run.tables:
        quality, counters = one.manifest.quality, one.manifest.counters
        rows.append(
            {
                "epoch": one.epoch,
                "source": one.source,
                "rows": one.manifest.rows,
                "width": one.manifest.parameters.get("width"),
                "index": one.manifest.parameters.get("index"),
                "recall": quality.get("recall_at_k"),
                "overlap": quality.get("overlap_with_previous"),
                "above": quality.get("top1_above_weakest_positive"),
                "padded": counters.get("padded_rows"),
                "used": ", ".join(map(str, used.get(one.epoch, []))),
            }
        )
    return {"run": run.name if several else "", "rows": rows}


def _metrics(runs: list[Run]) -> list[dict[str, Any]]:
    """A table a split: metrics by run, each with the half-width of its interval; the best of each column marked."""
    tables = []
    for split in sorted({split for run in runs for split in run.evaluations}):
        bodies = [(run, run.evaluations[split]) for run in runs if split in run.evaluations]
        names = [name for name in charts.SHOWN_METRICS if any(name in body["metrics"] for _, body in bodies)]
        best = {name: max(body["metrics"].get(name, float("-inf")) for _, body in bodies) for name in names}
        rows = []
        for run, body in bodies:
            cells = []
            for name in names:
                value = body["metrics"].get(name)
                low, high = (body.get("intervals") or {}).get(name, (value, value))
                half = None if value is None else (high - low) / 2
                cells.append({"value": value, "half": half, "best": len(bodies) > 1 and value == best[name]})
            rows.append({"run": run.name, "step": body["step"], "queries": body["queries"], "cells": cells})
        tables.append({"split": split, "names": names, "rows": rows})
    return tables
