"""`extremis report`."""

from os import fspath
from typing import Annotated, Any

from extremis.command import Option, Progress, command
from extremis.commands.shared import Place, Url
from extremis.console import say


@command()
def report(
    *urls: Annotated[Place, Option(metavar="[DATA] RUN [RUN...]")],
    out: Url | None = None,
    queries: Annotated[int, Option(ge=0, le=1000)] = 300,
    predictions: bool = True,
    progress: Progress = True,
) -> dict[str, Any]:
    """Write one HTML page about runs, with a search. The page works from a disk, without a network.

    The page shows data, training, tables of negatives, metrics (from `extremis evaluate`), and queries with positives,
    predictions and hard negatives as text. It compares several runs on the same DATA, or on earlier versions of DATA.
    Without DATA, the page does not contain queries.

    Options:
        out: URL of the page. Default: report.html in the first RUN.
        queries: Number of queries to show.
        predictions: Load each run's checkpoint, and show predictions.

    Examples:
      extremis report data/ runs/1
      extremis report data/ runs/1 runs/2 --out compared.html
    """
    from extremis.reporting.page import build

    body = build([fspath(url) for url in urls], None if out is None else fspath(out), say, queries, predictions)
    say(f"{body['out']}: {body['bytes']:,} bytes in {body['seconds']} s; open it in a browser")
    return body
