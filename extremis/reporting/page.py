"""The page of a report: `build` reads the records, draws charts of them, and renders the template."""

import base64
import functools
import gzip
import hashlib
import html
import importlib.resources
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, TypeAlias

import numpy as np
from markupsafe import Markup, escape

from extremis.auto import METRIC
from extremis.console import format_value, keep, show_activity
from extremis.reporting.labels import pack_labels
from extremis.reporting.records import (
    LABELS_WITH_NEIGHBOURS,
    SHOWN_METRICS,
    DataStatistics,
    Run,
    Sample,
    describe,
    evaluated_splits,
    histograms,
    list_weakest,
    metric_tables,
    names_of,
    open_run,
    ordered_splits,
    plain_values,
    recipe_differences,
    sample_queries,
    say_split,
)
from extremis.summary import splits_of
from schemas import storage
from schemas.errors import InputError, missing_extra, option, redact
from schemas.layout import DataLayout
from schemas.manifest import is_published
from schemas.owners import require_output_file
from schemas.storage import join
from schemas.table import Table
from trainer.evaluation.evaluate import HOLDOUT
from trainer.evaluation.metrics import DEPTH
from trainer.model import require_same_data

NAME = "report.html"  # name of a run's own page
_TITLE, _HEAD = "· Extremis</title>".encode(), 4096  # the end of a page's title, within the first _HEAD bytes
MAX_PAGE_BYTES = 5_000_000  # largest page in bytes


def build(
    urls: Sequence[str], out: str | None, say: Callable[[str], None], queries: int = 300, predict: bool = True
) -> dict[str, Any]:
    """Write the page about `urls`: an optional DATA, and runs on this DATA or an earlier version.

    `queries`: number of queries to show. `predict`: add predictions by each run's checkpoint. A page that cannot be
    written at `out` (default: in the first run) is in TMPDIR.
    Returns {"out", "bytes", "seconds", "runs"}. Raises InputError, also without the extra `report`,
    TableError, StorageError.
    """
    began = time.perf_counter()
    for name in ("jinja2", "plotly"):
        if find_spec(name) is None:
            raise missing_extra(f"a report needs {name}", "report")
    data, runs = _open(urls)
    own_page = join(runs[0].layout.root, NAME)
    asked, out = out is not None, out or own_page
    if not storage.is_within(out, own_page):
        is_page = storage.exists(out) and _TITLE in storage.read_range(out, 0, min(storage.size(out), _HEAD))
        reads = [*([] if data is None else [data.root]), *(run.layout.root for run in runs)]
        require_output_file(out, reads, "The file is not a report; choose another path.", is_page)
    show_activity("report: reading facts of the data")
    statistics, tables = None, list[dict[str, Any]]()
    sample = Sample([], {}, [], ["give DATA before the runs to see queries as text"])
    if data is not None:
        statistics, tables = describe(data), list_weakest(data, runs)
        say(f"reading {queries} queries of {data.root}")
        show_activity("report: predicting for the queries that are shown")
        splits = ordered_splits(splits_of(data))
        ends = list(dict.fromkeys([splits[0], splits[-1]])) if queries else []
        sample = sample_queries(data, runs, ends, queries, predict and queries > 0, tables)
    show_activity("report: drawing the page")
    packed, label_tables = pack_labels(runs)
    values = {
        "runs": runs,
        "data": statistics,
        "differences": recipe_differences({run.name: run.config for run in runs}),
        "metrics": metric_tables(runs),
        "weakest": tables,
        "labels": sample.labels,
        "label_tables": label_tables,
        "packed_labels": packed,
        "labels_with_neighbours": LABELS_WITH_NEIGHBOURS,
        "notes": sample.notes,
        "queries": len(sample.queries),
    }
    charts = {
        "data": data_charts(statistics) if statistics else [],
        "training": training_charts(runs),
        "tables": table_charts(runs),
        "metrics": metric_charts(runs),
    }
    searched = {"queries": sample.queries, "labels": sample.labels, "near": sample.near, "k": DEPTH}
    page = render(values, {"charts": charts, "runs": [run.name for run in runs], "tables": label_tables, **searched})
    if not keep(out, functools.partial(storage.write_bytes, out, page), asked):
        out = join(tempfile.mkdtemp(prefix="extremis-report-"), NAME)
        storage.write_bytes(out, page)
    seconds, places = round(time.perf_counter() - began, 2), {run.name: run.layout.root for run in runs}
    return {"out": out, "bytes": len(page), "seconds": seconds, "runs": places}


def _open(urls: Sequence[str]) -> tuple[DataLayout | None, list[Run]]:
    first = urls[0]
    data = DataLayout(first) if is_published(first) and Table.open(first).kind == "data" else None
    places = list(urls[1:] if data is not None else urls)
    if not places:
        raise InputError(
            f"{first}: a report needs a run, but this is a DATA. Name the runs: extremis report DATA RUN [RUN…]."
        )
    if len(set(places)) < len(places):
        raise InputError(f"a run is named twice: {' '.join(places)}.")
    manifest = None if data is None else Table.open(data.root, "data").manifest
    runs = [open_run(url, name, manifest) for url, name in zip(places, names_of(places), strict=True)]
    for run in runs:
        if data is not None and manifest is not None:
            require_same_data(run.config, manifest, data.root, run.layout.root, earlier=True)
    return data, runs


Chart: TypeAlias = dict[str, Any]
Trace: TypeAlias = dict[str, Any]
Series: TypeAlias = tuple[str, Iterable[Any], Iterable[Any], dict[str, Any]]  # label, x, y, and more of a trace

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


def data_charts(statistics: DataStatistics) -> list[Chart]:
    """Draw the tail of the labels, and histograms of labels and tokens per point."""
    traces = [line("training points", 0, statistics.tail.rank, statistics.tail.points)]
    title, x, y = "Training points per label, by rank", "rank of the label", "training points"
    note = "both axes are logarithmic; labels without a training point are left out"
    tail = draw_chart("tail", title, traces, x, y, note)
    for axis in ("xaxis", "yaxis"):
        tail["figure"]["layout"][axis] |= {"type": "log", "dtick": 1, "exponentformat": "power"}
    charts = [tail]
    for name in ("labels", "tokens"):  # shares of rows, in equal bins, so that splits of different sizes are comparable
        values, rows = histograms([getattr(split, name) for split in statistics.splits])
        shares = 100 * rows / np.maximum(1, rows.sum(axis=1, keepdims=True)) / np.diff(values[:2]).max(initial=1)
        named = enumerate(zip(statistics.splits, shares, strict=True))
        traces = [line(split.name, number, values, share) for number, (split, share) in named if share.any()]
        title = f"{name.capitalize()} per point"
        charts.append(draw_chart(name, title, traces, title.lower(), "% of points, per value"))
    return _simplify_charts(charts)


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
    for number, run in enumerate(runs):
        rows = run.records.get("epoch", [])
        parts = {key for row in rows for key in row if key.startswith("seconds_")} - {"seconds_background"}
        epochs = [row["epoch"] for row in rows]
        traces = [
            _trace("bar", part.removeprefix("seconds_"), color, x=epochs, y=[row.get(part, 0.0) for row in rows])
            for color, part in enumerate(sorted(parts))
        ]
        title = f"Time by activity: {run.name}" if len(runs) > 1 else "Time by activity"
        charts.append(draw_chart(f"time-{number}", title, traces, "epoch", "seconds", barmode="stack"))
    return _simplify_charts(charts)


def _validation_note(runs: Sequence[Run]) -> str:
    splits = {run.config["recipe"]["validation"]["split"] or HOLDOUT for run in runs if "validation" in run.records}
    return f"ranked by the vectors, without a fusion, on the first queries of {' or '.join(sorted(splits))}"


def _curves(
    name: str, title: str, runs: Sequence[Run], kind: str, fields: dict[str, str], over: str, unit: str
) -> Chart:
    """Draw recorded `fields` (legend name: field) over steps or epochs."""

    def curves(run: Run) -> Iterator[Series]:
        return ((label, *run.curve(kind, field, over), {}) for field, label in fields.items())

    return draw_chart(name, title, _lines(runs, curves, points=over == "epoch"), over, unit)


def _against_time(name: str, runs: Sequence[Run]) -> Chart:
    """Draw a validation metric against the seconds of training (ASTRA, figure 1; NGAME, figure 2)."""

    def curves(run: Run) -> Iterator[Series]:
        seconds = {row["epoch"]: row.get("seconds", 0.0) for row in run.records.get("epoch", [])}
        rows = {row["epoch"]: row[name] for row in run.records.get("validation", []) if name in row}
        epochs = sorted(rows.keys() & seconds.keys())
        ends = [sum(length for epoch, length in seconds.items() if epoch <= last) for last in epochs]
        yield "", ends, [rows[epoch] for epoch in epochs], {}

    note = f"{_validation_note(runs)}; seconds of epochs, which a miner on the same cores makes slower"
    title = f"Validation {name} of classifier scores against time"
    identity = f"time-to-{name.replace('@', '-')}"
    return draw_chart(identity, title, _lines(runs, curves), "seconds of training", "%", note)


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
            name, x, traces = f"{number}-{source}", "made for epoch", list[Trace]()
            fields = {"positive_score_quantiles": "positives", "score_quantiles": "hard negatives"}
            for color, (field, label) in enumerate(fields.items()):
                qualities = {mined.epoch: mined.table.manifest.quality for mined in tables}
                rows = {epoch: quality[field] for epoch, quality in qualities.items() if quality.get(field)}
                box = {part: [row[quantile] for row in rows.values()] for part, quantile in _BOX.items()}
                traces.append({**_trace("box", label, color, x=rows.keys(), **box), "whiskerwidth": 0.5})
            note = "box: 10 to 90 %, line: median, whiskers: 1 to 99 %"
            charts.append(draw_chart(f"scores-{name}", f"Scores{suffix}", traces, x, "score", note))
            traces, title, y = [], f"Candidates kept and dropped{suffix}", "candidates per row"
            for color, (field, label) in enumerate(CANDIDATE_OUTCOMES.items()):
                counts = [mined.table.manifest.counters.get(field, 0) / max(1, mined.table.rows) for mined in tables]
                if any(counts):
                    traces.append(_trace("bar", label, color, x=[mined.epoch for mined in tables], y=counts))
            charts.append(draw_chart(f"funnel-{name}", title, traces, x, y, barmode="stack"))
    return _simplify_charts(charts)


def _quality(name: str, title: str, runs: Sequence[Run], field: str) -> Chart:
    def curves(run: Run) -> Iterator[Series]:
        for source in _sources_of(run):
            qualities = {mined.epoch: mined.table.manifest.quality for mined in run.tables if mined.source == source}
            values = {epoch: 100 * of[field] for epoch, of in qualities.items() if of.get(field) is not None}
            yield source, values.keys(), values.values(), {}

    return draw_chart(name, title, _lines(runs, curves), "made for epoch", "%")


def _ages(runs: Sequence[Run]) -> Chart:
    """Draw the number of epochs between a table's dump and its use; the line jumps if a table is late."""

    def curves(run: Run) -> Iterator[Series]:
        rows = [row for row in run.records.get("epoch", []) if row.get("table_age") is not None]
        texts = [f"table of epoch {row['table_epoch']}{', late' if row.get('late') else ''}" for row in rows]
        epochs, ages = ([row[name] for row in rows] for name in ("epoch", "table_age"))
        yield "", epochs, ages, {"text": texts, "hovertemplate": "%{y}<br>%{text}"}

    return draw_chart("age", "Age of the table in use", _lines(runs, curves), "epoch", "epochs")


def metric_charts(runs: Sequence[Run]) -> list[Chart]:
    """Draw for every evaluated split: reliability of probabilities, metrics per part of the data, and per version."""
    charts, drift = list[Chart](), list[Chart]()
    for split in evaluated_splits(runs):
        charts.append(_reliability(runs, split))
        note = "parts from the oldest to the newest"
        traces = _by_part(runs, split, "parts", "queries", _OF_QUERIES)
        drift.append(draw_chart(f"parts-{split}", f"Metrics on {say_split(split)} by part", traces, "part", "%", note))
        note += "; a run that is older than a part does not know the labels of that part"
        traces = _by_part(runs, split, "labels_by_part", "positives", ("R@5",))
        traces = [trace | {"name": trace["name"].replace("R@5", "found")} for trace in traces]  # of all positives
        title = f"True labels among the first 5 predictions on {say_split(split)}, by the part that added the label"
        drift.append(draw_chart(f"label-parts-{split}", title, traces, "part", "%", note))
        evaluations = [run.evaluations[split] for run in runs if split in run.evaluations]
        ordered = sorted({body["version"]["number"]: body for body in evaluations}.items())
        places = [f"{number}: {body['version']['part']}" for number, body in ordered]
        names = [name for name in _OF_QUERIES if any(name in body["metrics"] for _, body in ordered)]
        traces = [
            line(name, number, places, [body["metrics"].get(name) for _, body in ordered], points=True)
            for number, name in enumerate(names if len(ordered) > 1 else [])
        ]
        note, title = "each run is shown at the version on which it was evaluated", f"Metrics on {say_split(split)}"
        drift.append(draw_chart(f"versions-{split}", f"{title} over versions", traces, "version", "%", note))
    for chart in drift:  # names of parts may look like numbers or dates
        chart["figure"]["layout"]["xaxis"]["type"] = "category"
    return _simplify_charts([*charts, *drift])


def _reliability(runs: Sequence[Run], split: str) -> Chart:
    """Draw the share of correct predictions over their mean probability, for each bin of probabilities."""

    def curves(run: Run) -> Iterator[Series]:
        bins = run.evaluations.get(split, {}).get("calibration", {}).get("bins")
        if bins:
            texts = [f"{count:,} predictions" for count in bins["predictions"]]
            x, y = ([100 * value for value in bins[name]] for name in ("probability", "correct"))
            yield "", x, y, {"text": texts, "hovertemplate": "%{y:.1f} % correct at %{x:.1f} %<br>%{text}"}

    traces = _lines(runs, curves)
    if traces:
        traces.append(line("equal", 7, [0, 100], [0, 100], dash=1))
    note = "bins of probabilities; on the dotted line, they are as often correct as they say"
    title = f"Reliability of probabilities on {say_split(split)}"
    return draw_chart(f"reliability-{split}", title, traces, "probability, %", "% correct", note)


def _lines(runs: Sequence[Run], series: Callable[[Run], Iterable[Series]], points: bool = True) -> list[Trace]:
    """Make a line for each of a run's `series`, in the run's colour; if there are several runs, labels name the run."""
    return [
        line(label if label and len(runs) == 1 else f"{run.name} {label}".rstrip(), number, x, y, dash, points) | more
        for number, run in enumerate(runs)
        for dash, (label, x, y, more) in enumerate(series(run))
    ]


def line(name: str, color: int, x: Iterable[Any], y: Iterable[Any], dash: int = 0, points: bool = False) -> Trace:
    """Make a line; with `points`, with a marker at each point."""
    style = {"width": 2, "dash": _DASHES[dash % len(_DASHES)]}
    mode = "lines+markers" if points else "lines"
    return {**_trace("scatter", name, color, x=x, y=y), "mode": mode, "line": style, "marker": {"size": 6}}


def _trace(kind: str, name: str, color: int, **values: Iterable[Any]) -> Trace:
    # Plotly interprets some markup in names.
    name = html.escape(name, quote=False)
    return {"type": kind, "name": name, "meta": color, **{part: plain_values(row) for part, row in values.items()}}


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


def _simplify_charts(charts: list[Chart]) -> list[Chart]:
    """Omit empty charts, and turn charts with one dot per line into sentences."""
    simple = []
    for chart in charts:
        traces, layout = chart["figure"]["data"], chart["figure"]["layout"]
        if any(trace["type"] != "scatter" or len(trace["x"]) > 1 for trace in traces):
            simple.append(chart)
        elif traces:
            over, unit = layout["xaxis"]["title"]["text"], layout["yaxis"]["title"]["text"]
            dots = []
            for trace in traces:
                name = f"{html.unescape(trace['name'])}: " if len(traces) > 1 else ""
                value, place = (format_value(*trace[axis]) or "none" for axis in "yx")
                dots.append(f"{name}{f'{value} %' if unit == '%' else f'{unit} {value}'} ({over} {place})")
            simple.append({"id": chart["id"], "title": chart["title"], "said": "; ".join(dots)})
    return simple


def _sources_of(run: Run) -> list[str]:
    return sorted({table.source for table in run.tables}, key=lambda name: (name != "queries", name))


_OF_QUERIES = ("P@1", "P@5", "PSP@5")


def _by_part(runs: Sequence[Run], split: str, section: str, counted: str, names: Sequence[str]) -> list[Trace]:
    """Draw metrics over parts, from a section of the evaluations on `split`, one colour per run."""

    def curves(run: Run) -> Iterator[Series]:
        parts = run.evaluations.get(split, {}).get(section, {})
        texts = [f"{values[counted]:,} {counted}" for values in parts.values()]
        for name in names:
            if any(name in values for values in parts.values()):
                hover = {"text": texts, "hovertemplate": "%{y}, %{text}"}
                yield name, parts, [values.get(name) for values in parts.values()], hover

    return _lines(runs, curves)


TERMS = {
    "P@k": "precision: the fraction of correct labels among the first k predictions, averaged over the queries",
    "nDCG@k": "like precision, but a correct label counts more at an earlier rank; 100 is the best order",
    "R@k": "recall: the fraction of a query's true labels that are among the first k predictions",
    "PSP@k": "precision with more weight on rare labels, according to the propensity constants of the data",
    "baseline": "a ranking without a trained model, on the same queries; a model should do better",
    "popular labels": "the most frequent labels in the training data, the same for every query",
    "linear ranker": "one weight vector per label, over words and pairs of words",
    "nearest queries by TF-IDF": "labels of the training queries that have the most similar words",
    "nearest label texts by TF-IDF": "labels with the texts that have the most similar words",
    "±": "half of the 95 % interval, from resampled texts (bootstrap)",
    "decision": "how many labels of a ranking are given: the best ones, or those with a probability",
    "all pairs (micro)": "all queries and labels counted together: frequent labels weigh most",
    "labels (macro)": "mean over labels with a positive or a prediction: rare labels weigh as much as frequent ones",
    "seen": "queries whose text is also in train: a model may have memorized their labels",
    "unseen": "queries whose text is not in train",
    "found": "true labels among the first 5 predictions; queries with the same text are counted together",
    "scores": "the score that ranks labels: the classifier's score, or a fusion of several scores (extremis fuse)",
    "ECE %": "expected calibration error: how far predicted probabilities are from the fraction of correct labels",
    "Brier": "mean squared difference between a label's probability and 1 if the label is correct, 0 if not",
    "none of these %": "queries whose best label has a probability below one half",
    "fused": "a fusion of several scores: boosted trees or, where trees are not better, a weighted sum",
    "trees": "boosted trees over the scores and ranks of the weighted sum's parts, nearest texts and labels' names",
    "weights": "weighted sum of the scores of vectors, label texts, training points and a linear ranker",
    "vectors": "scores of the trained vectors alone",
    "Trials": "short training runs on an excerpt of the data, from which extremis run auto chooses a recipe",
    "ended": "the trial was stopped at half time, because it was behind the best earlier trial",
    "step": "number of batches trained before the scored checkpoint",
    "epoch": "one pass over all training points; the first epoch is 0",
    "loss": "mean training loss; comparable only between runs with the same loss",
    "split": "a part of the data: a model learns from train, and is scored on test and val",
    "shards": "files that make up a table",
    "truncated": "points whose text was truncated to the maximum number of tokens",
    "merged": "input rows that were merged into another row with the same key or text",
    "in train": "points with a text that is also in train; Metrics shows these seen queries apart",
    "K": "number of hard negatives per query in a table",
    "hard negative": "an incorrect label with a high score; a model learns most from hard negatives",
    "table": "hard negatives for every query, mined with the vectors of one epoch for a later epoch",
    "recall": "fraction that was found: of the positives or, by an index, of the nearest labels of a sample of queries",
    "overlap": "fraction of the negatives that were also in the previous table",
    "above a positive": "fraction of queries with a hard negative that scores above a true label",
    "padded rows": "queries with fewer than K negatives left after filtering",
    "index": "how the nearest labels were searched; exact compares each query with every label",
}


def explain(name: str) -> Markup:
    """Return `name` as HTML, with an explanation if `name` is in TERMS (P@5 is explained as P@k)."""
    meaning = TERMS.get(re.sub(r"@\d+$", "@k", name))
    return Markup('<abbr tabindex="0" title="{}">{}</abbr>').format(meaning, name) if meaning else escape(name)


def render(variables: Mapping[str, Any], body: Mapping[str, Any]) -> bytes:
    """Render the page. The template uses `variables`; the script uses `body` (charts, queries, labels).

    Raises InputError if the page would be larger than MAX_PAGE_BYTES.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs

    folder = importlib.resources.files("extremis.reporting")
    script = (folder / "page.js").read_text("utf-8")
    # The script takes 4 MB, or 1.5 MB compressed; current browsers decompress it.
    library = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    environment = Environment(
        loader=PackageLoader("extremis.reporting", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"number": format_value, "redact": redact, "term": explain, "choice": explain_choice}
    html = environment.get_template("page.html").render(
        **variables,
        terms=TERMS,
        style=(folder / "page.css").read_text("utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        library=library,
        body=_inert(json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=False)),
    )
    data = html.encode("utf-8", "replace")
    if len(data) > MAX_PAGE_BYTES:
        raise InputError(
            f"the page would have {len(data):,} bytes, more than {MAX_PAGE_BYTES:,}. Give fewer {option('queries')}, "
            "or fewer runs."
        )
    return data


def _inert(text: str) -> str:
    """Escape JSON so that its strings contain no HTML markup."""
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def explain_choice(report: Mapping[str, Any]) -> str:
    """Describe the metrics that `auto` based its choice of a recipe on; `report`: the record of `auto`."""
    finished = sorted((t for t in report["trials"] if not t.get("ended")), key=lambda t: -float(t[METRIC]))
    first, *seconds = report["finalists"]
    chosen = next(t for t in finished if (t["recipe"], t["changes"]) == (first["recipe"], first["changes"]))
    text = f"auto chose {_name(chosen)}: {METRIC} {chosen[METRIC]:.2f} on queries that were held out of the trials"
    other = next((trial for trial in finished if trial is not chosen), None)
    text += f"; the second best, {_name(other)}, had {other[METRIC]:.2f}" if other else "; no other trial was finished"
    if other and other[METRIC] > chosen[METRIC]:
        text += (
            ". The difference is within the noise, and hard negatives, which trials lack, improve a dual encoder most"
        )
    for second in seconds:
        wins = (second["recipe"], second["changes"]) == (report["chosen"], report["changes"])
        verdict = "the final run" if wins else "not better by enough"
        text += f". At full length, {_name(second)} had {report['compared']}: {verdict}"
    return f"{text}."


def _name(trial: Mapping[str, Any]) -> str:
    return " with ".join([trial["recipe"], *filter(None, [", ".join(trial["changes"])])])
