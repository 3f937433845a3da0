"""`extremis predict`: the best labels of texts, or of a split of DATA, by an exported run."""

from os import fspath
from typing import Annotated, Any, Literal

from extremis.command import Option, Progress, command, text_of
from extremis.commands.shared import Device, Fields, Place, Positive, Text
from extremis.console import present_output, say
from schemas.errors import InputError


@command()
def predict(
    export: Place,
    *places: Annotated[Place, Option(metavar="[INPUT] OUT")],
    data: Place | None = None,
    split: str = "test",
    k: Positive = 10,
    form: Literal["text", "jsonl", "parquet", "csv"] | None = None,
    to: Literal["jsonl", "parquet", "trec", "npz", "csv"] | None = None,
    fields: Fields | None = None,
    text: Text = "title+content",
    batch: Positive = 256,
    threshold: float | None = None,
    precision: float | None = None,
    exact: bool = False,
    embedder: Place | None = None,
    no_filter: bool = False,
    safe_cells: bool = False,
    threads: Positive | None = None,
    overwrite: bool = False,
    device: Device = "auto",
    progress: Progress = True,
) -> dict[str, Any]:
    """Predict labels with an export, for the texts of INPUT, or for a split of --data, and write them to OUT.

    Of a folder of exports, the current one is used (extremis export --current).

    INPUT is a file, a folder or a pattern of text lines (.txt), JSON lines (.jsonl: key, text), CSV or Parquet, at any
    URL; - is standard input (text lines, or --form). OUT ends in .jsonl, .csv, .parquet, .trec (a run for trec_eval) or
    .npz (scipy.sparse.load_npz); - is standard output (JSON lines, or --to). Rows without a key have their number.

    Options:
        data: DATA that the run was made from: predict for a split of it instead of INPUT.
        split: Split of --data.
        k: Labels per query.
        form: Form of INPUT. Default: by its name.
        to: Form of OUT. Default: by its name.
        fields: Names of the fields in INPUT, e.g. key=id,text=query.
        text: Fields that make up a text, where records have a title.
        batch: Queries at a time.
        threshold: Leave out labels with a lower score.
        precision: Use the export's threshold for this precision.
        exact: Score every label, even where there is an index.
        embedder: Another place of the model that made the dense vectors of DATA. Default: its name there.
        no_filter: With --data: keep the filter's pairs among the predictions.
        safe_cells: In CSV: an apostrophe before cells that a spreadsheet would take for a formula.
        threads: Default: all cores.
        overwrite: Replace predictions that are at OUT.

    A text without a known token gets the labels of the most training points, and known_tokens 0; a calibrated export
    (extremis export --calibrate) gives probabilities.

    For texts at hand in Python there is `extremis.load(export).predict(texts)`.

    Examples:
      extremis predict exported/ queries.jsonl predictions.jsonl --k 5
      echo "a ship in a storm" | extremis predict exported/ - - --k 5
      extremis predict exported/ "s3://bucket/new/*.parquet" predictions.parquet --precision 0.9
      extremis predict exported/ --data data/ --split test predictions.npz --k 100
    """
    *inputs, out = [fspath(place) for place in places]
    if len(inputs) != (0 if data else 1):
        expected = "OUT alone, with --data" if data else "INPUT and OUT"
        raise InputError(f"expected {expected} after EXPORT, got {' '.join([*inputs, out])}.")
    if out == "-" and present_output().tables == "stderr":
        raise InputError("OUT - and --json both write to standard output. Give one of them.")
    if threshold is not None and precision is not None:
        raise InputError("--threshold and --precision both set the lowest score. Give one of them.")
    from extremis.model import open_exported
    from extremis.predicting import rows_of_split, rows_of_texts, write_predictions
    from pipelines.formats.names import parse_fields
    from pipelines.formats.texts import Texts
    from schemas.owners.place import require_file
    from schemas.version import follow

    data = None if data is None else fspath(data)
    texts = None if data else Texts(inputs[0], form, parse_fields(text_of(fields or "")), text == "title")
    if out != "-":
        reads = [follow(fspath(export)), data, *([] if texts is None else texts.places())]
        require_file(out, reads, "Give --overwrite to replace it, or another OUT.", overwrite)
    opened = open_exported(fspath(export), exact, threads, device)
    if precision is not None:
        threshold = opened.threshold(precision)
    if texts is None:
        rows, total = rows_of_split(opened, str(data), split)
    else:
        rows, total = rows_of_texts(opened, texts, batch, None if embedder is None else fspath(embedder)), None
    report = write_predictions(
        opened, rows, out, k=k, threshold=threshold, to=to, safe_cells=safe_cells, filter=not no_filter, total=total
    )
    say(
        f"{report['out']}: {report['predictions']:,} labels for {report['queries']:,} queries, "
        f"{1000 * report['seconds'] / max(1, report['queries']):.2f} ms per query"
    )
    return report
