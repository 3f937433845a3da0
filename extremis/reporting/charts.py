"""Charts of the report, as Plotly figures without colours and margins; the page adds these from its theme.

A chart is a dict of `id`, `title`, `note` and `figure` (Plotly's `data` and `layout`). A trace's `meta` is its colour
number. A run has the same colour in all charts. If all lines of a chart have only one dot, a sentence, `said`, replaces
the figure.
"""

import html
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from extremis.console import format_value
from extremis.reporting.data_statistics import DataStatistics, SplitStatistics, histograms
from extremis.reporting.run_records import SHOWN_METRICS, Run, evaluated_splits, say_split
from schemas.run_tables import RunTable
from trainer.evaluation.split import HOLDOUT

Chart: TypeAlias = dict[str, Any]
Trace: TypeAlias = dict[str, Any]

CANDIDATE_OUTCOMES = {
    "kept": "kept",
    "positives_dropped": "positives",
    "filtered_dropped": "filter pairs",
    "same_text_dropped": "a positive's text",
    "skipped_top": "top skipped",
    "beyond_window": "beyond the window",
    "above_margin": "above the margin",
    "above_max_score": "above the highest score",
    "below_min_score": "below the lowest score",
    "not_drawn": "not drawn",
    "outranked": "outranked",
}

_BOX = {"lowerfence": "p01", "q1": "p10", "median": "p50", "q3": "p90", "upperfence": "p99"}  # Plotly's name: quantile
_DASHES = ("solid", "dot", "dash")
_LOG: dict[str, Any] = {"type": "log", "dtick": 1, "exponentformat": "power"}


def data_charts(statistics: DataStatistics) -> list[Chart]:
    """Draw the tail of the labels, and histograms of labels and tokens per point."""
    traces = [line("training points", 0, statistics.tail.rank, statistics.tail.points)]
    note = "both axes are logarithmic; labels without a training point are left out"
    tail = draw_chart(
        "tail", "Training points per label, by rank", traces, "rank of the label", "training points", note
    )
    tail["figure"]["layout"]["xaxis"] |= _LOG
    tail["figure"]["layout"]["yaxis"] |= _LOG
    lengths = [_lengths(name, f"{name.capitalize()} per point", statistics.splits) for name in ("labels", "tokens")]
    return _simplify_charts([tail, *lengths])


def _lengths(name: str, title: str, splits: Sequence[SplitStatistics]) -> Chart:
    """Draw the percentage of rows per value, in equal bins, so that splits with different sizes can be compared."""
    values, rows = histograms([getattr(split, name) for split in splits])
    shares = 100 * rows / np.maximum(1, rows.sum(axis=1, keepdims=True)) / np.diff(values[:2]).max(initial=1)
    named = enumerate(zip(splits, shares, strict=True))
    traces = [line(split.name, number, values, share) for number, (split, share) in named if share.any()]
    return draw_chart(name, title, traces, title.lower(), "% of points, per value")


def training_charts(runs: Sequence[Run]) -> list[Chart]:
    """Draw loss, learning rates, throughput and validation for all runs, and the time per activity for each run."""
    rates = {"encoder_lr": "encoder", "classifier_lr": "classifier"}
    charts = [
        _curves("loss", "Loss of a step", runs, "train", {"loss": ""}, "step", "loss"),
        _curves("epoch-loss", "Mean loss of an epoch", runs, "epoch", {"loss": ""}, "epoch", "loss"),
        _curves("rates", "Learning rates", runs, "train", rates, "step", "rate"),
        _curves("throughput", "Throughput", runs, "epoch", {"rows_per_second": ""}, "epoch", "rows per second"),
    ]
    names = {key for run in runs for row in run.records.get("validation", []) for key in row}
    metrics = {name: name for name in [name for name in SHOWN_METRICS if name in names][:3]}
    validation = _curves("validation", "Validation of classifier scores", runs, "validation", metrics, "epoch", "%")
    charts.append({**validation, "note": _validation_note(runs)})
    charts += [_against_time(name, runs) for name in ("P@1", "PSP@5") if name in names]
    charts += [_step_times(number, run, len(runs) > 1) for number, run in enumerate(runs)]
    return _simplify_charts(charts)


def _validation_note(runs: Sequence[Run]) -> str:
    splits = {run.config["recipe"]["validation"]["split"] or HOLDOUT for run in runs if "validation" in run.records}
    return f"ranked by the vectors, without a fusion, on the first queries of {' or '.join(sorted(splits))}"


def _curves(
    name: str, title: str, runs: Sequence[Run], kind: str, fields: dict[str, str], over: str, unit: str
) -> Chart:
    """Draw recorded `fields` (legend name: field) over steps or epochs."""
    traces = []
    for number, run in enumerate(runs):
        for dash, (field, label) in enumerate(fields.items()):
            places, values = run.curve(kind, field, over)
            traces.append(line(_legend(runs, run, label), number, places, values, dash, points=over == "epoch"))
    return draw_chart(name, title, traces, over, unit)


def _against_time(name: str, runs: Sequence[Run]) -> Chart:
    """Draw a validation metric against the seconds of training (ASTRA, figure 1; NGAME, figure 2)."""
    traces = []
    for number, run in enumerate(runs):
        seconds = {row["epoch"]: row.get("seconds", 0.0) for row in run.records.get("epoch", [])}
        rows = {row["epoch"]: row[name] for row in run.records.get("validation", []) if name in row}
        epochs = sorted(rows.keys() & seconds.keys())
        ends = [sum(length for epoch, length in seconds.items() if epoch <= last) for last in epochs]
        traces.append(line(run.name, number, ends, [rows[epoch] for epoch in epochs], points=True))
    note = f"{_validation_note(runs)}; seconds of epochs, which a miner on the same cores makes slower"
    identity = f"time-to-{name.replace('@', '-')}"
    return draw_chart(
        identity, f"Validation {name} of classifier scores against time", traces, "seconds of training", "%", note
    )


def _step_times(number: int, run: Run, several: bool) -> Chart:
    """Draw the seconds of each epoch, divided into the parts of a step."""
    rows = run.records.get("epoch", [])
    parts = sorted({key for row in rows for key in row if key.startswith("seconds_") and key != "seconds_background"})
    epochs = [row["epoch"] for row in rows]
    traces = [
        _trace("bar", part.removeprefix("seconds_"), color, x=epochs, y=[row.get(part, 0.0) for row in rows])
        for color, part in enumerate(parts)
    ]
    title = f"Time by activity: {run.name}" if several else "Time by activity"
    return draw_chart(f"time-{number}", title, traces, "epoch", "seconds", barmode="stack")


def table_charts(runs: Sequence[Run]) -> list[Chart]:
    """Draw tables' recall, overlap, age and hardness over epochs for all runs; scores and candidates for each run."""
    scores = {"score_then": "when mined", "score_now": "when used"}
    title = "Scores of the table's negatives: when mined, and when used"
    ranks = {"rank_p10": "10 %", "rank_p50": "median", "rank_p90": "90 %"}
    charts = [
        _quality("recall", "Recall of the table against exact search", runs, "recall_at_k"),
        _quality("overlap", "Negatives that were also in the previous table", runs, "overlap_with_previous"),
        _quality(
            "above", "Rows whose hardest negative beats the weakest positive", runs, "top1_above_weakest_positive"
        ),
        _ages(runs),
        _curves("hardness", title, runs, "staleness", scores, "epoch", "mean score"),
        _curves("hard-ranks", "Ranks of a step's hard negatives among all labels", runs, "hard", ranks, "step", "rank"),
    ]
    for number, run in enumerate(runs):
        for source in _sources_of(run):
            tables = [table for table in run.tables if table.source == source]
            suffix = f" ({source})" if source != "queries" else ""
            suffix += f": {run.name}" if len(runs) > 1 else ""
            charts.append(_scores(f"scores-{number}-{source}", f"Scores{suffix}", tables))
            charts.append(
                _candidate_counts(f"funnel-{number}-{source}", f"Candidates kept and dropped{suffix}", tables)
            )
    return _simplify_charts(charts)


def _quality(name: str, title: str, runs: Sequence[Run], field: str) -> Chart:
    traces = []
    for number, run in enumerate(runs):
        for dash, source in enumerate(_sources_of(run)):
            values = {
                mined.epoch: 100 * mined.table.manifest.quality[field]
                for mined in run.tables
                if mined.source == source and mined.table.manifest.quality.get(field) is not None
            }
            traces.append(line(_legend(runs, run, source), number, values.keys(), values.values(), dash, points=True))
    return draw_chart(name, title, traces, "made for epoch", "%")


def _ages(runs: Sequence[Run]) -> Chart:
    """Draw the number of epochs between a table's dump and its use; the line jumps if a table is late."""
    traces = []
    for number, run in enumerate(runs):
        rows = [row for row in run.records.get("epoch", []) if row.get("table_age") is not None]
        epochs, ages = ([row[name] for row in rows] for name in ("epoch", "table_age"))
        texts = [f"table of epoch {row['table_epoch']}{', late' if row.get('late') else ''}" for row in rows]
        hover = {"text": texts, "hovertemplate": "%{y}<br>%{text}"}
        traces.append({**line(run.name, number, epochs, ages, points=True), **hover})
    return draw_chart("age", "Age of the table in use", traces, "epoch", "epochs")


def _scores(name: str, title: str, tables: Sequence[RunTable]) -> Chart:
    """Draw the quantiles of positives' and negatives' scores as boxes."""
    traces = []
    fields = {"positive_score_quantiles": "positives", "score_quantiles": "hard negatives"}
    for color, (field, label) in enumerate(fields.items()):
        qualities = {mined.epoch: mined.table.manifest.quality for mined in tables}
        rows = {epoch: quality[field] for epoch, quality in qualities.items() if quality.get(field)}
        box = {part: [row[quantile] for row in rows.values()] for part, quantile in _BOX.items()}
        traces.append({**_trace("box", label, color, x=rows.keys(), **box), "whiskerwidth": 0.5})
    note = "box: 10 to 90 %, line: median, whiskers: 1 to 99 %"
    return draw_chart(name, title, traces, "made for epoch", "score", note)


def _candidate_counts(name: str, title: str, tables: Sequence[RunTable]) -> Chart:
    """Draw the number of candidates per row that are kept, and that each filter drops."""
    epochs = [table.epoch for table in tables]
    traces = []
    for color, (field, label) in enumerate(CANDIDATE_OUTCOMES.items()):
        counts = [mined.table.manifest.counters.get(field, 0) / max(1, mined.table.rows) for mined in tables]
        if any(counts):
            traces.append(_trace("bar", label, color, x=epochs, y=counts))
    return draw_chart(name, title, traces, "made for epoch", "candidates per row", barmode="stack")


def metric_charts(runs: Sequence[Run]) -> list[Chart]:
    """Draw how much each decile of the labels contributes to P@5, for every evaluated split."""
    charts = []
    for split in evaluated_splits(runs):
        traces = []
        for number, run in enumerate(runs):
            parts = (run.evaluations.get(split, {}).get("deciles") or {}).get("P@5", [])
            bins = [f"{10 * i}-{10 * (i + 1)} %" for i in range(len(parts))]
            traces.append(_trace("bar", run.name, number, x=bins, y=parts))
        note = "bins of equal training mass, the most frequent labels first; the parts add up to P@5"
        title = f"Contributions of frequent and rare labels to P@5 on {say_split(split)}"
        charts.append(draw_chart(f"deciles-{split}", title, traces, "labels, by frequency", "part of P@5", note))
    return _simplify_charts(charts)


def line(name: str, color: int, x: Iterable[Any], y: Iterable[Any], dash: int = 0, points: bool = False) -> Trace:
    """Make a line; with `points`, with a marker at each point."""
    style = {"width": 2, "dash": _DASHES[dash % len(_DASHES)]}
    mode = "lines+markers" if points else "lines"
    return {**_trace("scatter", name, color, x=x, y=y), "mode": mode, "line": style, "marker": {"size": 6}}


def _trace(kind: str, name: str, color: int, **values: Iterable[Any]) -> Trace:
    # Plotly interprets some markup in names.
    name = html.escape(name, quote=False)
    return {"type": kind, "name": name, "meta": color, **{part: _plain(row) for part, row in values.items()}}


def draw_chart(
    identity: str, title: str, traces: list[Trace], x: str, y: str, note: str = "", barmode: str = "group"
) -> Chart:
    """Make a chart from the non-empty `traces`; `x` and `y` are the titles of the axes."""
    traces = [trace for trace in traces if trace["x"]]
    x_axis: dict[str, Any] = {"title": {"text": x}}
    y_axis: dict[str, Any] = {"title": {"text": y}}
    if "epoch" in x and traces:  # whole numbers, with a tick for each number if there is room
        values = [value for trace in traces for value in trace["x"]]
        x_axis |= {"tickformat": "d", "dtick": max(1, -(-(max(values) - min(values)) // 8))}
    if y == "%" or barmode == "stack":
        y_axis["rangemode"] = "tozero"
    layout = {"barmode": barmode, "xaxis": x_axis, "yaxis": y_axis}
    return {"id": identity, "title": title, "note": note, "figure": {"data": traces, "layout": layout}}


def _legend(runs: Sequence[Run], run: Run, label: str) -> str:
    """Return the name of a run's line in the legend; only `label` if there is only one run."""
    return label if label and len(runs) == 1 else f"{run.name} {label}".rstrip()


def _simplify_charts(charts: list[Chart]) -> list[Chart]:
    """Omit empty charts, and turn charts with one dot per line into sentences."""
    return [_as_sentence(chart) or chart for chart in charts if chart["figure"]["data"]]


def _as_sentence(chart: Chart) -> Chart | None:
    """Return a chart with a sentence about the dots, or None if a line has several dots or the chart has no lines."""
    traces, layout = chart["figure"]["data"], chart["figure"]["layout"]
    if any(trace["type"] != "scatter" or len(trace["x"]) > 1 for trace in traces):
        return None
    over, unit = layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"]
    dots = []
    for trace in traces:
        name = f"{html.unescape(trace['name'])}: " if len(traces) > 1 else ""
        value, place = (format_value(*trace[axis]) or "none" for axis in "yx")
        dots.append(f"{name}{f'{value} %' if unit == '%' else f'{unit} {value}'} ({over} {place})")
    return {"id": chart["id"], "title": chart["title"], "said": "; ".join(dots)}


def _sources_of(run: Run) -> list[str]:
    """List the sources of the run's tables, starting with queries."""
    return sorted({table.source for table in run.tables}, key=lambda name: (name != "queries", name))


def _plain(values: Iterable[Any]) -> list[Any]:
    """Convert values for JSON: 5 significant digits, which are enough for a screen, and NaN as null."""
    values = values.tolist() if isinstance(values, np.ndarray) else values
    return [_round(value) for value in values]


def _round(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if np.isfinite(value) else None


_OF_QUERIES = ("P@1", "P@5", "PSP@5")


def drift_charts(runs: Sequence[Run]) -> list[Chart]:
    """Draw metrics for every split: per part of the queries, per part of the labels, and per version."""
    charts = []
    for split in evaluated_splits(runs):
        bodies = {number: run.evaluations[split] for number, run in enumerate(runs) if split in run.evaluations}
        note = "parts from the oldest to the newest"
        traces = _by_part(runs, bodies, "parts", "queries", _OF_QUERIES)
        charts.append(draw_chart(f"parts-{split}", f"Metrics on {say_split(split)} by part", traces, "part", "%", note))
        note += "; a run that is older than a part does not know the labels of that part"
        traces = _by_part(runs, bodies, "labels_by_part", "positives", ("R@5",))
        traces = [trace | {"name": trace["name"].replace("R@5", "found")} for trace in traces]  # of all positives
        title = f"True labels among the first 5 predictions on {say_split(split)}, by the part that added the label"
        charts.append(draw_chart(f"label-parts-{split}", title, traces, "part", "%", note))
        traces = _by_version([body for body in bodies.values() if "version" in body])
        note = "each run is shown at the version on which it was evaluated"
        title = f"Metrics on {say_split(split)} over versions"
        charts.append(draw_chart(f"versions-{split}", title, traces, "version", "%", note))
    for chart in charts:  # names of parts may look like numbers or dates
        chart["figure"]["layout"]["xaxis"]["type"] = "category"
    return _simplify_charts(charts)


def _by_part(
    runs: Sequence[Run], bodies: dict[int, dict[str, Any]], section: str, counted: str, names: Sequence[str]
) -> list[Trace]:
    """Draw metrics over parts, from a section of the evaluations (`bodies`, by run number), one colour per run."""
    traces = []
    for number, body in bodies.items():
        parts = body.get(section, {})
        texts = [f"{values[counted]:,} {counted}" for values in parts.values()]
        for dash, name in enumerate(name for name in names if any(name in values for values in parts.values())):
            values = [values.get(name) for values in parts.values()]
            trace = line(_legend(runs, runs[number], name), number, parts, values, dash, points=True)
            traces.append({**trace, "text": texts, "hovertemplate": "%{y}, %{text}"})
    return traces


def _by_version(bodies: Sequence[dict[str, Any]]) -> list[Trace]:
    """Draw each metric over versions, if there are several versions."""
    versions = {body["version"]["number"]: body for body in bodies}
    if len(versions) < 2:
        return []
    ordered = [versions[number] for number in sorted(versions)]
    places = [f"{body['version']['number']}: {body['version']['part']}" for body in ordered]
    names = [name for name in _OF_QUERIES if any(name in body["metrics"] for body in ordered)]
    return [
        line(name, number, places, [body["metrics"].get(name) for body in ordered], points=True)
        for number, name in enumerate(names)
    ]
