"""`extremis inspect`."""

from typing import Any

import click

from extremis.commands.options import NOT_NEGATIVE, output_options


@click.command()
@click.argument("url")
@click.option("--verify", is_flag=True, help="Read every byte and compare checksums.")
@click.option("--rows", type=NOT_NEGATIVE, default=3, help="Sample rows to print.")
@click.option("--key", help="Show only the query with this key, and the texts of its labels.")
@click.option("--run", metavar="RUN", help="Show the hard negatives of this run's newest table.")
@click.option("--split", help="Split of the queries. Default: train for samples, all splits for a key.")
@output_options
def inspect(url: str, **options: Any) -> dict[str, Any]:
    """Describe what is at URL (a table, a DATA, a RUN): kinds, rows, shards, parents, sizes, checks, some rows as text.

    --key and --run take DATA for URL.

    \b
    Examples:
      extremis inspect data/
      extremis inspect runs/1 --verify
      extremis inspect runs/1/negatives/epoch-0005/queries
      extremis inspect data/ --run runs/1 --key N00012
    """
    from extremis.inspecting.inspect import inspect_url

    return inspect_url(url, **options)
