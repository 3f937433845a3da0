"""`extremis evaluate` and `fuse`: how good a checkpoint is, and by which scores."""

from typing import Any

import click

from extremis.commands.options import Depths, json_option
from extremis.console import metrics_table, print_json, say


@click.command()
@click.argument("data")
@click.argument("run")
@click.option("--split", default="test", show_default=True)
@click.option("--step", type=click.IntRange(0), help="The checkpoint's step. Default: the newest.")
@click.option("--limit", type=click.IntRange(1), help="Only the first queries.")
@click.option("--no-filter", is_flag=True, help="Leave the filter's pairs among the predictions.")
@click.option("--k", "ks", type=Depths(), default=(), metavar="K,...", help="Also at these k, e.g. 100; 1000 at most.")
@click.option("--zero-shot", is_flag=True, help="Also report labels without a training point apart.")
@click.option("--seen-only", is_flag=True, help="Rank only labels with a training point. Default: all labels.")
@click.option(
    "--scores",
    "by",
    type=click.Choice(["classifier", "labels", "sum", "fused"]),
    default="classifier",
    show_default=True,
    help="Rank by the run's vectors, by its embeddings of the labels' texts, by both added, or fused (extremis fuse).",
)
@json_option
def evaluate(
    data: str,
    run: str,
    split: str,
    step: int | None,
    limit: int | None,
    no_filter: bool,
    ks: tuple[int, ...],
    zero_shot: bool,
    seen_only: bool,
    by: Any,
    as_json: bool,
) -> None:
    """Score a checkpoint of RUN on a split of DATA: P, nDCG, R, PSP and PSnDCG at 1, 3, 5, 10.

    \b
    Examples:
      extremis evaluate data/ runs/1 --split test --json
      extremis evaluate data/ runs/1 --k 20,100 --zero-shot
      torchrun --nproc-per-node 2 -m extremis evaluate data/ runs/1
    """
    from extremis.evaluation import evaluate as evaluate_run
    from extremis.training.ranks import joined

    with joined() as group:
        report = evaluate_run(
            data,
            run,
            split,
            step=step,
            limit=limit,
            filter=not no_filter,
            group=group,
            ks=ks,
            seen_only=seen_only,
            zero_shot=zero_shot,
            by=by,
        )
    if not group.first:
        return
    metrics_table(f"{split}: {report['queries']:,} queries, {report['filter_pairs']:,} filter pairs", report)
    if zero_shot:
        _show_zero_shot(report["zero_shot"])
    if "PSP@1" not in report["metrics"]:
        say("no PSP: this data set does not state its propensity constants (extremis shard --propensity A,B)")
    if as_json:
        print_json({"data": data, "run": run, "split": split, **report})


def _show_zero_shot(found: dict[str, Any]) -> None:
    """Tables of `ZeroShot.report`."""
    what = f"{found['labels']:,} zero-shot labels, {found['queries']:,} queries that have one"
    if not found["queries"]:
        say(f"no query of the split has one of the {found['labels']:,} labels without a training point")
        return
    metrics_table(f"{what}, ranked among themselves", found["alone"])
    metrics_table(f"{what}, ranked among all labels", found["among_all"])


@click.command()
@click.argument("data")
@click.argument("run")
@click.option("--split", default="val", show_default=True, help="Queries that the run was not trained on.")
@click.option("--step", type=click.IntRange(0), help="The checkpoint's step. Default: the newest.")
@click.option("--shortlist", type=click.IntRange(1), default=100, show_default=True, help="Best labels of a query.")
@click.option("--queries", type=click.IntRange(1), default=10_000, show_default=True, help="The first of the split.")
@json_option
def fuse(data: str, run: str, split: str, step: int | None, shortlist: int, queries: int, as_json: bool) -> None:
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
    if as_json:
        print_json({"data": data, "run": run, "digest": manifest.digest, **facts})
