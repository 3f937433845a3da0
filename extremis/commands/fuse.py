"""`extremis fuse`."""

from typing import Any

import click

from extremis.commands.options import POSITIVE, device_option, output_options, step_option
from extremis.console import say
from schemas.sizes import parse_bytes


@click.command()
@click.argument("data")
@click.argument("run")
@click.option("--by", type=click.Choice(["weights", "tree"]), default="weights", help="Sum of scores, or NGAME's tree.")
@click.option("--split", help="Queries that the run was not trained on. Default: those it held out, or val.")
@step_option
@click.option("--shortlist", type=POSITIVE, default=100, help="Best labels per query that are ranked again.")
@click.option("--queries", type=POSITIVE, default=10_000, help="Queries to learn from, the first of the split.")
@click.option("--memory", default="4GiB", metavar="SIZE", help="Limit of the memory of training points.")
@device_option
@output_options
def fuse(data: str, run: str, by: str, memory: str, **options: Any) -> dict[str, Any]:
    """Learn to add other scores to those of RUN's vectors, on queries that RUN was not trained on.

    By weights: adds the scores of the labels' texts, and the votes of each query's nearest training points, whose
    embeddings are kept. By tree: NGAME's regression tree of depth 7 on the scores of the vectors and of the texts and
    on the label's frequency; it needs the extra `fusion` (scikit-learn). The result is kept in RUN/fusion, in place of
    an earlier one.

    \b
    Examples:
      extremis fuse data/ runs/1
      extremis evaluate data/ runs/1 --scores fused
      extremis export data/ runs/1 exported/ --scores fused
    """
    from trainer.evaluation.fitting import FitOptions

    fit_options = FitOptions(**options)
    if by == "tree":
        from trainer.evaluation.fitting import fit_tree

        manifest = fit_tree(data, run, fit_options)
        facts = manifest.parameters
        pairs = f"{facts['pairs']:,} pairs, {facts['positive_pairs']:,} of them right"
        say(f"fitted on {facts['queries']:,} queries of {facts['split']}: {pairs}")
    else:
        from trainer.evaluation.fitting import describe_weights, fit_weights

        manifest = fit_weights(data, run, fit_options, parse_bytes(memory))
        say(describe_weights(manifest.parameters))
    say(f"kept in {run}; next: extremis evaluate {data} {run} --scores fused")
    return {"data": data, "run": run, "digest": manifest.digest, **manifest.parameters}
