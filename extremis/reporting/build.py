"""`extremis report`: gathers the facts, draws the page, and publishes it.

The page is one HTML file that opens from a disk, without a network, and holds what it needs. Texts reach it in two
ways: through Jinja2, which escapes them, and as JSON that the script puts on the page as text. A content security
policy lets only the page's own script run, and nothing load.
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
from extremis.console import say_value
from extremis.inspecting.examples import splits_of
from extremis.reporting.charts import data_charts, drift_charts, metric_charts, table_charts, training_charts
from extremis.reporting.data_facts import describe
from extremis.reporting.queries import NEIGHBOURED, Sample, sample, weakest
from extremis.reporting.run_records import Run, differing, metric_tables, names_of, open_run, ordered_splits
from extremis.spinner import doing
from schemas import storage
from schemas.errors import InputError, MissingExtra
from schemas.layout import DataLayout
from schemas.manifest import is_published
from schemas.owners.place import require_file
from schemas.secrets import redact
from schemas.storage import join
from schemas.table import Table
from trainer.evaluation.breakdowns import DEPTH
from trainer.model import require_same_data

NAME = "report.html"  # of a run's own page
_TITLE, _HEAD = "· Extremis</title>".encode(), 4096  # the end of a page's title, and the bytes that have it
LARGEST = 5_000_000  # bytes of a page


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


TERMS = {
    "P@k": "precision: of the first k predictions, the share that is right, on average over the queries",
    "nDCG@k": "like precision, but a right prediction counts more the earlier it stands; 100 is the best order",
    "R@k": "recall: of a query's true labels, the share that is among the first k predictions",
    "PSP@k": "precision in which a rare label counts more than a frequent one, by the propensity constants of the data",
    "baseline": "a ranking without a model, on the first queries of the split: what a model should be above",
    "popular labels": "the most frequent labels of training, the same for every query",
    "linear ranker": "a vector a label over words and pairs of words",
    "nearest queries by TF-IDF": "labels of the training queries whose words are most like those of the query",
    "nearest label texts by TF-IDF": "labels whose own texts have words most like those of the query",
    "±": "half of the 95 % interval, by drawing queries again and again (bootstrap)",
    "seen": "queries whose text is that of a training point: a model can know their labels by heart",
    "unseen": "queries whose text no training point has",
    "found": "true labels among the first 5 predictions; of several queries with one text, all that were found",
    "scores": "what labels are ranked by: the classifier, or its score and others fused (extremis fuse)",
    "ECE %": "expected calibration error: how far probabilities of predicted labels are from the share that is right",
    "Brier": "mean squared distance of probabilities from 1 for what is right and 0 for what is wrong",
    "none of these %": "queries whose best label is less likely right than wrong",
    "fused": "the scores of vectors, labels' texts, training points and a linear ranker, added up by learned weights",
    "vectors": "scores of the vectors alone, as they were trained",
    "Trials": "short trainings on an excerpt of the data, by which extremis run auto chooses a recipe",
    "ended": "trained to half time: by then the trial had lost to the best one before it",
    "step": "batches trained until the checkpoint that was scored",
    "epoch": "one pass over all training points; the first is 0",
    "loss": "mean of what training lowers; comparable between runs of one loss alone",
    "split": "a part of the data: train is learned from, test and val are scored",
    "shards": "files that a table is divided into",
    "truncated": "points whose text was cut off at the greatest number of tokens",
    "merged": "rows of the input that were put together with another of the same key or text",
    "in train": "points with a text that train has too: metrics on them flatter",
    "K": "hard negatives that a table has for each query",
    "hard negative": "a wrong label that the model scores high, so that learning from it is worth most",
    "table": "hard negatives of every query, mined from the vectors of one epoch for a later one",
    "recall": "share of the true nearest labels that the index found, measured on a sample by exact search",
    "overlap": "share of the negatives that the table before had too",
    "above a positive": "share of queries whose hardest negative scores above their weakest true label",
    "padded rows": "queries with fewer than K negatives left after filters",
    "index": "how near labels were looked for; exact compares with every label",
}
_AT = re.compile(r"@\d+$")


def explain(name: str) -> Markup:
    """Return `name` as HTML, with its meaning where it is a term (P@5 is P@k)."""
    meaning = TERMS.get(_AT.sub("@k", name))
    if meaning is None:
        return escape(name)
    return Markup('<abbr tabindex="0" title="{}">{}</abbr>').format(meaning, name)


def render(facts: Mapping[str, Any], body: Mapping[str, Any]) -> bytes:
    """Render the page. `facts` fill the template; `body` (charts, queries, labels) is for the script.

    Raises InputError where the `report` extra is not installed, or the page would be larger than LARGEST.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from plotly.offline import get_plotlyjs

    except ImportError as error:
        raise MissingExtra(f"a report needs {error.name}", "report") from None
    script = _asset("page.js")
    # The script has four megabytes, one and a half compressed; current browsers unpack it by themselves.
    library = base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()
    environment = Environment(
        loader=PackageLoader("extremis.reporting", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"number": say_value, "redact": redact, "term": explain, "choice": explain_choice}
    html = environment.get_template("page.html").render(
        **facts,
        terms=TERMS,
        style=_asset("page.css"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        library=library,
        body=_inert(json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=False)),
    )
    data = html.encode("utf-8", "replace")
    if len(data) > LARGEST:
        raise InputError(
            f"the page would have {len(data):,} bytes, more than {LARGEST:,}. Ask for fewer --queries, or fewer runs."
        )
    return data


def _inert(text: str) -> str:
    """Escape JSON so that no string in it is HTML markup."""
    return text.translate({ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def _asset(name: str) -> str:
    return (importlib.resources.files("extremis.reporting") / name).read_text("utf-8")


def explain_choice(report: Mapping[str, Any]) -> str:
    """Say by which figures `auto` chose its recipe; `report`: what it recorded."""
    finished = sorted((t for t in report["trials"] if not t.get("ended")), key=lambda t: -float(t[METRIC]))
    chosen = next(t for t in finished if (t["recipe"], t["changes"]) == (report["chosen"], report["changes"]))
    text = f"auto chose {_name(chosen)}: {METRIC} {chosen[METRIC]:.2f} on queries held out of the trials"
    other = next((trial for trial in finished if trial is not chosen), None)
    if other is None:
        return f"{text}; no other trial went to its end."
    text += f"; the best of the others, {_name(other)}, had {other[METRIC]:.2f}"
    unclear = ", which is not clearly more: hard negatives, which no trial has, lift a dual encoder most"
    return f"{text}{unclear if other[METRIC] > chosen[METRIC] else ''}."


def _name(trial: Mapping[str, Any]) -> str:
    return " with ".join([trial["recipe"], *filter(None, [", ".join(trial["changes"])])])
