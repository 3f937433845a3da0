"""`extremis report`: gathers the facts, draws the page, and publishes it."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from extremis.inspecting.examples import splits_of
from extremis.reporting.charts import data_charts, drift_charts, metric_charts, table_charts, training_charts
from extremis.reporting.data_facts import describe
from extremis.reporting.page import render
from extremis.reporting.queries import NEIGHBOURED, Sample, sample, weakest
from extremis.reporting.run_records import Run, differing, metric_tables, names_of, open_run, ordered_splits
from extremis.spinner import doing
from schemas import storage
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import is_published
from schemas.owners.place import require_file
from schemas.storage import join
from schemas.table import Table
from trainer.evaluation.breakdowns import DEPTH
from trainer.model import require_same_data

NAME = "report.html"  # of a run's own page
_TITLE, _HEAD = "· Extremis</title>".encode(), 4096  # the end of a page's title, and the bytes that have it


def build(
    urls: Sequence[str], out: str | None, say: Callable[[str], None], queries: int = 300, predict: bool = True
) -> dict[str, Any]:
    """Write the page about `urls`: a DATA, if the first is one, and runs that were made from it or a version before it.

    `queries`: how many to show; `predict`: with the predictions of each run's checkpoint.
    Returns {"out", "bytes", "seconds", "runs"}. Raises InputError, TableError, StorageError.
    """
    began = time.perf_counter()
    data, runs = _open(urls)
    own = join(runs[0].layout.root, NAME)
    out = out or own
    _require_page(out, own, [*([] if data is None else [data.root]), *(run.layout.root for run in runs)])
    doing("report: reading facts of the data")
    facts = None if data is None else describe(data)
    tables = [] if data is None else weakest(data, runs)
    examples = Sample([], {}, [], ["give DATA before the runs to see queries as text"])
    if data is not None:
        say(f"reading {queries} queries of {data.root}")
        doing("report: predicting for the queries that are shown")
        splits = ordered_splits(splits_of(data))
        ends = list(dict.fromkeys([splits[0], splits[-1]])) if queries else []
        examples = sample(data, runs, ends, queries, predict and queries > 0, tables)
    doing("report: drawing the page")
    values = {
        "runs": runs,
        "data": facts,
        "differences": differing({run.name: run.config for run in runs}),
        "metrics": metric_tables(runs),
        "weakest": tables,
        "labels": examples.labels,
        "neighboured": NEIGHBOURED,
        "notes": examples.notes,
        "queries": len(examples.queries),
    }
    charts = {
        "data": data_charts(facts) if facts else [],
        "training": training_charts(runs),
        "tables": table_charts(runs),
        "metrics": [*metric_charts(runs), *drift_charts(runs)],
    }
    searched = {"queries": examples.queries, "labels": examples.labels, "near": examples.near, "k": DEPTH}
    page = render(values, {"charts": charts, "runs": [run.name for run in runs], **searched})
    storage.write_bytes(out, page)
    seconds = round(time.perf_counter() - began, 2)
    return {"out": out, "bytes": len(page), "seconds": seconds, "runs": {run.name: run.layout.root for run in runs}}


def _require_page(out: str, own: str, reads: Sequence[str]) -> None:
    """Refuse to write a page over anything but a page. Raises InputError, StorageError."""
    if not storage.is_within(out, own):
        is_page = storage.exists(out) and _TITLE in storage.read_range(out, 0, min(storage.size(out), _HEAD))
        require_file(out, reads, "It is no report; choose another place.", is_page)


def _open(urls: Sequence[str]) -> tuple[DataLayout | None, list[Run]]:
    first = urls[0]
    data = DataLayout(first) if is_published(first) and Table.open(first).kind == "data" else None
    places = list(urls[1:] if data is not None else urls)
    if not places:
        raise InputError(f"{first}: a DATA alone has no report. Name the runs: extremis report DATA RUN [RUN…].")
    if len(set(places)) < len(places):
        raise InputError(f"the same run is named twice: {' '.join(places)}.")
    manifest = None if data is None else Table.open(data.root, "data").manifest
    runs = [open_run(url, name, manifest) for url, name in zip(places, names_of(places), strict=True)]
    for run in runs:
        if data is not None and manifest is not None:
            require_same_data(run.config, manifest, data.root, run.layout.root, earlier=True)
    return data, runs
