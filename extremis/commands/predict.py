"""`extremis predict`: predicts the best labels for texts, or for a split of DATA, with an exported run."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from os import PathLike, fspath
from typing import Annotated, Any, Literal

from extremis.command import Option, Progress, command, format_argument
from extremis.commands.shared import Device, Fields, Names, Place, Positive, Text
from extremis.console import Bar, current_output, print_file, say
from schemas.errors import InputError


@command()
def predict(
    export: Place,
    *places: Annotated[Any, Option(metavar="[INPUT] OUT")],
    data: Place | None = None,
    split: str = "test",
    k: Positive = 10,
    form: Literal["text", "jsonl", "parquet", "csv"] | None = None,
    to: Literal["jsonl", "parquet", "trec", "npz", "csv"] | None = None,
    fields: Fields | None = None,
    text: Text | None = None,
    batch: Positive = 256,
    threshold: float | None = None,
    precision: float | None = None,
    filter: Annotated[Place | None, Option(metavar="FILE")] = None,
    exact: bool = False,
    embedder: Place | None = None,
    no_filter: bool = False,
    safe_cells: bool = False,
    threads: Positive | None = None,
    overwrite: bool = False,
    device: Device = "auto",
    allow: Names = (),
    progress: Progress = True,
) -> dict[str, Any]:
    """Predict labels for the texts in INPUT, or for a split of --data, with an export; write the labels to OUT.

    If EXPORT is a folder of exports, predict opens the current export (extremis export --current).

    INPUT is a file, a folder or a pattern with * and ?: text lines (.txt), JSON lines (.jsonl: key, text), CSV or
    Parquet. - means standard input (text lines, or the format of --form). OUT ends in .jsonl, .csv, .parquet, .trec (a
    run for trec_eval) or .npz (scipy.sparse.load_npz). - means standard output (JSON lines, or the format of --to). For
    rows without a key, the row number is the key.

    Options:
        data: DATA of the run: predict for one of its splits instead of INPUT.
        split: Split of --data.
        k: Labels per query.
        form: Format of INPUT. Default: from its name.
        to: Format of OUT. Default: from its name.
        fields: Names of the fields in INPUT, e.g. key=id,text=query. Default: those of DATA, or the usual names.
        text: Fields that make up a text, if records have a title. Default: as in DATA.
        batch: Number of queries that are processed at a time.
        threshold: Leave out labels with a lower score.
        precision: Use the export's threshold for this precision, one of extremis export --precision.
        filter: File of keys of labels to leave out of all predictions, one per line.
        exact: Score every label, even if the export has an index.
        embedder: Path or hub name of the model that computed DATA's dense vectors. Default: the name in the export.
        no_filter: With --data: do not remove pairs in the filter files from the predictions.
        safe_cells: In CSV, put an apostrophe before cells that a spreadsheet would read as a formula.
        threads: Number of threads. Default: all cores.
        overwrite: Replace existing predictions at OUT.
        allow: Scores from outside that EXPORT may import, as module:name.

    For a text without known tokens, the output contains the most frequent labels, and known_tokens is 0. With a
    calibrated export (extremis export --calibrate), the output also contains probabilities.

    In Python, INPUT may also be a list or Series of texts, a data frame, an Arrow table or a list of dictionaries;
    `extremis.load(export).predict(texts)` returns the predictions.

    Examples:
      extremis predict exported/ queries.jsonl predictions.jsonl --k 5
      echo "a ship in a storm" | extremis predict exported/ - - --k 5
      extremis predict exported/ "s3://bucket/new/*.parquet" predictions.parquet --precision 0.9
      extremis predict exported/ --data data/ --split test predictions.npz --k 100
    """
    inputs, out = places[:-1], fspath(places[-1])
    if len(inputs) != (0 if data else 1):
        expected = "OUT alone, with --data" if data else "INPUT and OUT"
        raise InputError(f"expected {expected} after EXPORT, got {' '.join(map(str, [*inputs, out]))}.")
    if out == "-" and current_output().results == "stderr":
        raise InputError("OUT - and --json both write to standard output. Give only one of the two.")
    from pipelines.formats.base import parse_fields
    from pipelines.formats.keyed import Texts
    from schemas.owners import require_output_file
    from scoring.containers import input_url
    from scoring.export_versions import resolve_export
    from scoring.predict import (
        Labels,
        leave_out,
        open_export,
        rows_of_split,
        rows_of_texts,
        text_fields,
        write_predictions,
    )

    named = None if fields is None else parse_fields(format_argument(fields))
    data = None if data is None else fspath(data)
    left_out = None if filter is None else Texts(fspath(filter), "text")
    held = inputs and not isinstance(inputs[0], str | PathLike)  # by Python, not in a file
    with input_url({"texts": inputs[0]} if held else "".join(map(fspath, inputs))) as url:
        texts = None if data else Texts(url, form, named)
        if out != "-":
            files = [place for read in (texts, left_out) if read is not None for place in read.places()]
            reads = [resolve_export(fspath(export)), data, *files]
            require_output_file(out, reads, "Give --overwrite to replace it, or another OUT.", overwrite)
        for line in texts.notes() if texts else ():
            say(line)
        opened = open_export(fspath(export), exact, threads, device, allow)
        lowest = opened.lowest_score(threshold, precision)
        if left_out is not None:
            keys = [key for lines in left_out.batches(batch, False) for key in lines["text"].to_pylist() if key]
            opened = leave_out(opened, Labels(opened.label_table(("key", "text"))), keys, say)
        if texts is None:
            rows, total = rows_of_split(opened, str(data), split)
        else:
            made_with, title_only = text_fields(opened)
            texts = replace(texts, made_with=made_with, title_only=text == "title" if text else title_only)
            rows, total = rows_of_texts(opened, texts, batch, None if embedder is None else fspath(embedder)), None
        choices: dict[str, Any] = {"k": k, "lowest": lowest, "to": to, "safe_cells": safe_cells}
        with Bar("predict", total) as bar, _file(out, to) as path:
            report = write_predictions(opened, rows, path, **choices, filter=not no_filter, on_rows=bar.update)
        report["out"] = out
    say(
        f"{report['out']}: {report['predictions']:,} labels for {report['queries']:,} queries, "
        f"{1000 * report['seconds'] / max(1, report['queries']):.2f} ms per query"
    )
    return report


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
