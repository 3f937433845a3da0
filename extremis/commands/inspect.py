"""`extremis inspect`."""

from os import fspath
from typing import Annotated, Any

from extremis.command import Option, Progress, command
from extremis.commands.shared import NotNegative, Place


@command()
def inspect(
    url: Place,
    *,
    verify: bool = False,
    rows: NotNegative = 3,
    key: str | None = None,
    run: Annotated[Place | None, Option(metavar="RUN")] = None,
    split: str | None = None,
    progress: Progress = True,
) -> dict[str, Any]:
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

    run_url = None if run is None else fspath(run)
    return inspect_url(fspath(url), verify=verify, rows=rows, key=key, split=split, run=run_url)
