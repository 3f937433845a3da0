"""Facts as charts: what each shows and the numbers in it. How a chart is drawn is the page's business.

A chart is a dict: `id`, `title`, `note`, `kind` (lines, bars, stack, boxes), `x` and `y` (axis titles), `log` (axes on
a logarithmic scale) and `series`: each with `name`, `color` (a number: the same thing has the same colour everywhere),
`x`, `y`, and where it applies `low` and `high` (ends of an interval) or the quantiles of a box.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from extremis.inspecting.run_tables import Mined
from extremis.report.data import Facts, Split
from extremis.report.runs import Run

Chart: TypeAlias = dict[str, Any]

FATES = {
    "kept": "kept",
    "positives_dropped": "positives",
    "filtered_dropped": "filter pairs",
    "skipped_top": "top skipped",
    "beyond_window": "beyond the window",
    "above_margin": "above the margin",
    "outranked": "outranked",
}
QUANTILES = ("p01", "p10", "p50", "p90", "p99")
SHOWN_METRICS = ("P@1", "P@3", "P@5", "nDCG@5", "R@10", "PSP@1", "PSP@3", "PSP@5")


def of_data(facts: Facts) -> list[Chart]:
    """Histograms of labels and tokens a point, and the tail of the labels."""
    tail = facts.tail
    charts = [
        chart(
            "tail",
            "Training points of a label, by its rank",
            "both axes are logarithmic; labels without a training point are left out",
            "lines",
            "rank of the label",
            "training points",
            [series("training points", 0, tail.rank, tail.points)],
            log="xy",
        ),
        _lengths("labels", "Labels a point", facts.splits, [one.labels for one in facts.splits]),
    ]
    with_tokens = [one for one in facts.splits if one.tokens is not None]
    if with_tokens:
        charts.append(_lengths("tokens", "Tokens a point", with_tokens, [one.tokens for one in with_tokens]))
    return charts


def _lengths(name: str, title: str, splits: Sequence[Split], counted: Sequence[Any]) -> Chart:
    """Shares of rows a value, so that splits of different sizes and with bins of different widths compare."""
    found = [
        series(split.name, number, values, 100 * rows / max(1, rows.sum()) / np.diff(values).max(initial=1))
        for number, (split, (values, rows)) in enumerate(zip(splits, counted, strict=True))
    ]
    return chart(name, title, "", "lines", title.lower(), "% of points, a value", found)


def of_training(runs: Sequence[Run]) -> list[Chart]:
    """Loss, rates, throughput and validation, all runs in one chart; where the time of a step goes, one a run."""
    charts = [
        _curves("loss", "Loss of a step", runs, "train", {"loss": ""}, "step", "loss"),
        _curves("epoch-loss", "Mean loss of an epoch", runs, "epoch", {"loss": ""}, "epoch", "loss"),
        _curves(
            "rates",
            "Learning rates",
            runs,
            "train",
            {"encoder_lr": "encoder", "classifier_lr": "classifier"},
            "step",
            "rate",
        ),
        _curves("throughput", "Throughput", runs, "epoch", {"rows_per_second": ""}, "epoch", "rows a second"),
    ]
    names = sorted({key for run in runs for row in run.records.get("validation", []) for key in row})
    shown = [name for name in SHOWN_METRICS if name in names][:3]
    if shown:
        found = {name: name for name in shown}
        charts.append(_curves("validation", "Validation", runs, "validation", found, "epoch", "%"))
        against = [name for name in ("P@1", "PSP@5") if name in names]
        charts += [_against_time(name, runs) for name in against]
    for number, run in enumerate(runs):
        charts.append(_breakdown(f"time-{number}", run, len(runs) > 1))
    return [one for one in charts if one["series"]]


def _curves(
    name: str, title: str, runs: Sequence[Run], kind: str, fields: dict[str, str], over: str, unit: str
) -> Chart:
    found = []
    for number, run in enumerate(runs):
        for dash, (field, label) in enumerate(fields.items()):
            steps, values = run.curve(kind, field)
            if over == "epoch":
                steps = _epochs_of(run, kind, field)
            if len(values):
                found.append({**series(" ".join(filter(None, (run.name, label))), number, steps, values), "dash": dash})
    return chart(name, title, "", "lines", over, unit, found, points=over == "epoch")


def _against_time(name: str, runs: Sequence[Run]) -> Chart:
    """A metric on the validation split over the seconds of training that it took (ASTRA, figure 1; NGAME, figure 2)."""
    found = []
    for number, run in enumerate(runs):
        seconds = {row["epoch"]: row.get("seconds", 0.0) for row in run.records.get("epoch", [])}
        rows = {row["epoch"]: row[name] for row in run.records.get("validation", []) if name in row}
        epochs = sorted(rows.keys() & seconds.keys())
        if epochs:
            until = [sum(taken for epoch, taken in seconds.items() if epoch <= last) for last in epochs]
            found.append(series(run.name, number, until, [rows[epoch] for epoch in epochs]))
    note = "seconds of epochs: mining beside the training is in them where it takes the same cores"
    title = f"Validation {name} against time"
    place = f"time-to-{name.replace('@', '-')}"
    return chart(place, title, note, "lines", "seconds of training", "%", found, points=True)


def _epochs_of(run: Run, kind: str, field: str) -> np.ndarray:
    return np.asarray([row["epoch"] for row in run.records.get(kind, []) if isinstance(row.get(field), int | float)])


def _breakdown(name: str, run: Run, several: bool) -> Chart:
    """Seconds of each epoch by what they went into."""
    rows = run.records.get("epoch", [])
    parts = sorted({key for row in rows for key in row if key.startswith("seconds_")})
    epochs = [row["epoch"] for row in rows]
    found = [
        series(part.removeprefix("seconds_"), number, epochs, [row.get(part, 0.0) for row in rows])
        for number, part in enumerate(parts)
    ]
    title = f"Where the time goes: {run.name}" if several else "Where the time goes"
    return chart(name, title, "", "stack", "epoch", "seconds", found)


def of_tables(runs: Sequence[Run]) -> list[Chart]:
    """Recall, overlap, age and hardness over the epochs, all runs in one chart; quantiles and funnel, one a run."""
    charts = [
        _quality("recall", "Recall of the table against exact search", runs, "recall_at_k"),
        _quality("overlap", "Share of negatives that the table before had too", runs, "overlap_with_previous"),
        _quality(
            "above", "Rows whose hardest negative beats their weakest positive", runs, "top1_above_weakest_positive"
        ),
        _age(runs),
        _curves(
            "hardness",
            "What the table's negatives score: when mined, and when used",
            runs,
            "staleness",
            {"score_then": "when mined", "score_now": "when used"},
            "epoch",
            "mean score",
        ),
    ]
    quantiles = {"rank_p10": "10 %", "rank_p50": "median", "rank_p90": "90 %"}
    title = "Ranks of a step's hard negatives among all labels"
    charts.append(_curves("hard-ranks", title, runs, "hard", quantiles, "step", "rank"))
    for number, run in enumerate(runs):
        several = f": {run.name}" if len(runs) > 1 else ""
        for source in sources_of(run):
            tables = [one for one in run.tables if one.source == source]
            of = f" ({source})" if source != "queries" else ""
            charts.append(_boxes(f"scores-{number}-{source}", f"Scores{of}{several}", tables))
            charts.append(_funnel(f"funnel-{number}-{source}", f"What became of the candidates{of}{several}", tables))
    return [one for one in charts if one["series"]]


def _quality(name: str, title: str, runs: Sequence[Run], field: str) -> Chart:
    found = []
    for number, run in enumerate(runs):
        for dash, source in enumerate(sources_of(run)):
            rows = [
                (one.epoch, 100 * one.manifest.quality[field])
                for one in run.tables
                if one.source == source and one.manifest.quality.get(field) is not None
            ]
            if rows:
                label = _named(run.name, source)
                x, y = zip(*rows, strict=True)
                found.append({**series(label, number, x, y), "dash": dash})
    return chart(name, title, "", "lines", "made for epoch", "%", found, points=True)


def _age(runs: Sequence[Run]) -> Chart:
    """Epochs between a table's dump and the epoch that trained on it; late ones are where it jumps."""
    found = []
    for number, run in enumerate(runs):
        rows = [row for row in run.records.get("epoch", []) if row.get("table_age") is not None]
        if rows:
            x, y = [row["epoch"] for row in rows], [row["table_age"] for row in rows]
            late = [f"table of epoch {row['table_epoch']}{', late' if row.get('late') else ''}" for row in rows]
            found.append({**series(run.name, number, x, y), "text": late})
    return chart("age", "Age of the table trained on", "", "lines", "epoch", "epochs", found, points=True)


def _boxes(name: str, title: str, tables: Sequence[Mined]) -> Chart:
    found = []
    for number, (field, label) in enumerate(
        (("positive_score_quantiles", "positives"), ("score_quantiles", "hard negatives"))
    ):
        held = [(one.epoch, one.manifest.quality.get(field)) for one in tables]
        rows = [(epoch, quantiles) for epoch, quantiles in held if quantiles]
        if rows:
            found.append(
                {
                    **series(label, number, [epoch for epoch, _ in rows], []),
                    "quantiles": [[quantiles[q] for _, quantiles in rows] for q in QUANTILES],
                }
            )
    note = "box: 10 to 90 %, line: median, whiskers: 1 to 99 %"
    return chart(name, title, note, "boxes", "made for epoch", "score", found)


def _funnel(name: str, title: str, tables: Sequence[Mined]) -> Chart:
    """Candidates a row by their fate."""
    epochs = [one.epoch for one in tables]
    found = []
    for number, (field, label) in enumerate(FATES.items()):
        each = [one.manifest.counters.get(field, 0) / max(1, one.manifest.rows) for one in tables]
        if any(each):
            found.append(series(label, number, epochs, each))
    return chart(name, title, "", "stack", "made for epoch", "candidates a row", found)


def of_metrics(runs: Sequence[Run]) -> list[Chart]:
    """Metrics with their intervals, and the deciles' parts of P@5, for every split that was evaluated."""
    charts = []
    for split in sorted({split for run in runs for split in run.evaluations}):
        having = [(number, run) for number, run in enumerate(runs) if split in run.evaluations]
        bars, deciles = [], []
        for number, run in having:
            body = run.evaluations[split]
            names = [name for name in SHOWN_METRICS if name in body["metrics"]]
            ends = [body.get("intervals", {}).get(name, [body["metrics"][name]] * 2) for name in names]
            one = series(run.name, number, names, [body["metrics"][name] for name in names])
            bars.append({**one, "low": [low for low, _ in ends], "high": [high for _, high in ends]})
            parts = (body.get("deciles") or {}).get("P@5")
            if parts:
                deciles.append(series(run.name, number, [f"{10 * i}-{10 * (i + 1)} %" for i in range(10)], parts))
        note = "lines at the ends of the bars: 95 % intervals by bootstrap"
        charts.append(chart(f"metrics-{split}", f"Metrics on {split}", note, "bars", "", "%", bars))
        if deciles:
            note = "bins of equal training mass, the most frequent labels first; the parts add up to P@5"
            title = f"What frequent and rare labels bring to P@5 on {split}"
            charts.append(
                chart(f"deciles-{split}", title, note, "bars", "labels, by frequency", "part of P@5", deciles)
            )
    return charts


def chart(
    name: str,
    title: str,
    note: str,
    kind: str,
    x: str,
    y: str,
    found: list[dict[str, Any]],
    log: str = "",
    points: bool = False,
) -> Chart:
    return {
        "id": name,
        "title": title,
        "note": note,
        "kind": kind,
        "x": x,
        "y": y,
        "log": log,
        "points": points,
        "series": found,
    }


def series(name: str, color: int, x: Iterable[Any], y: Iterable[Any]) -> dict[str, Any]:
    return {"name": name, "color": color, "x": _plain(x), "y": _plain(y)}


def sources_of(run: Run) -> list[str]:
    """What its tables are aligned with: the queries first."""
    return sorted({one.source for one in run.tables}, key=lambda name: (name != "queries", name))


def _named(run: str, source: str) -> str:
    return run if source == "queries" else f"{run} {source}"


def _plain(values: Iterable[Any]) -> list[Any]:
    """JSON's numbers: 5 digits are more than a screen shows, and NaN is none of them."""
    found = values.tolist() if isinstance(values, np.ndarray) else list(values)
    return [_round(value) for value in found]


def _round(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.5g}") if np.isfinite(value) else None
