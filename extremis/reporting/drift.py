"""Charts of data that grows: metrics over the parts of a version, by the age of labels, and over versions."""

from collections.abc import Sequence
from typing import Any

from extremis.reporting.charts import Chart, Trace, draw_chart, line
from extremis.reporting.run_records import Run, ordered_splits

_OF_QUERIES = ("P@1", "P@5", "PSP@5")
_OF_LABELS = ("R@5", "R@10")


def drift_charts(runs: Sequence[Run]) -> list[Chart]:
    """Draw metrics of queries by their part, of positives by their label's part, and of versions, for every split."""
    charts = []
    for split in ordered_splits({split for run in runs for split in run.evaluations}):
        bodies = {number: run.evaluations[split] for number, run in enumerate(runs) if split in run.evaluations}
        note = "parts from the oldest to the newest"
        traces = _by_part(runs, bodies, "parts", "queries", _OF_QUERIES)
        charts.append(draw_chart(f"parts-{split}", f"Metrics on {split} by part", traces, "part", "%", note))
        note += "; a run that was made before a part knows none of its labels"
        traces = _by_part(runs, bodies, "labels_by_part", "positives", _OF_LABELS)
        title = f"True labels of {split} found, by the part that brought them"
        charts.append(draw_chart(f"label-parts-{split}", title, traces, "part", "%", note))
        traces = _by_version([body for body in bodies.values() if "version" in body])
        note = "each run on the version that it was evaluated on"
        title = f"Metrics on {split} over versions"
        charts.append(draw_chart(f"versions-{split}", title, traces, "version", "%", note))
    for chart in charts:  # names of parts may look like numbers or dates
        chart["figure"]["layout"]["xaxis"]["type"] = "category"
    return [chart for chart in charts if chart["figure"]["data"]]


def _by_part(
    runs: Sequence[Run], bodies: dict[int, dict[str, Any]], section: str, counted: str, names: Sequence[str]
) -> list[Trace]:
    """Draw lines over the parts of a section of evaluations, by the number of their run: a colour each."""
    traces = []
    for number, body in bodies.items():
        parts = body.get(section, {})
        texts = [f"{values[counted]:,} {counted}" for values in parts.values()]
        for dash, name in enumerate(name for name in names if any(name in values for values in parts.values())):
            values = [values.get(name) for values in parts.values()]
            trace = line(f"{runs[number].name} {name}", number, parts, values, dash, points=True)
            traces.append({**trace, "text": texts, "hovertemplate": "%{y}, %{text}"})
    return traces


def _by_version(bodies: Sequence[dict[str, Any]]) -> list[Trace]:
    """Draw a line a metric over versions, where there are several."""
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
