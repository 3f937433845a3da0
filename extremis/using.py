"""Functions on a trained run: evaluate, report, inspect, ablate, fuse, export, predict, serve, tuples, embed, ….

Heavy modules are imported when a function is called, so that help and a typo are quick.
"""

import contextlib
import dataclasses
import functools
import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from extremis.console import Bar, current_output, format_metric, print_file, say, show_activity
from extremis.function import (
    BeamOptions,
    Embedder,
    Exact,
    Names,
    NotNegative,
    Place,
    PlaceOrData,
    Positive,
    Progress,
    Recipe,
    Scores,
    Settings,
    Size,
    StartTimeout,
    Threads,
    Url,
    function,
)
from extremis.result import Grid, Result
from pipelines.options import EmbedOptions, EmbedTextsOptions, Text
from schemas.errors import InputError, missing_extra, option
from schemas.options import AnyDevice, Encoding, Fields, Shown, whole_number
from scoring.options import DecisionOptions, EvaluateOptions, ExportOptions, FitOptions, TupleOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from extremis.fields import (
        DecisionFields,
        EmbedTextsFields,
        EvaluateFields,
        ExportFields,
        FitFields,
        TupleFields,
    )
    from scoring.predict import Model


@dataclass(frozen=True, repr=False, kw_only=True)
class EvaluateResult(Result):
    """Metrics in percent by name, as in P@1, with 95 % intervals; the weakest rows are in `more`."""

    data: str
    run: str
    split: str
    step: int
    scores: str
    version: Mapping[str, object]
    queries: int
    without_active_labels: int
    filter_pairs: int
    metrics: Mapping[str, float]
    intervals: Mapping[str, Sequence[float]]
    averages: Mapping[str, Mapping[str, float]]
    at_decision: Mapping[str, object]
    labels: Mapping[str, object]
    labels_by_frequency: Mapping[str, Mapping[str, float]] | None = None
    parts: Mapping[str, Mapping[str, float]] | None = None
    labels_by_part: Mapping[str, Mapping[str, float]] | None = None
    seen: Mapping[str, object] | None = None
    unseen: Mapping[str, object] | None = None
    baselines: Mapping[str, Mapping[str, float]] | None = None
    gains: Mapping[str, Mapping[str, Sequence[float]]] | None = None
    zero_shot: Mapping[str, object] | None = None
    calibration: Mapping[str, object] | None = None


@function
def evaluate(
    data: Place,
    run: Place,
    options: EvaluateOptions | None = None,
    *,
    progress: Progress = True,
    **fields: "Unpack[EvaluateFields]",
) -> EvaluateResult:
    """Score a checkpoint of RUN on a split of DATA: P, nDCG, R, F1, PSP and PSnDCG at 1, 3, 5, 10.

    If RUN was trained on an earlier version of DATA, RUN predicts only labels of that version, also with a fusion, and
    newer labels count as missed.

    Examples:
      extremis evaluate data/ runs/1 --split test --json
      extremis evaluate data/ runs/1 --k 20,100 --zero-shot
      extremis evaluate data/ runs/1 --baseline
      extremis evaluate data/ runs/1 --min-probability 0.5 --labels labels.csv
      extremis evaluate data/ runs/1 --step newest --scores classifier
      torchrun --nproc-per-node 2 -m extremis evaluate data/ runs/1
    """
    from extremis import evaluation
    from extremis.supervisor import joined_ranks

    data, run = fspath(data), fspath(run)
    options = options or EvaluateOptions()
    with joined_ranks() as group:
        report = evaluation.evaluate(data, run, options, group)
    asked = {"baselines": options.baseline, "gains": options.baseline}
    is_calibrated = options.calibrate or report["at_decision"]["limit"] is not None
    asked |= {"calibration": is_calibrated, "zero_shot": options.zero_shot}
    described = {name: value for name, value in report.items() if asked.get(name, True)}  # else of an earlier call
    if group.first:
        for line in evaluation.remarks(described, options.split):
            say(line)
        kept = f"saved in {options.out or 'the run'}; " if report["record"] else ""
        say(f"{run}, step {report['step']:,}, scores {report['scores']}: {kept}next: extremis report {data} {run}")
    shown = [*evaluation.view(described, options.split)]
    return EvaluateResult.of(report, shown, data=data, run=run, split=options.split)


@dataclass(frozen=True, repr=False, kw_only=True)
class ReportResult(Result):
    """The page at `out`, its size, and the runs on it by title."""

    out: str
    bytes: int
    seconds: float
    runs: Mapping[str, str]


@function
def report(
    *urls: Annotated[Place, Shown("[DATA] RUN [RUN...]")],
    out: Url | None = None,
    queries: Annotated[int, Field(ge=0, le=1000)] = 300,
    predictions: bool = True,
    progress: Progress = True,
) -> ReportResult:
    """Write one HTML page about runs, with a search. The page works from a disk, without a network.

    The page shows data, training, tables of negatives, metrics (from `extremis evaluate`), and queries with positives,
    predictions and hard negatives as text. It compares several runs on the same DATA, or on earlier versions of DATA.
    Without DATA, the page does not contain queries.

    Options:
        out: URL of the page. Default: report.html in the first RUN or, without permission to write there, in TMPDIR.
        queries: Number of queries to show.
        predictions: Load each run's checkpoint, and show predictions.

    Examples:
      extremis report data/ runs/1
      extremis report data/ runs/1 runs/2 --out compared.html
    """
    from extremis.reporting.page import build

    body = build([fspath(url) for url in urls], None if out is None else fspath(out), say, queries, predictions)
    say(f"{body['out']}: {body['bytes']:,} bytes in {body['seconds']} s; open it in a browser")
    return ReportResult(**body)


@dataclass(frozen=True, repr=False, kw_only=True)
class InspectResult(Result):
    """What is at `url`; its tables, parameters and other facts are in `more`."""

    url: str
    kind: str | None = None
    digest: str | None = None
    queries: Sequence[Mapping[str, object]] | None = None


@function
def inspect(
    url: Place,
    *,
    verify: bool = False,
    rows: NotNegative = 3,
    key: str | None = None,
    run: Annotated[Place, Shown("RUN")] | None = None,
    split: str | None = None,
    progress: Progress = True,
) -> InspectResult:
    """Describe the table, DATA or RUN at URL: kinds, rows, shards, parents, sizes, checks, and some rows as text.

    With --key or --run, URL must be DATA.

    Options:
        verify: Read every byte and compare checksums.
        rows: Number of sample rows to print.
        key: Show only the query with this key, and the texts of its labels.
        run: Show the hard negatives of this run's newest table.
        split: Split of the queries. Default: train for samples, all splits for a key.

    Examples:
      extremis inspect data/
      extremis inspect runs/1 --verify
      extremis inspect runs/1/negatives/epoch-0005/queries
      extremis inspect data/ --run runs/1 --key N00012
    """
    from extremis.inspecting import inspect_url

    place, run_url = fspath(url), None if run is None else fspath(run)
    body, shown = inspect_url(place, verify=verify, rows=rows, key=key, split=split, run=run_url)
    return InspectResult.of(body, shown, url=place)


@dataclass(frozen=True, repr=False, kw_only=True)
class AblateResult(Result):
    """The result of each recipe by name, in `more`."""


@function
def ablate(
    data: Place,
    out: Place,
    *,
    recipes: Names = (),
    set: Settings = (),
    split: str = "test",
    retry: bool = False,
    progress: Progress = True,
) -> AblateResult:
    """Train several recipes on DATA, compare the results, and write runs and comparison to OUT.

    Finished runs are skipped, and interrupted runs continue. The comparison is in ablation.json, ablation.md and, with
    the extra report, ablation.html, which also shows metrics against time for recipes with a validation split. In a
    checkout of Extremis, papers/ contains recipes from papers and checks of the papers' claims.

    Options:
        recipes: Recipes to compare: names, TOML files, or folders of TOML files. Default: random,astra.
        split: Split to score.
        retry: Also retry failed runs.

    Examples:
      extremis ablate data/ runs/ablation --recipes random,astra,renee --set train.epochs=20
      extremis ablate data/ runs/timed --set train.minutes=10 --set train.epochs=40
      extremis ablate data/ runs/own --recipes astra,recipes/mine.toml --set validation.split=val
    """
    from extremis import ablation

    data = fspath(data)
    variants = ablation.load_variants(recipes or ("random", "astra"), data, (*set,))
    report, grid = ablation.ablate(data, fspath(out), variants, split, retry)
    return AblateResult(more=report, shown=[grid])


@dataclass(frozen=True, repr=False, kw_only=True)
class CrossvalResult(Result):
    """How many rows and given labels were scored, how many cannot be judged, and how many suspects are listed."""

    data: str
    out: str
    rows: int
    folds: int
    group: str
    given_labels: int
    unjudged: int
    unjudged_labels: int
    suspects: Mapping[str, int]


@function
def crossval(
    data: Place,
    out: Place,
    *,
    folds: Annotated[int, Field(ge=2, le=100)] = 5,
    recipe: Recipe | None = None,
    group: Literal["equal", "near"] = "equal",
    suspects: Positive = 1000,
    progress: Progress = True,
) -> CrossvalResult:
    """Find labels of DATA that are likely wrong: the training rows of each fold are scored by the other folds.

    A linear ranker scores them, or a model that is trained for each fold. OUT has probabilities.parquet, one row for
    each training row; suspects, given labels that other rows do not support and absent labels that are probable; and
    unjudged, labels with fewer than five points in other folds. An interrupted call continues. Needs the extra trainer.

    Options:
        folds: Number of parts of the training rows.
        recipe: Recipe to train for each fold: a name, a TOML file, or a run with this recipe. Default: a linear ranker.
        group: Rows that are in the same fold: with the same text (equal), or the same set of words (near).
        suspects: Number of given labels, and of absent labels, to list.

    Examples:
      extremis crossval data/ wrong/
      extremis crossval data/ wrong/ --folds 10 --group near
      extremis crossval data/ wrong/ --recipe runs/1
    """
    from extremis import crossvalidation

    named = None if recipe is None else fspath(recipe)
    body = crossvalidation.crossval(fspath(data), fspath(out), folds, group, suspects, named)
    say(f"{body['unjudged']:,} of {body['given_labels']:,} given labels cannot be judged: {out}/unjudged.csv")
    say(f"{out}/suspects.csv: {body['suspects']['given']:,} given and {body['suspects']['absent']:,} absent labels")
    return CrossvalResult(data=fspath(data), out=fspath(out), folds=folds, group=group, **body)


@dataclass(frozen=True, repr=False, kw_only=True)
class FuseResult(Result):
    """The fusion of RUN: the split that it is learned on, and its parameters in `more`."""

    data: str
    run: str
    digest: str
    split: str
    queries: int


@function
def fuse(
    data: Place,
    run: Place,
    options: FitOptions | None = None,
    *,
    by: Annotated[str, Shown("weights|MODULE:NAME")] = "weights",
    memory: Size = "4GiB",
    linear: Size = "1GiB",
    progress: Progress = True,
    **fields: "Unpack[FitFields]",
) -> FuseResult:
    """Learn to combine the scores of RUN with other scores, on queries that RUN was not trained on.

    With weights, the vectors' scores are added to the scores of the labels' texts, to votes of the nearest training
    points, and to scores of a linear ranker on words and pairs of words, which this command fits. The embeddings of the
    training points are stored. With module:name, a function of your own combines the scores of vectors and texts with
    the label's frequency, such as NGAME's tree in a checkout (papers.ngame.tree:fit). The module is sought in the
    current folder, then on Python's path. The result replaces an earlier result in RUN/fusion.

    Options:
        by: Weighted sum of scores, or a function in a module of your own.
        memory: Memory limit for the training points: index codes and labels.
        linear: Limit for the size of the rows that the linear ranker learns from; 0: no linear ranker.

    Examples:
      extremis fuse data/ runs/1
      extremis evaluate data/ runs/1
      extremis export data/ runs/1 exported/
    """
    from scoring import fitting

    data, run, options = fspath(data), fspath(run), options or FitOptions()
    if by != "weights":
        manifest = fitting.fit_score(data, run, by, options)
        parameters = manifest.parameters
        pairs = f"{parameters['pairs']:,} pairs, {parameters['positive_pairs']:,} correct"
        say(f"fitted on {parameters['queries']:,} queries of {parameters['split']}: {pairs}")
    else:
        manifest, _ = fitting.fit_fusion(data, run, options, int(memory), int(linear))
        for line in fitting.describe_fusion(manifest.parameters):
            say(line)
    say(f"saved in {run}; next: extremis evaluate {data} {run}")
    return FuseResult.of(manifest.parameters, data=data, run=run, digest=manifest.digest)


@dataclass(frozen=True, repr=False, kw_only=True)
class ExportResult(Result):
    """An export at `out`: its vectors are [labels, dimension], where a bias counts as a dimension."""

    out: str
    digest: str
    labels: int
    step: int
    dimension: int
    bias: bool
    index: Mapping[str, object] | None
    plans: Mapping[str, object]
    decision: str
    calibration: Mapping[str, object] | None


@function
def export(
    data: Place,
    run: Place,
    out: Place,
    options: ExportOptions | None = None,
    *,
    current: bool = False,
    progress: Progress = True,
    **fields: "Unpack[ExportFields]",
) -> ExportResult:
    """Export a checkpoint of RUN to OUT: encoder, vectors, labels, probabilities, and an index for many labels.

    A transformer becomes a directory that sentence-transformers and transformers can open, or an ONNX graph, which
    needs no PyTorch. With --onto, OUT contains only the changes since an earlier export, and refers to that export's
    files for the rest. See docs/export.md.

    Options:
        current: Make OUT the current export of its folder. `predict` and `load` then open OUT if they get the folder.

    Examples:
      extremis export data/ runs/1 exported/ --precision 0.8 --at-least 1
      extremis export data/2 runs/2 exports/2 --onto exports/1 --current
    """
    from scoring.calibration import describe_calibration
    from scoring.export import export as export_run
    from scoring.export_versions import export_name, make_current

    data, run, out = fspath(data), fspath(run), fspath(out)
    if current:
        export_name(out)
    manifest = export_run(data, run, out, options or ExportOptions(), say)
    parameters = manifest.parameters
    by = parameters["options"].get("scores", "classifier")
    dimension = parameters["dimension"]
    say(f"{out}: step {parameters['step']:,}, scores {by}, {manifest.rows:,} labels of {dimension} dimensions")
    if (measured := parameters["calibration"]) is not None:
        of = f"each half of {measured['queries']:,} queries of {measured['split']} by a curve fitted to the other half"
        say(describe_calibration(measured, f"({of}; the exported curve is fitted to both)"))
    decision = parameters["options"]["decision"]["name"]
    say(f"{out}: gives a text these labels: {decision}")
    if current:
        say(f"{make_current(out)}: the current export is now {out}")
    say(f'next: echo "some text" | extremis predict {out} - -')
    facts = {name: parameters[name] for name in ("step", "dimension", "bias", "index", "plans", "calibration")}
    return ExportResult(out=out, digest=manifest.digest, labels=manifest.rows, decision=decision, **facts)


@dataclass(frozen=True, repr=False, kw_only=True)
class PredictResult(Result):
    """Predictions at `out`, and their numbers."""

    out: str
    export: str
    queries: int
    predictions: int
    without_labels: int
    none_of_these: int
    decision: str
    seconds: float


@function
def predict(
    export: Place,
    *places: Annotated[PlaceOrData, Shown("[INPUT] OUT")],
    options: DecisionOptions | None = None,
    data: Place | None = None,
    split: str = "test",
    form: Literal["text", "jsonl", "parquet", "csv"] | None = None,
    to: Literal["jsonl", "parquet", "trec", "npz", "csv"] | None = None,
    fields: Fields | Mapping[str, str] | None = None,
    text: Text | None = None,
    encoding: Encoding | None = None,
    batch: Positive = 256,
    exact: Exact = False,
    embedder: Embedder | None = None,
    no_filter: bool = False,
    wide: bool = False,
    allowed_by: Annotated[str, Shown("COLUMN")] | None = None,
    threads: Threads | None = None,
    overwrite: bool = False,
    device: AnyDevice = "auto",
    allow: Scores = (),
    progress: Progress = True,
    **stated: "Unpack[DecisionFields]",
) -> PredictResult:
    """Predict labels for the texts in INPUT, or for a split of --data, with an export; write the labels to OUT.

    If EXPORT is a folder of exports, predict opens the current export (extremis export --current).

    INPUT is a file, a folder or a pattern with * and ?: text lines (.txt), JSON lines (.jsonl: key, text), CSV or
    Parquet. - means standard input (text lines, or the format of --form). OUT ends in .jsonl, .csv, .parquet, .trec (a
    run for trec_eval) or .npz (scipy.sparse.load_npz). - means standard output (JSON lines, or the format of --to). For
    rows without a key, the row number is the key.

    Options:
        data: DATA of the run: predict for one of its splits instead of INPUT.
        split: Split of {data}.
        form: Format of INPUT. Default: from its name.
        to: Format of OUT. Default: from its name.
        fields: Names of the fields in INPUT, e.g. key=id,text=query. Default: those of DATA, or the usual names.
        text: Fields that make up a text, if records have a title. Default: as in DATA.
        encoding: Encoding of INPUT, e.g. cp1252. Default: utf-8, or from a utf-16 mark.
        batch: Number of queries that are processed at a time.
        no_filter: With {data}: do not remove pairs in the filter files from the predictions.
        wide: Write one row per text, with the columns of INPUT first. In CSV, labels are in label_1, label_2, ….
        allowed_by: Column of INPUT with the only labels that its row may have, written as labels are in training data.
        overwrite: Replace existing predictions at OUT.

    Without options, the decision of the export says how many labels a text gets, and which. For a text without known
    tokens, the output contains the most frequent labels, and known_tokens is 0. Probabilities come from rows that the
    run held out.

    In Python, INPUT may also be a list or Series of texts, a data frame, an Arrow table or a list of dictionaries;
    `extremis.load(export).predict(texts)` returns the predictions.

    Examples:
      extremis predict exported/ queries.jsonl predictions.jsonl --max-labels 5
      echo "a ship in a storm" | extremis predict exported/ - - --min-probability 0.5 --at-least 1
      extremis predict exported/ "s3://bucket/new/*.parquet" predictions.parquet --precision 0.9
      extremis predict exported/ --data data/ --split test predictions.npz --max-labels 100
    """
    *inputs, out = places
    if data and (wide or allowed_by):
        given = option("wide", True) if wide else option("allowed_by", allowed_by)
        raise InputError(f"{given} needs the columns of INPUT, but {option('data')} has none of these.")
    if len(inputs) != (0 if data else 1) or not isinstance(out, str | PathLike):
        expected = f"OUT alone, with {option('data')}" if data else "INPUT and OUT"
        raise InputError(f"expected {expected} after EXPORT, got {' '.join(map(str, places))}.")
    out = fspath(out)
    if out == "-" and current_output().results == "stderr":
        raise InputError("OUT - and the JSON object both go to standard output. Ask for one of the two.")
    from pipelines.formats.base import parse_fields
    from pipelines.formats.keyed import Texts
    from schemas.owners import require_output_file
    from scoring import predict as prediction
    from scoring import prediction_files
    from scoring.containers import SPREADSHEET, STANDARD, input_url
    from scoring.decision import decision_of
    from scoring.export_versions import in_use, resolve_export

    data = None if data is None else fspath(data)
    asked = decision_of(options or DecisionOptions())
    held = inputs and not isinstance(inputs[0], str | PathLike)  # by Python, not in a file
    source = {"texts": inputs[0]} if held else "".join(map(str, inputs))
    named = None if fields is None else parse_fields(str(fields))
    copied = "/dev/stdin" if source == STANDARD else str(source) if str(source).endswith(SPREADSHEET) else None
    export = resolve_export(fspath(export))
    with in_use(export, say), input_url(source, form or "text") as url:
        texts = None if data else Texts(url, form, named, encoding=encoding, whole=wide or allowed_by is not None)
        if out != "-":
            reads = [export, data, copied, *(() if texts is None else texts.places())]
            require_output_file(
                out, reads, f"Give {option('overwrite', True)} to replace it, or another OUT.", overwrite
            )
        for line in texts.notes() if texts else ():
            say(line)
        is_sheet = copied is not None and source != STANDARD
        layout = prediction_files.Layout.of(texts, wide, is_sheet) if texts else prediction_files.Layout(wide)
        opened = prediction.open_export(fspath(export), exact, threads, device, allow)
        decision = opened.decision.narrowed(asked)
        opened.look_up(decision)  # before anything is read
        if texts is None:
            rows, total = prediction_files.rows_of_split(opened, str(data), split)
        else:
            made_with, title_only = prediction.text_fields(opened)
            texts = replace(texts, made_with=made_with, title_only=text == "title" if text else title_only)
            embedding = None if embedder is None else fspath(embedder)
            rows, total = prediction_files.rows_of_texts(opened, texts, batch, embedding), None
        choices: dict[str, Any] = {"decision": decision, "to": to, "layout": layout, "allowed_by": allowed_by}
        with Bar("predict", total) as bar, _file(out, to) as path:
            report = prediction_files.write_predictions(
                opened, rows, path, **choices, filter=not no_filter, on_rows=bar.update
            )
    milliseconds = 1000 * report["seconds"] / max(1, report["queries"])
    per = f"{report['queries']:,} queries ({decision.name}), {milliseconds:.2f} ms per query"
    few = f"{report['without_labels']:,} without a label, {report['none_of_these']:,} probably none of these"
    say(f"{out}: {report['predictions']:,} labels for {per}; {few}")
    return PredictResult(**{**report, "out": out})


@contextlib.contextmanager
def _file(out: str, form: str | None) -> Iterator[str]:
    """Yield OUT; for -, yield a temporary file, which is printed when the block ends without error."""
    if out != "-":
        yield out
        return
    if sys.stdout is None:
        raise InputError("standard output is closed. Open it, or give a file for the predictions.")
    if form in ("parquet", "npz") and sys.stdout.isatty():
        raise InputError(
            f"OUT -: {form} is a binary format, and standard output is a terminal. Give a file, or redirect standard "
            "output."
        )
    with tempfile.TemporaryDirectory(prefix="extremis-output-") as folder:
        path = os.path.join(folder, f"out.{form or 'jsonl'}")
        yield path
        print_file(path)


@function
def explain(
    export: Place,
    text: Annotated[str, Shown("TEXT")],
    label: Annotated[str, Shown("LABEL")],
    options: DecisionOptions | None = None,
    *,
    exact: Exact = False,
    embedder: Embedder | None = None,
    threads: Threads | None = None,
    allow: Scores = (),
    progress: Progress = True,
    **fields: "Unpack[DecisionFields]",
) -> Result:
    """Say why an export gives a label to a text, or why it does not: rank, decision, and the parts of the score.

    LABEL is a key. For a label that is not given, the parts are compared with those of the last label that is given.

    Examples:
      extremis explain exported/ "a ship in a storm" sea
      extremis explain exported/ "a ship in a storm" sea --precision 0.9
    """
    from scoring.decision import decision_of

    model = load(export, exact=exact, embedder=embedder, threads=threads, allow=allow)
    found = model.explain(text, label, decision_of(options or DecisionOptions()))
    place = "rank unknown" if found.rank is None else f"rank {found.rank:,} of {len(model.labels):,}"
    said = f"{label}: {'' if found.is_given else 'not given: '}{found.reason}; score {found.score:.3f}, {place}"
    if found.gaps:
        said += f"; compared with {found.against}, most is missing in: {next(iter(found.gaps))}"
    rows = [[name, f"{part:+.3f}", f"{found.gaps.get(name, 0):+.3f}"] for name, part in found.parts.items() if part]
    columns = ["part of the score", "adds", f"compared with {found.against}"][: 3 if found.gaps else 2]
    shown: list[Grid | str] = [said, Grid("", columns, [row[: len(columns)] for row in rows])]
    words = [[word, f"{added:+.3f}"] for word, added in found.words]
    points = [[key, f"{cosine:.3f}", f"{added:+.3f}"] for key, cosine, added in found.points]
    shown += [Grid("words", ["word", "adds"], words)] if words else []
    shown += [Grid("training points with the label", ["key", "cosine", "adds"], points)] if points else []
    return Result(more={"export": model.url, "label": label, **dataclasses.asdict(found)}, shown=shown)


def load(
    export: str | PathLike[str],
    *,
    exact: bool = False,
    threads: int | None = None,
    embedder: str | PathLike[str] | None = None,
    allow: Sequence[str] = (),
) -> "Model":
    """Open the export at `export`, a directory or an object-store prefix; for a folder, open its current export.

    `exact`: score every label, without an index. `threads`: number of threads; None: all cores. `embedder`: a different
    path or hub name of the model that computed the dense vectors of DATA. `allow`: the scores from outside that may be
    imported, as "module:name"; an export without such a score needs none.
    Raises TableError if the export is missing or damaged, InputError if the model is missing or different or `threads`
    is no whole number above 0, and StorageError.
    """
    from scoring import predict as prediction
    from scoring.export_versions import in_use

    place = None if embedder is None else str(embedder)
    threads = None if threads is None else whole_number("threads", threads, 1)
    opened = prediction.open_export(str(export), exact, threads, allow=allow)
    model, lease = prediction.Model(opened, str(export), place, say), contextlib.ExitStack()
    lease.enter_context(in_use(model.url, say))
    weakref.finalize(model, lease.close)
    return model


@function
def serve(
    export: Place,
    *,
    host: str = "127.0.0.1",
    port: Annotated[int, Field(ge=0, le=65535)] = 8000,
    token_file: Annotated[Place, Shown("FILE")] | None = None,
    poll: Annotated[float, Field(gt=0)] = 1.0,
    grace: NotNegative = 25,
    threads: Threads | None = None,
    exact: Exact = False,
    embedder: Embedder | None = None,
    allow: Scores = (),
    max_labels: Positive = 100,
    max_texts: Positive = 1000,
    max_chars: Positive = 20_000,
    max_body: Size = "4MiB",
    progress: Progress = True,
) -> Result:
    """Serve EXPORT over HTTP until SIGTERM or Ctrl-C: POST /predict, and a page to try it at /.

    If EXPORT is a folder of exports, the service follows the current export (extremis export --current). Open requests
    are answered before the service ends. Needs the extra http. See docs/export.md.

    Options:
        host: Address to listen on. 0.0.0.0: reachable from other machines.
        port: Port to listen on. 0: any free port, which a message names.
        token_file: File of tokens, one a line, of which /predict requires one (Authorization: Bearer TOKEN). It may
            change.
        poll: Seconds between checks for another current export, and for other tokens.
        grace: Seconds that open requests may take after SIGTERM or Ctrl-C.
        max_labels: Limit for the labels of a text.
        max_texts: Limit for the texts of a request.
        max_chars: Limit for the characters of a text.
        max_body: Limit for the size of a request.

    Examples:
      extremis serve exports/
      extremis serve s3://bucket/exports --host 0.0.0.0 --token-file /run/secrets/tokens
      curl localhost:8000/predict -d '{"texts": ["a ship in a storm"], "max_labels": 5}'
    """
    try:
        from extremis.service import Service, make_app, run
    except ImportError as error:
        raise missing_extra(f"a service needs {error.name}", "http") from None

    open_model = functools.partial(load, export, exact=exact, threads=threads, embedder=embedder, allow=allow)
    service = Service(open_model, None if token_file is None else fspath(token_file), max_labels)
    app = make_app(service, poll, max_labels, max_texts, max_chars, int(max_body))
    requests = run(service, app, host, port, grace)
    say(f"requests answered: {requests:,}")
    return Result(more={"export": service.model.url, "requests": requests})


@dataclass(frozen=True, repr=False, kw_only=True)
class TuplesResult(Result):
    """Training examples at `out`; a folder of shards has a digest."""

    out: str
    form: str
    examples: int
    rows_left_out: int
    digest: str | None = None
    shards: int | None = None


@function
def tuples(
    table: Place,
    out: Place,
    options: TupleOptions | None = None,
    *,
    data: Place | None = None,
    shuffle: bool = False,
    epoch: NotNegative = 0,
    shards: Positive | None = None,
    overwrite: bool = False,
    progress: Progress = True,
    **fields: "Unpack[TupleFields]",
) -> TuplesResult:
    """Write a table of negatives to OUT as training examples for other libraries.

    TABLE is a table of negatives, the output folder of `extremis mine` on arrays, or a RUN (its newest table). OUT ends
    in .jsonl, .jsonl.gz, .jsonl.bz2 or .jsonl.zst, or is a folder for Parquet shards. Rows without positives, or with
    too few negatives, are left out.

    triplets: anchor, positive, negative. tuples: anchor, positive, negative_1, negative_2, ... pairs: anchor, other,
    label. lists: anchor, documents, labels. tevatron and flagembedding: the formats that these libraries read.

    Options:
        data: DATA that the table was mined from. Default: the data set in the output folder of `extremis mine` on
            arrays.
        shuffle: Shuffle with {seed} and {epoch}. Default: keep the order of the table.
        epoch: Number of the epoch, which determines the order and the choice of positives.
        shards: Number of shards in a folder. Default: computed from the number of examples.
        overwrite: Replace existing examples at OUT.

    Examples:
      extremis tuples mined/ triplets.jsonl.gz --form triplets
      extremis tuples runs/1 tuples/ --data data/ --negatives 7 --shuffle
      extremis tuples mined/ train.jsonl --form flagembedding --scores search
    """
    from scoring.tuples import TupleStream, is_file, write_tuples

    options, out = options or TupleOptions(), fspath(out)
    is_file(out)
    stream = TupleStream(table, data, **options.model_dump())
    stream.set_epoch(epoch)
    examples, left_out = stream.counted
    with Bar("tuples", examples) as bar:
        manifest = write_tuples(stream, out, shuffle, shards, overwrite, bar.advance)
    left = f"; {left_out:,} rows were left out" if left_out else ""
    say(f"{out}: {examples:,} examples ({options.form}){left}")
    of_shards = {} if manifest is None else {"digest": manifest.digest, "shards": len(manifest.shards)}
    return TuplesResult.of(of_shards, out=out, form=options.form, examples=examples, rows_left_out=left_out)


@dataclass(frozen=True, repr=False, kw_only=True)
class EmbedResult(Result):
    """A table of embeddings at `out`."""

    out: str
    digest: str
    rows: int


@function
def embed(
    model: Place,
    input: PlaceOrData,
    out: Place,
    options: EmbedTextsOptions | None = None,
    *,
    step: NotNegative | None = None,
    device: AnyDevice = "auto",
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
    **fields: "Unpack[EmbedTextsFields]",
) -> EmbedResult:
    """Embed texts with any text model (MODEL INPUT OUT), or queries or labels of DATA with a run (DATA RUN OUT).

    MODEL is the directory or hub name of a model for sentence-transformers, transformers or Model2Vec, in safetensors.
    INPUT is DATA, or any number of files with key and text (.txt lines, JSON lines, CSV, Parquet), or, in Python, rows.
    OUT contains query_id, key, text and vector in the order of INPUT. With DATA RUN OUT, OUT contains only query_id or
    label_id, and vector, in the order of the table of queries or labels. Options after -- are passed to Beam.

    Options:
        step: With DATA RUN OUT: step of the checkpoint. Default: the checkpoint that evaluate uses.

    Examples:
      extremis embed sentence-transformers/all-MiniLM-L6-v2 corpus.jsonl emb/corpus --what documents
      extremis embed models/potion/ "raw/*.csv" emb/queries --fields key=id,text=query --prompt "query: "
      extremis embed data/ runs/1 embeddings/test --split test
    """
    from pipelines import embed as embedding
    from schemas.layout import RunLayout
    from schemas.manifest import is_published
    from schemas.options import check
    from schemas.storage import exists
    from scoring.containers import input_url

    options, model, out = options or EmbedTextsOptions(), fspath(model), fspath(out)
    is_run = is_published(model) or (isinstance(input, str) and exists(RunLayout(input).config))
    stated = options.model_dump(exclude_defaults=True)
    of_texts = {*EmbedTextsOptions.model_fields} - {*EmbedOptions.model_fields}
    for name in of_texts & stated.keys() if is_run else {"step"} - ({"step"} if step is None else set()):
        form = "MODEL INPUT OUT" if is_run else "DATA RUN OUT"
        raise InputError(
            f"{option(name)} works only with `extremis embed {form}`. Leave it out, or give these arguments."
        )
    if is_run:
        run = str(input)
        of_run = check(EmbedOptions, {**stated, "step": RunLayout(run).scored_step(step)})
        manifest = embedding.embed(model, run, out, of_run, beam_options, say, device)
    else:
        with input_url(input, "text") as url:
            manifest = embedding.embed_texts(model, url, out, options, beam_options, say, device)
    say(f"{out}: {manifest.rows:,} embeddings in {len(manifest.shards)} shards")
    say(f"next: extremis inspect {out}")
    return EmbedResult(out=out, digest=manifest.digest, rows=manifest.rows)


# Scores of PECOS XR-Linear (pifa_lf_concat, TF-IDF of words and pairs of words) on the same test split.
XR_LINEAR = {"P@1": 70.81, "P@5": 48.71, "PSP@5": 40.51}


@dataclass(frozen=True, repr=False, kw_only=True)
class DemoResult(Result):
    """What the demo made and measured, and the seconds of each part; further values are in `more`."""

    data: str
    run: str
    metrics: Mapping[str, float]
    intervals: Mapping[str, Sequence[float]]
    seconds: Mapping[str, float]


@function
def demo(
    folder: Annotated[Place, Shown("[DIR]")] = "demo", *, set: Settings = (), progress: Progress = True
) -> DemoResult:
    """Run the whole loop on the Tate collection: shard, train beside a miner, join its tables, fuse, evaluate.

    The recipe is what extremis run auto chooses for these data, with fewer epochs. The output is written to DIR
    (default: demo).

    Example:
      extremis demo demo/
    """
    from extremis.evaluation import evaluate
    from extremis.supervisor import train
    from pipelines.options import ShardOptions
    from pipelines.shard import shard
    from schemas import storage
    from schemas.owners import require_output_folder
    from schemas.storage import join
    from scoring.fitting import describe_fusion, fit_fusion
    from trainer.recipe_files import load_recipe
    from trainer.settings.resolve import resolve

    folder, raw = fspath(folder), _example()
    data, run, recipe, moments = join(folder, "data"), join(folder, "run"), join(raw, "recipe.toml"), list[float]()

    def begin(part: str) -> None:
        moments.append(time.perf_counter())
        say(f"{len(moments)}/4 {part}")

    load_recipe(recipe, set)  # refuses a faulty value before anything is made
    begin(f"shard {raw} to {data}")
    shard(raw, data, ShardOptions(propensity_a=0.55, propensity_b=1.5), (), say)  # of the Tate collection
    begin(f"train {run} with {recipe}, found by extremis run auto; a miner makes its tables of hard negatives")
    require_output_folder(run, "trained")  # the run of an earlier demo
    storage.remove(run, recursive=True)
    outcome = train(data, run, resolve(recipe, set, data).recipe, beam_options=())
    begin("fuse: learn from held-out works how to add up the scores of vectors, words and similar works")
    show_activity("learning the weights of the scores")
    for line in describe_fusion(fit_fusion(data, run)[0].parameters):
        say(line)
    begin("evaluate on test")
    report = {**outcome, **evaluate(data, run)}
    moments.append(time.perf_counter())
    spans = zip(("shard", "train", "fuse", "evaluate"), moments[:-1], moments[1:], strict=True)
    seconds = {name: round(end - start, 2) for name, start, end in spans}
    compared = [
        ["this run", *(format_metric(report, name) for name in XR_LINEAR)],
        ["PECOS XR-Linear", *(f"{value:.2f}" for value in XR_LINEAR.values())],
    ]
    program = "extremis" if shutil.which("extremis") else os.path.relpath(Path(sys.executable).with_name("extremis"))
    model = join(folder, "exported")
    shown: list[Grid | str] = [
        Grid(f"test: {report['queries']:,} queries, with 95 % intervals", ["%", *XR_LINEAR], compared),
        "seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in seconds.items()),
        "type next, for a page about this run, for predictions, and for a CSV of your own (columns text and label):",
        f"{program} report {data} {run}",
        f"{program} export {data} {run} {model} && echo a ship in a storm | {program} predict {model} - - --to csv",
        f"{program} shard pairs.csv data/ --test 0.1 && {program} run auto data/ runs/1",
    ]
    return DemoResult.of(report, shown, data=data, run=run, seconds=seconds)


def _example() -> str:
    package = Path(__file__).resolve().parent
    for folder in (package / "tate", package.parent / "examples" / "tate"):  # in an installation, in a checkout
        if folder.is_dir():
            return str(folder)
    raise InputError(
        f"{folder}: the Tate data set is missing. Install Extremis again, or run the demo from a checkout. For your "
        "own data use extremis shard, run and evaluate."
    )
