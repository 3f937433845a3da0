"""`extremis evaluate`."""

from typing import Any

import click

from extremis.commands.options import POSITIVE, comma_list, device_option, output_options, step_option
from extremis.console import metrics_table, say, table


@click.command()
@click.argument("data")
@click.argument("run")
@click.option("--split", default="test", help="A split of DATA, or holdout: the rows that the run held out.")
@step_option
@click.option("--limit", type=POSITIVE, help="Number of queries to score, the first ones. Default: all.")
@click.option("--no-filter", is_flag=True, help="Keep the filter's pairs among the predictions.")
@click.option(
    "--k",
    "ks",
    type=comma_list(click.IntRange(1, 1000), "numbers from 1 to 1000 with commas between"),
    default=(),
    metavar="K,...",
    help="More values of k, e.g. 20,100; at most 1000.",
)
@click.option("--zero-shot", is_flag=True, help="Also score the labels without a training point separately.")
@click.option("--seen-only", is_flag=True, help="Rank only labels with a training point. Default: all labels.")
@click.option(
    "--scores",
    type=click.Choice(["classifier", "labels", "sum", "fused"]),
    default="classifier",
    help="Rank by the run's vectors, by its embeddings of the labels' texts, by their sum, or fused (extremis fuse).",
)
@click.option("--baseline", is_flag=True, help="Also score popular labels, and nearest texts by TF-IDF.")
@device_option
@output_options
def evaluate(data: str, run: str, no_filter: bool, device: str, **options: Any) -> dict[str, Any] | None:
    """Score a checkpoint of RUN on a split of DATA: P, nDCG, R, PSP and PSnDCG at 1, 3, 5, 10.

    RUN may be on a version before DATA: it predicts the labels that it knows, and later ones count as missed.

    \b
    Examples:
      extremis evaluate data/ runs/1 --split test --json
      extremis evaluate data/ runs/1 --k 20,100 --zero-shot
      extremis evaluate data/ runs/1 --baseline
      extremis evaluate data/ runs/1 --scores fused
      torchrun --nproc-per-node 2 -m extremis evaluate data/ runs/1
    """
    from extremis.evaluating import evaluate as evaluating
    from extremis.training.ranks import joined

    evaluate_options = evaluating.EvaluateOptions(filter=not no_filter, **options)
    with joined() as group:
        report = evaluating.evaluate(data, run, evaluate_options, group, device)
    if not group.first:
        return None
    split = evaluate_options.split
    metrics_table(f"{split}: {report['queries']:,} queries, {report['filter_pairs']:,} filter pairs", report)
    _show_parts(report)
    if "metrics" in report.get("seen", {}):
        _show_seen(split, report)
    if evaluate_options.baseline:
        _show_baselines(split, report)
    if evaluate_options.zero_shot:
        _show_zero_shot(report["zero_shot"])
    if "PSP@1" not in report["metrics"]:
        say("no PSP: this data set does not state its propensity constants (extremis shard --propensity A,B)")
    kept = "kept in the run; " if evaluate_options.standard else ""
    say(f"{run}, step {report['step']:,}: {kept}next: extremis report {data} {run}")
    return {"data": data, "run": run, "split": split, **report}


def _show_parts(report: dict[str, Any]) -> None:
    """Print metrics by the part of a version that queries, and labels, came with."""
    names = ("P@1", "P@5", "PSP@5")
    for key, title, counted, shown in (
        ("parts", "by part of the queries", "queries", names),
        ("labels_by_part", "positives found, by part that brought their label", "positives", ("R@1", "R@5")),
    ):
        parts = report.get(key, {})
        columns = [name for name in shown if any(name in metrics for metrics in parts.values())]
        rows = [[p, f"{m[counted]:,}", *(f"{m[name]:.2f}" for name in columns)] for p, m in parts.items()]
        if rows:
            table(title, ["part", counted, *columns], rows)


def _show_seen(split: str, report: dict[str, Any]) -> None:
    """Print how far queries that repeat a training point flatter the metrics."""
    seen, unseen = report["seen"], report["unseen"]
    values = [f"P@1 {part['metrics']['P@1']:.2f}" for part in (seen, unseen)]
    say(
        f"{seen['queries']:,} queries of {split} have the text of a training point: {values[0]} on these, {values[1]} "
        f"on the other {unseen['queries']:,}"
    )


def _show_baselines(split: str, report: dict[str, Any]) -> None:
    """Print the model's metrics and those of the baselines on the same queries, and which of them are above it."""
    model = report["beside_baselines"]
    names = [name for name in ("P@1", "P@5", "PSP@5") if name in model["metrics"]]
    lines = {"this run": model["metrics"], **report["baselines"]}
    table(
        f"beside baselines, on the first {model['queries']:,} queries of {split}",
        ["%", *names],
        [[line, *(f"{metrics[name]:.2f}" for name in names)] for line, metrics in lines.items()],
    )
    for line, metrics in report["baselines"].items():
        above = [name for name in names if metrics[name] > model["metrics"][name]]
        if above:
            say(f"odd: {', '.join(above)} of this run: below {line}")


def _show_zero_shot(report: dict[str, Any]) -> None:
    """Print the tables of `ZeroShot.report`."""
    labels, queries = f"{report['labels']:,}", report["queries"]
    if not queries:
        say(f"no query of the split has one of the {labels} labels without a training point")
        return
    title = f"{labels} zero-shot labels, {queries:,} queries that have one"
    metrics_table(f"{title}, ranked among themselves", report["alone"])
    metrics_table(f"{title}, ranked among all labels", report["among_all"])
