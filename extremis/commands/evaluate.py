"""`extremis evaluate`."""

from collections.abc import Sequence
from os import fspath
from typing import Annotated, Any, Literal

from extremis.command import Option, Progress, comma_list, command
from extremis.commands.shared import Device, Place, Positive, Step
from extremis.console import metric_grid, say, table


def _k(text: str) -> int:
    if not 1 <= (k := int(text)) <= 1000:
        raise ValueError(text)
    return k


_ks = comma_list(_k, "comma-separated numbers from 1 to 1000")


@command()
def evaluate(
    data: Place,
    run: Place,
    *,
    split: str = "test",
    step: Step | None = None,
    limit: Positive | None = None,
    no_filter: bool = False,
    k: Annotated[Sequence[int], Option(metavar="K,...", parse=_ks)] = (),
    zero_shot: bool = False,
    seen_only: bool = False,
    scores: Literal["classifier", "labels", "sum", "fused"] | None = None,
    baseline: bool = False,
    calibrate: bool = False,
    device: Device = "auto",
    progress: Progress = True,
) -> dict[str, Any] | None:
    """Score a checkpoint of RUN on a split of DATA: P, nDCG, R, PSP and PSnDCG at 1, 3, 5, 10.

    If RUN was trained on an earlier version of DATA, RUN predicts only labels of that version, also with a fusion, and
    newer labels count as missed.

    Options:
        split: A split of DATA, or holdout, the rows that were held out of training.
        limit: Number of queries to score, from the start of the split. Default: all.
        no_filter: Do not remove pairs in the filter file from the predictions.
        k: Additional values of k, e.g. 20,100; at most 1000.
        zero_shot: Also score the labels without training points separately.
        seen_only: Rank only labels with training points. Default: all labels.
        scores: Scores to rank by: classifier (label vectors), labels (embeddings of the labels' texts), sum (of both),
            or fused (extremis fuse). Default: fused, if the checkpoint has a fusion.
        baseline: Also score baselines on the same queries: popular labels, nearest texts by TF-IDF, a linear ranker.
        calibrate: Also evaluate probabilities, from the curve that an export has: fitted on val or, if there is no
            val, on the held-out rows of RUN. Needs scikit-learn (extra fusion).

    Examples:
      extremis evaluate data/ runs/1 --split test --json
      extremis evaluate data/ runs/1 --k 20,100 --zero-shot
      extremis evaluate data/ runs/1 --baseline
      extremis evaluate data/ runs/1 --step newest --scores classifier
      torchrun --nproc-per-node 2 -m extremis evaluate data/ runs/1
    """
    from extremis.evaluation import EvaluateOptions
    from extremis.evaluation import evaluate as evaluate_run
    from extremis.supervisor import joined_ranks
    from scoring.calibration import describe_calibration

    data, run = fspath(data), fspath(run)
    options = EvaluateOptions(
        split, step, limit, not no_filter, tuple(k), seen_only, zero_shot, scores, baseline, calibrate
    )
    with joined_ranks() as group:
        report = evaluate_run(data, run, options, group, device)
    if not group.first:
        return None
    scored, left_out = report["queries"], report["without_active_labels"]
    of = f" of {scored + left_out:,} queries ({left_out:,} have no active label)" if left_out else " queries"
    table(f"{split}: {scored:,}{of}, {report['filter_pairs']:,} filter pairs", *metric_grid(report))
    _show_parts(report)
    if "metrics" in report.get("seen", {}):
        _show_seen(split, report)
    if baseline:
        _show_baselines(split, report)
    if calibrate:
        facts = report["calibration"]
        rows = f"{facts['queries']:,} queries of {facts['split']}"
        on_halves = f"(each half of {rows} by a curve fitted to the other half)"
        say(describe_calibration(facts, on_halves if facts["split"] == split else f"of {split}, learned on {rows}"))
    if zero_shot:
        _show_zero_shot(report["zero_shot"])
    if "PSP@1" not in report["metrics"]:
        say("no PSP: this data set has no propensity constants (set them with extremis shard --propensity A,B)")
    kept = "saved in the run; " if options.is_standard else ""
    say(f"{run}, step {report['step']:,}, scores {report['scores']}: {kept}next: extremis report {data} {run}")
    return {"data": data, "run": run, "split": split, **report}


def _show_parts(report: dict[str, Any]) -> None:
    """Print shares of found positives by training points; for a version, also metrics by part of queries and labels."""
    names = {name: name for name in ("P@1", "P@5", "PSP@5")}
    recalls = {"R@1": "among the first 1", "R@5": "among the first 5"}  # of all positives; R@k is a mean over queries
    for key, title, group, counted, shown in (
        ("labels_by_frequency", "% of positives found, by the label's training points", "points", "positives", recalls),
        ("parts", "by the part that added the query", "part", "queries", names),
        ("labels_by_part", "% of positives found, by the part that added the label", "part", "positives", recalls),
    ):
        parts = report.get(key, {})
        columns = [name for name in shown if any(name in metrics for metrics in parts.values())]
        rows = [[p, f"{m[counted]:,}", *(f"{m[name]:.2f}" for name in columns)] for p, m in parts.items()]
        if rows:
            table(title, [group, counted, *(shown[name] for name in columns)], rows)


def _show_seen(split: str, report: dict[str, Any]) -> None:
    """Print how metrics differ between queries that repeat the text of a training point and other queries."""
    seen, unseen = report["seen"], report["unseen"]
    values = [f"P@1 {part['metrics']['P@1']:.2f}" for part in (seen, unseen)]
    low, high = report["gain_of_seen"]["P@1"]
    by = report["metrics"]["P@1"] - unseen["metrics"]["P@1"]
    verdict = "lower on these" if high < 0 else "no clear difference" if low <= 0 else f"P@1 above is {by:.2f} too high"
    say(
        f"{seen['queries']:,} queries of {split} repeat the text of a training point: {values[0]} on these queries, "
        f"{values[1]} on the other {unseen['queries']:,}, with a difference of {low:+.2f} to {high:+.2f}: {verdict}"
    )


def _show_baselines(split: str, report: dict[str, Any]) -> None:
    """Print the metrics of the model and the baselines on the same queries, and warn if a baseline beats the model."""
    model = report["beside_baselines"]
    names = [name for name in ("P@1", "P@5", "PSP@5") if name in model["metrics"]]
    rows, lines = list[list[str]](), {"this run": model["metrics"], **report["baselines"]}
    for line, metrics in lines.items():
        ends = report["gains"].get(line, {})
        cells = [f" ({ends[name][0]:+.1f} to {ends[name][1]:+.1f})" if ends else "" for name in names]
        rows.append([line, *(f"{metrics[name]:.2f}{cell}" for name, cell in zip(names, cells, strict=True))])
    title = (
        f"compared with baselines, on {model['queries']:,} queries of {split}; in brackets: 95 % interval of the gain"
    )
    table(title, ["%", *names], rows)
    for line, ends in report["gains"].items():
        above = [name for name in names if ends[name][1] < 0]
        if above:
            say(f"odd: {', '.join(above)} of this run is clearly lower than for the baseline {line}")


def _show_zero_shot(report: dict[str, Any]) -> None:
    labels, queries = f"{report['labels']:,}", report["queries"]
    if not queries:
        say(f"no query of the split has any of the {labels} labels without training points")
        return
    title = f"{labels} zero-shot labels, {queries:,} queries with such a label"
    table(f"{title}, ranked among themselves", *metric_grid(report["alone"]))
    table(f"{title}, ranked among all labels", *metric_grid(report["among_all"]))
