"""`extremis export` and `predict`."""

from typing import Any

import click

from extremis.commands.options import json_option, parse_numbers
from extremis.console import print_json, say
from schemas.errors import InputError


@click.command()
@click.argument("data")
@click.argument("run")
@click.argument("out")
@click.option("--step", type=click.IntRange(0), help="The checkpoint's step. Default: the newest.")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option(
    "--index",
    default="auto",
    show_default=True,
    help="none, auto (none up to 131,072 labels, else inverted lists), or a Faiss factory string such as HNSW32.",
)
@click.option("--target-recall", type=float, default=0.98, show_default=True, help="What the index is tuned to.")
@click.option("--precision", default="0.5,0.7,0.9", show_default=True, help="Precisions that get a threshold.")
@click.option("--threshold-split", help="The split they are measured on, or none. Default: val where DATA has it.")
@click.option(
    "--scores",
    type=click.Choice(["classifier", "sum", "fused"]),
    default="classifier",
    show_default=True,
    help="sum: with the embeddings of the labels' texts added to the vectors; fused: beside them, with the run's tree.",
)
@click.option("--overwrite", is_flag=True, help="Replace an export made from something else.")
@json_option
def export(
    data: str, run: str, out: str, precision: str, threshold_split: str | None, as_json: bool, **chosen: Any
) -> None:
    """Export a checkpoint of RUN to OUT: encoder, vectors, labels, thresholds, and an index where L is large.

    A transformer becomes a directory that sentence-transformers and transformers open. See docs/export.md.

    \b
    Example:
      extremis export data/ runs/1 exported/
    """
    from trainer.export.export import ExportOptions
    from trainer.export.export import export as export_run

    precisions = parse_numbers("--precision", precision)
    manifest = export_run(data, run, out, ExportOptions(precisions=precisions, split=threshold_split, **chosen), say)
    facts = manifest.parameters
    say(f"{out}: step {facts['step']:,}, {manifest.rows:,} labels of {facts['dimension']} dimensions")
    if as_json:
        made = {name: facts[name] for name in ("step", "dimension", "bias", "index", "thresholds")}
        print_json({"out": out, "digest": manifest.digest, "labels": manifest.rows, **made})


@click.command()
@click.argument("exported", metavar="EXPORT")
@click.argument("places", metavar="[INPUT] OUT", nargs=-1, required=True)
@click.option("--data", help="Instead of INPUT: predict for a split of the DATA that the run was made from.")
@click.option("--split", default="test", show_default=True, help="Which, with --data.")
@click.option("--k", type=click.IntRange(1), default=10, show_default=True, help="Labels a query.")
@click.option("--form", type=click.Choice(["text", "jsonl", "parquet"]), help="What INPUT holds. Default: by its name.")
@click.option(
    "--to", type=click.Choice(["jsonl", "parquet", "trec", "npz"]), help="What OUT will hold. Default: by its name."
)
@click.option(
    "--fields", metavar="NAME=NAME,...", default="", help="What fields are called in INPUT: key=id,text=query."
)
@click.option("--text", type=click.Choice(["title+content", "title"]), default="title+content", show_default=True)
@click.option("--batch", type=click.IntRange(1), default=256, show_default=True, help="Queries at a time.")
@click.option("--threshold", type=float, help="Only labels that score as much.")
@click.option("--precision", type=float, help="The same, by the export's threshold for this precision.")
@click.option("--exact", is_flag=True, help="Score every label, whatever index there is.")
@click.option("--no-filter", is_flag=True, help="With --data: leave the filter's pairs among the predictions.")
@click.option("--threads", type=click.IntRange(1), help="Default: all cores.")
@json_option
def predict(
    exported: str,
    places: tuple[str, ...],
    data: str | None,
    split: str,
    k: int,
    form: str | None,
    to: str | None,
    fields: str,
    text: str,
    batch: int,
    threshold: float | None,
    precision: float | None,
    exact: bool,
    no_filter: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Predict labels with what `extremis export` made: for texts of INPUT, or with --data for a split, to OUT.

    INPUT is a file, a folder or a pattern of text lines (.txt), JSON lines (.jsonl: key, text) or Parquet, at any URL.
    OUT ends in .jsonl, .parquet, .trec (a run for trec_eval) or .npz (scipy.sparse.load_npz).

    \b
    Examples:
      extremis predict exported/ queries.jsonl predictions.jsonl --k 5
      extremis predict exported/ "s3://bucket/new/*.parquet" predictions.parquet --precision 0.9
      extremis predict exported/ --data data/ --split test predictions.npz --k 100
    """
    from extremis.predicting.inputs import Texts
    from extremis.predicting.predict import open_exported, predict_split, predict_texts
    from pipelines.formats.fields import parse_fields

    if len(places) != (1 if data else 2):
        expected = "OUT alone, with --data" if data else "INPUT and OUT"
        raise InputError(f"expected {expected} after EXPORT, got {' '.join(places)}.")
    if threshold is not None and precision is not None:
        raise InputError("--threshold and --precision both say which scores are enough. Give one of them.")
    opened = open_exported(exported, exact, threads)
    enough = opened.threshold(precision) if precision is not None else threshold
    if data is not None:
        report = predict_split(opened, data, split, places[0], k=k, to=to, threshold=enough, filter=not no_filter)
    else:
        texts = Texts(places[0], form, parse_fields(fields), text == "title")
        report = predict_texts(opened, texts, places[1], k=k, to=to, batch=batch, threshold=enough)
    say(
        f"{report['out']}: {report['predictions']:,} labels for {report['queries']:,} queries, "
        f"{1000 * report['seconds'] / max(1, report['queries']):.2f} ms a query"
    )
    if as_json:
        print_json(report)
