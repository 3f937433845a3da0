"""`extremis inspect`, `report` and `plan`: what is there, how it went, what it will take."""

from typing import Any

import click

from extremis.commands.options import Count, json_option
from extremis.console import print_json, say


@click.command()
@click.argument("url")
@click.option("--verify", is_flag=True, help="Read every byte and compare checksums.")
@click.option("--rows", type=click.IntRange(0), default=3, show_default=True, help="Sample rows to print.")
@click.option("--key", help="Only the query of this key, with its labels in words.")
@click.option("--run", metavar="RUN", help="With the hard negatives of this run's newest table.")
@click.option("--split", help="Which queries. Default: train for samples, all of them for a key.")
@json_option
def inspect(
    url: str, verify: bool, rows: int, key: str | None, run: str | None, split: str | None, as_json: bool
) -> None:
    """Say what is at URL: a table, a DATA, a RUN: kinds, rows, shards, parents, sizes, checks, a few rows in words.

    --key and --run take DATA for URL.

    \b
    Examples:
      extremis inspect data/
      extremis inspect runs/1 --verify
      extremis inspect runs/1/negatives/epoch-0005/queries
      extremis inspect data/ --run runs/1 --key N00012
    """
    from extremis.inspecting.inspect import inspect_url

    inspect_url(url, check=verify, rows=rows, key=key, split=split, run=run, as_json=as_json)


@click.command()
@click.argument("urls", metavar="[DATA] RUN [RUN...]", nargs=-1, required=True)
@click.option("--out", metavar="URL", help="Where to. Default: report.html in the first RUN.")
@click.option(
    "--queries", type=click.IntRange(0, 1000), default=300, show_default=True, help="In the searchable sample."
)
@click.option(
    "--predictions/--no-predictions", default=True, show_default=True, help="Load each run's newest checkpoint."
)
@json_option
def report(urls: tuple[str, ...], out: str | None, queries: int, predictions: bool, as_json: bool) -> None:
    """One HTML page about runs, to look at and to search: opens from a disk, needs no network.

    Data, training, negative tables, metrics (of `extremis evaluate`), and queries with their positives, predictions and
    hard negatives as text. Several runs of the same DATA are compared. Without DATA, the queries are left out.

    \b
    Examples:
      extremis report data/ runs/1
      extremis report data/ runs/1 runs/2 --out compared.html
    """
    from extremis.report.build import Options, build

    made = build(urls, out, Options(queries, predictions), say)
    say(f"{made['out']}: {made['bytes']:,} bytes in {made['seconds']} s")
    if as_json:
        print_json(made)


@click.command()
@click.option("--queries", type=Count(), help="N. Default: as many as DATA has.")
@click.option("--labels", type=Count(), help="L. Default: as many as DATA has.")
@click.option("--data", help="A sharded sample of the data: its averages stand for all rows.")
@click.option("--tokens", type=float, default=32, show_default=True, help="Tokens a query, on average.")
@click.option("--label-tokens", type=float, default=8, show_default=True)
@click.option("--labels-per-query", type=float, default=5, show_default=True)
@click.option("--key-bytes", type=float, default=12, show_default=True, help="Characters of a key.")
@click.option("--text-bytes", type=float, default=40, show_default=True, help="Characters of a label's text.")
@click.option("--vocabulary", type=click.IntRange(2), default=30_000, show_default=True, help="Tokens there are.")
@click.option("--recipe", default="astra", show_default=True)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the recipe.")
@click.option("--dimension", type=click.IntRange(1), help="D. Default: the recipe's.")
@click.option("--width", type=click.IntRange(1), help="K of the negative tables. Default: the recipe's.")
@click.option("--epochs", type=click.IntRange(1), help="Default: the recipe's.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Trainer processes.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Pipeline workers.")
@click.option("--memory", default="8GiB", show_default=True, help="What each process may use.")
@click.option(
    "--calibrate/--no-calibrate", default=True, show_default=True, help="Measure this machine, for the times."
)
@json_option
def plan(
    queries: int | None,
    labels: int | None,
    data: str | None,
    recipe: str,
    overrides: tuple[str, ...],
    dimension: int | None,
    width: int | None,
    epochs: int | None,
    memory: str,
    calibrate: bool,
    as_json: bool,
    **averages: Any,
) -> None:
    """Say what a run will take before it is started: bytes of every table, memory and time of every step.

    \b
    Examples:
      extremis plan --queries 370e6 --labels 120e6 --tokens 10 --dimension 64 --memory 64GiB
      extremis plan --data data/ --queries 370e6 --labels 120e6 --no-calibrate --json
    """
    from extremis.planning.plan import plan as make_plan
    from extremis.planning.plan import show, workload
    from trainer.config import load_recipe

    wishes = {"encoder.dimension": dimension, "negatives.width": width, "train.epochs": epochs}
    chosen = (*overrides, *(f"{key}={value}" for key, value in wishes.items() if value is not None))
    planned = workload(data, queries, labels, load_recipe(recipe, chosen), memory, averages)
    report = make_plan(planned, data, calibrate)
    show(report)
    if as_json:
        print_json(report)
