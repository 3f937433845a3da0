"""Rows of the page's tables, as its template reads them."""

from typing import Any

from extremis.inspecting.run_tables import RunTable
from extremis.report.charts import SHOWN_METRICS
from extremis.report.data import Facts, Split
from extremis.report.runs import Run
from schemas.secrets import redact


def run_rows(runs: list[Run]) -> list[dict[str, Any]]:
    """Make the table of runs: how far each one is, and where."""
    return [_run_row(run, run.records.get("epoch", []), run.config["recipe"]) for run in runs]


def _run_row(run: Run, epochs: list[dict[str, Any]], recipe: dict[str, Any]) -> dict[str, Any]:
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


def data_summary(facts: Facts) -> dict[str, Any]:
    """Make the summary of DATA and its table of splits."""
    return {
        "url": redact(facts.url),
        "digest": facts.manifest.digest,
        "labels": facts.tail.labels,
        "unseen": facts.tail.unseen,
        "head": 100 * facts.tail.head_share,
        "rejected": facts.rejected,
        "splits": [_split_row(split) for split in facts.splits],
    }


def _split_row(split: Split) -> dict[str, Any]:
    return {
        "name": split.name,
        "rows": split.manifest.rows,
        "shards": len(split.manifest.shards),
        "bytes": sum(shard.bytes for shard in split.manifest.shards),
        "labels": split.mean("labels"),
        "tokens": split.mean("tokens"),
        "truncated": split.manifest.counters.get("truncated"),
        "empty": split.manifest.counters.get("empty_texts"),
        "sampled": split.sampled,
    }


def mined_tables(runs: list[Run]) -> list[dict[str, Any]]:
    """Make the tables of hard negatives, for each run a row per table."""
    tables = []
    for run in runs:
        used: dict[int, list[int]] = {}  # epochs that trained on the table of an epoch
        for row in run.records.get("epoch", []):
            if row.get("table_epoch") is not None:
                used.setdefault(row["table_epoch"], []).append(row["epoch"])
        rows = [_mined_row(table, used.get(table.epoch, [])) for table in run.tables]
        tables.append({"run": run.name if len(runs) > 1 else "", "rows": rows})
    return tables


def _mined_row(table: RunTable, used: list[int]) -> dict[str, Any]:
    parameters, quality, counters = table.manifest.parameters, table.manifest.quality, table.manifest.counters
    return {
        "epoch": table.epoch,
        "source": table.source,
        "rows": table.manifest.rows,
        "width": parameters.get("width"),
        "index": parameters.get("index"),
        "recall": quality.get("recall_at_k"),
        "overlap": quality.get("overlap_with_previous"),
        "above": quality.get("top1_above_weakest_positive"),
        "padded": counters.get("padded_rows"),
        "used": ", ".join(map(str, used)),
    }


def metric_tables(runs: list[Run]) -> list[dict[str, Any]]:
    """Make a table per split: metrics by run, with half of their intervals, and the best of each column marked."""
    tables = []
    for split in sorted({split for run in runs for split in run.evaluations}):
        bodies = {run.name: run.evaluations[split] for run in runs if split in run.evaluations}
        names = [name for name in SHOWN_METRICS if any(name in body["metrics"] for body in bodies.values())]
        best = {name: max(body["metrics"].get(name, float("-inf")) for body in bodies.values()) for name in names}
        rows = []
        for run_name, body in bodies.items():
            cells = []
            for name in names:
                value = body["metrics"].get(name)
                low, high = (body.get("intervals") or {}).get(name, (value, value))
                half = None if value is None else (high - low) / 2
                cells.append({"value": value, "half": half, "best": len(bodies) > 1 and value == best[name]})
            rows.append({"run": run_name, "step": body["step"], "queries": body["queries"], "cells": cells})
        tables.append({"split": split, "names": names, "rows": rows})
    return tables
