"""`extremis report`: collects data about runs, renders the page, and publishes it.

The page is one HTML file without external resources, so that it works from a disk without a network. Jinja2 escapes the
texts in the template. The script adds other texts, from JSON, as plain text. A content security policy allows only the
page's own script, and blocks all loads.
"""

import base64
import gzip
import hashlib
import importlib.resources
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from extremis.auto.trials import METRIC
from extremis.console import format_value
from extremis.inspecting.examples import splits_of
from extremis.reporting.charts import data_charts, drift_charts, metric_charts, table_charts, training_charts
from extremis.reporting.data_statistics import describe
from extremis.reporting.queries import LABELS_WITH_NEIGHBOURS, Sample, list_weakest, sample_queries
from extremis.reporting.run_records import Run, metric_tables, names_of, open_run, ordered_splits, recipe_differences
from extremis.spinner import show_activity
from schemas import storage
from schemas.errors import InputError, MissingExtra
from schemas.layout import DataLayout
from schemas.manifest import is_published
from schemas.owners.outputs import require_output_file
from schemas.secrets import redact
from schemas.storage import join
from schemas.table import Table
from trainer.evaluation.breakdowns import DEPTH
from trainer.model import require_same_data

NAME = "report.html"  # name of a run's own page
_TITLE, _HEAD = "· Extremis</title>".encode(), 4096  # the end of a page's title, within the first _HEAD bytes
MAX_PAGE_BYTES = 5_000_000  # largest page in bytes


def build(
    urls: Sequence[str], out: str | None, say: Callable[[str], None], queries: int = 300, predict: bool = True
) -> dict[str, Any]:
    """Write the page about `urls`: an optional DATA, and runs on this DATA or an earlier version.

    `queries`: number of queries to show. `predict`: add predictions by each run's checkpoint.
    Returns {"out", "bytes", "seconds", "runs"}. Raises InputError, TableError, StorageError.
    """
    began = time.perf_counter()
    data, runs = _open(urls)
    default_out = join(runs[0].layout.root, NAME)
    out = out or default_out
    _require_page(out, default_out, [*([] if data is None else [data.root]), *(run.layout.root for run in runs)])
    show_activity("report: reading facts of the data")
    statistics = None if data is None else describe(data)
    tables = [] if data is None else list_weakest(data, runs)
    sample = Sample([], {}, [], ["give DATA before the runs to see queries as text"])
    if data is not None:
        say(f"reading {queries} queries of {data.root}")
        show_activity("report: predicting for the queries that are shown")
        splits = ordered_splits(splits_of(data))
        ends = list(dict.fromkeys([splits[0], splits[-1]])) if queries else []
        sample = sample_queries(data, runs, ends, queries, predict and queries > 0, tables)
    show_activity("report: drawing the page")
    values = {
        "runs": runs,
        "data": statistics,
        "differences": recipe_differences({run.name: run.config for run in runs}),
        "metrics": metric_tables(runs),
        "weakest": tables,
        "labels": sample.labels,
        "labels_with_neighbours": LABELS_WITH_NEIGHBOURS,
        "notes": sample.notes,
        "queries": len(sample.queries),
    }
    charts = {
        "data": data_charts(statistics) if statistics else [],
        "training": training_charts(runs),
        "tables": table_charts(runs),
        "metrics": [*metric_charts(runs), *drift_charts(runs)],
    }
    searched = {"queries": sample.queries, "labels": sample.labels, "near": sample.near, "k": DEPTH}
    page = render(values, {"charts": charts, "runs": [run.name for run in runs], **searched})
    storage.write_bytes(out, page)
    seconds = round(time.perf_counter() - began, 2)
    return {"out": out, "bytes": len(page), "seconds": seconds, "runs": {run.name: run.layout.root for run in runs}}


def _require_page(out: str, default_out: str, reads: Sequence[str]) -> None:
    """Refuse to overwrite a file that is not a report page. Raises InputError, StorageError."""
    if not storage.is_within(out, default_out):
        is_page = storage.exists(out) and _TITLE in storage.read_range(out, 0, min(storage.size(out), _HEAD))
        require_output_file(out, reads, "The file is not a report; choose another path.", is_page)


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
    "±": "half of the 95 % interval, from resampled queries (bootstrap)",
    "seen": "queries whose text is also in train: a model may have memorized their labels",
    "unseen": "queries whose text is not in train",
    "found": "true labels among the first 5 predictions; queries with the same text are counted together",
    "scores": "the score that ranks labels: the classifier's score, or a fusion of several scores (extremis fuse)",
    "ECE %": "expected calibration error: how far predicted probabilities are from the fraction of correct labels",
    "Brier": "mean squared difference between a label's probability and 1 if the label is correct, 0 if not",
    "none of these %": "queries whose best label has a probability below one half",
    "fused": "weighted sum of the scores of vectors, label texts, training points and a linear ranker",
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
    "recall": "fraction of the true nearest labels that the index found, compared with exact search on a sample",
    "overlap": "fraction of the negatives that were also in the previous table",
    "above a positive": "fraction of queries with a hard negative that scores above a true label",
    "padded rows": "queries with fewer than K negatives left after filtering",
    "index": "how the nearest labels were searched; exact compares each query with every label",
}
_AT = re.compile(r"@\d+$")


def explain(name: str) -> Markup:
    """Return `name` as HTML, with an explanation if `name` is in TERMS (P@5 is explained as P@k)."""
    meaning = TERMS.get(_AT.sub("@k", name))
    if meaning is None:
        return escape(name)
    return Markup('<abbr tabindex="0" title="{}">{}</abbr>').format(meaning, name)


def render(variables: Mapping[str, Any], body: Mapping[str, Any]) -> bytes:
    """Render the page. The template uses `variables`; the script uses `body` (charts, queries, labels).

    Raises InputError if the `report` extra is not installed, or if the page would be larger than MAX_PAGE_BYTES.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs

    except ImportError as error:
        raise MissingExtra(f"a report needs {error.name}", "report") from None
    script = _asset("page.js")
    # The script takes 4 MB, or 1.5 MB compressed; current browsers decompress it.
    library = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    environment = Environment(
        loader=PackageLoader("extremis.reporting", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"number": format_value, "redact": redact, "term": explain, "choice": explain_choice}
    html = environment.get_template("page.html").render(
        **variables,
        terms=TERMS,
        style=_asset("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        library=library,
        body=_inert(json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=False)),
    )
    data = html.encode("utf-8", "replace")
    if len(data) > MAX_PAGE_BYTES:
        raise InputError(
            f"the page would have {len(data):,} bytes, more than {MAX_PAGE_BYTES:,}. Give fewer --queries, or fewer "
            "runs."
        )
    return data


def _inert(text: str) -> str:
    """Escape JSON so that its strings contain no HTML markup."""
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def _asset(name: str) -> str:
    return (importlib.resources.files("extremis.reporting") / name).read_text("utf-8")


def explain_choice(report: Mapping[str, Any]) -> str:
    """Describe the metrics that `auto` based its choice of a recipe on; `report`: the record of `auto`."""
    finished = sorted((t for t in report["trials"] if not t.get("ended")), key=lambda t: -float(t[METRIC]))
    chosen = next(t for t in finished if (t["recipe"], t["changes"]) == (report["chosen"], report["changes"]))
    text = f"auto chose {_name(chosen)}: {METRIC} {chosen[METRIC]:.2f} on queries that were held out of the trials"
    other = next((trial for trial in finished if trial is not chosen), None)
    if other is None:
        return f"{text}; no other trial was finished."
    text += f"; the second best, {_name(other)}, had {other[METRIC]:.2f}"
    unclear = ". The difference is within the noise, and hard negatives, which trials lack, improve a dual encoder most"
    return f"{text}{unclear if other[METRIC] > chosen[METRIC] else ''}."


def _name(trial: Mapping[str, Any]) -> str:
    return " with ".join([trial["recipe"], *filter(None, [", ".join(trial["changes"])])])
