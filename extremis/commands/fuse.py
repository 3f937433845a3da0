"""`extremis fuse`."""

from typing import Any

import click

from extremis.commands.options import POSITIVE, json_option, step_option
from extremis.console import say


@click.command()
@click.argument("data")
@click.argument("run")
@click.option("--split", default="val", help="Queries that the run was not trained on.")
@step_option
@click.option("--shortlist", type=POSITIVE, default=100, help="Number of best labels per query.")
@click.option("--queries", type=POSITIVE, default=10_000, help="The first of the split.")
@json_option
def fuse(data: str, run: str, split: str, step: int | None, shortlist: int, queries: int) -> dict[str, Any]:
    """Learn to fuse the scores of RUN's classifier with those of the labels' texts (NGAME's score fusion).

    A regression tree of depth 7 on both scores and the label's frequency, kept in RUN/fusion. Needs the extra fusion.

    \b
    Examples:
      extremis fuse data/ runs/1
      extremis evaluate data/ runs/1 --scores fused
      extremis export data/ runs/1 exported/ --scores fused
    """
    from trainer.evaluation.fusion.fit import fit_fusion

    manifest = fit_fusion(data, run, split, step, shortlist, queries)
    facts = manifest.parameters
    pairs = f"{facts['pairs']:,} pairs, {facts['positive_pairs']:,} of them right"
    say(f"fitted on {facts['queries']:,} queries of {split}: {pairs}")
    return {"data": data, "run": run, "digest": manifest.digest, **facts}
