"""`extremis predict`."""

from typing import Any

import click

from extremis.commands.options import POSITIVE, device_option, fields_option, output_options, text_option
from extremis.console import say
from schemas.errors import InputError


@click.command()
@click.argument("exported", metavar="EXPORT")
@click.argument("places", metavar="[INPUT] OUT", nargs=-1, required=True)
@click.option("--data", help="DATA that the run was made from: predict for a split of it instead of INPUT.")
@click.option("--split", default="test", help="Split of --data.")
@click.option("--k", type=POSITIVE, default=10, help="Labels per query.")
@click.option(
    "--form", type=click.Choice(["text", "jsonl", "parquet", "csv"]), help="Form of INPUT. Default: by its name."
)
@click.option(
    "--to", type=click.Choice(["jsonl", "parquet", "trec", "npz", "csv"]), help="Form of OUT. Default: by its name."
)
@fields_option
@text_option
@click.option("--batch", type=POSITIVE, default=256, help="Queries at a time.")
@click.option("--threshold", type=float, help="Leave out labels with a lower score.")
@click.option("--precision", type=float, help="Use the export's threshold for this precision.")
@click.option("--exact", is_flag=True, help="Score every label, even where there is an index.")
@click.option("--no-filter", is_flag=True, help="With --data: keep the filter's pairs among the predictions.")
@click.option(
    "--safe-cells", is_flag=True, help="In CSV: an apostrophe before cells that a spreadsheet would take for a formula."
)
@click.option("--threads", type=POSITIVE, help="Default: all cores.")
@click.option("--overwrite", is_flag=True, help="Replace predictions that are at OUT.")
@device_option
@output_options
def predict(exported: str, places: tuple[str, ...], data: str | None, **options: Any) -> dict[str, Any]:
    """Predict labels with an export, for the texts of INPUT, or for a split of --data, and write them to OUT.

    Of a folder of exports, the current one is used (extremis export --current).

    INPUT is a file, a folder or a pattern of text lines (.txt), JSON lines (.jsonl: key, text), CSV or Parquet, at any
    URL; - is standard input (text lines, or --form). OUT ends in .jsonl, .csv, .parquet, .trec (a run for trec_eval) or
    .npz (scipy.sparse.load_npz); - is standard output (JSON lines, or --to). Rows without a key have their number.

    \b
    Examples:
      extremis predict exported/ queries.jsonl predictions.jsonl --k 5
      echo "a ship in a storm" | extremis predict exported/ - - --k 5
      extremis predict exported/ "s3://bucket/new/*.parquet" predictions.parquet --precision 0.9
      extremis predict exported/ --data data/ --split test predictions.npz --k 100
    """
    if len(places) != (1 if data else 2):
        expected = "OUT alone, with --data" if data else "INPUT and OUT"
        raise InputError(f"expected {expected} after EXPORT, got {' '.join(places)}.")
    context = click.get_current_context(silent=True)
    if places[-1] == "-" and context is not None and context.params.get("as_json"):
        raise InputError("OUT - and --json both write to standard output. Give one of them.")
    threshold, precision = options["threshold"], options["precision"]
    if threshold is not None and precision is not None:
        raise InputError("--threshold and --precision both set the lowest score. Give one of them.")
    from extremis.predicting.inputs import Texts
    from extremis.predicting.predict import PredictOptions, open_exported, predict_split, predict_texts
    from pipelines.formats.fields import parse_fields
    from schemas.owners.place import require_file

    texts = (
        None
        if data
        else Texts(places[0], options["form"], parse_fields(options["fields"] or ""), options["text"] == "title")
    )
    if places[-1] != "-":
        reads = [exported, data, *([] if texts is None else texts.places())]
        require_file(places[-1], reads, "Give --overwrite to replace it, or another OUT.", options["overwrite"])
    opened = open_exported(exported, options["exact"], options["threads"], options["device"])
    if precision is not None:
        threshold = opened.threshold(precision)
    predict_options = PredictOptions(
        options["k"], options["to"], threshold, filter=not options["no_filter"], safe_cells=options["safe_cells"]
    )
    if texts is None:
        report = predict_split(opened, data, options["split"], places[0], predict_options)
    else:
        report = predict_texts(opened, texts, options["batch"], places[1], predict_options)
    say(
        f"{report['out']}: {report['predictions']:,} labels for {report['queries']:,} queries, "
        f"{1000 * report['seconds'] / max(1, report['queries']):.2f} ms per query"
    )
    return report
