"""`extremis report`."""

from typing import Any

import click

from extremis.commands.options import output_options
from extremis.console import say


@click.command()
@click.argument("urls", metavar="[DATA] RUN [RUN...]", nargs=-1, required=True)
@click.option("--out", metavar="URL", help="URL of the page. Default: report.html in the first RUN.")
@click.option("--queries", type=click.IntRange(0, 1000), default=300, help="Queries to show.")
@click.option("--predictions/--no-predictions", default=True, help="Load each run's newest checkpoint.")
@output_options
def report(urls: tuple[str, ...], out: str | None, queries: int, predictions: bool) -> dict[str, Any]:
    """Write one HTML page about runs, to read and to search: it opens from a disk and needs no network.

    Data, training, negative tables, metrics (of `extremis evaluate`), and queries with their positives, predictions and
    hard negatives as text. Several runs of the same DATA, or of versions before it, are compared. Without DATA, the
    queries are left out.

    \b
    Examples:
      extremis report data/ runs/1
      extremis report data/ runs/1 runs/2 --out compared.html
    """
    from extremis.reporting.build import build

    body = build(urls, out, say, queries, predictions)
    say(f"{body['out']}: {body['bytes']:,} bytes in {body['seconds']} s; open it in a browser")
    return body
