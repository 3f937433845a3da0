"""Evaluation of a run's checkpoint on a split of its data."""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from extremis.console import Bar, keep, metric_grid, show_activity
from extremis.inspecting import clean_text
from extremis.label_tables import (
    name_figures,
    path_beside,
    require_labels_file,
    summarize_labels,
    write_labels,
)
from extremis.result import Grid
from extremis.summary import seen_queries
from extremis.supervisor import record_command
from schemas import PAD, storage
from schemas.errors import option
from schemas.layout import DataLayout, RunLayout
from schemas.owners import require_output_file
from schemas.storage import read_json, write_json
from schemas.table import Table
from schemas.versions import Version
from scoring.baselines import compare_baselines
from scoring.calibration import (
    DEEPEST,
    Calibration,
    ScoredPredictions,
    calibrate,
    describe_calibration,
    measure,
    open_fragments,
    share_of_fragments,
)
from scoring.decision import BEST, LabelIds, Rule, choose, decision_of, reached
from scoring.fitting import open_fused, open_fusion, scores_of
from scoring.label_sets import LabelSets
from scoring.options import EvaluateOptions
from trainer.device import open_device
from trainer.evaluation.evaluate import KS, SplitScorer, SplitScores, label_statistics, open_held_out
from trainer.evaluation.metrics import bootstrap
from trainer.evaluation.ranking import By, Ranked, Ranking
from trainer.group import ALONE, Group
from trainer.model import load_model, trained_digest, trained_labels
from trainer.recipe_files import load_config

DEFAULTS = EvaluateOptions()


def evaluate(data: str, run: str, options: EvaluateOptions = DEFAULTS, group: Group = ALONE) -> dict[str, Any]:
    """Return figures of a run's checkpoint with intervals, the same on every rank. Raises ExtremisError.

    If the run was trained on an earlier version of DATA, it predicts only labels of that version, also with a fusion,
    but all labels of DATA count. Rank 0 keeps a report, as options say; "record" is its URL, if it is kept.
    """
    show_activity("evaluate: reading the model")
    layouts = DataLayout(data), RunLayout(run)
    if options.labels is not None:
        group.decide(lambda: require_labels_file(options, [data, run]))
    rule = group.decide(lambda: Rule.of(BEST.narrowed(decision_of(options)), LabelIds.of_data(layouts[0])))
    is_calibrated = options.calibrate or rule.decision.limit is not None
    later, step = group.decide(lambda: (_later(data, run), layouts[1].scored_step(options.step)))
    recipe, model, checkpoint = load_model(*layouts, step, group, open_device(options.device), earlier=True)
    record = layouts[1].evaluation(options.split, checkpoint.step, later)
    place = (options.out or layouts[1].evaluations) + record.removeprefix(layouts[1].evaluations)
    keeps = options.out is not None or (options.save and options.is_standard)
    if options.out is not None:
        group.decide(lambda: require_output_file(place, [data, run], "", may_replace=True))
    before = group.decide(lambda: read_json(place) if keeps and storage.exists(place) else {})
    own: By = group.decide(lambda: scores_of(run, checkpoint.step))
    by = options.scores or own
    statistics = label_statistics(DataLayout(data), recipe.data)
    if by != "labels":  # a dual encoder can embed the text of any label
        statistics = replace(statistics, trained_labels=trained_labels(model, checkpoint))

    def open_scorer(split: str) -> SplitScorer:
        if by in ("classifier", "fused"):
            fused = open_fused(data, run, checkpoint, model, split, group) if by == "fused" else None
            ranking = Ranking.of(model, group, fused)
        else:
            fused, ranking = None, Ranking.by_texts(model, layouts[0], group, add=by == "sum")
        scorer = SplitScorer.open(layouts[0], model, split, group, ranking, statistics, recipe.data)
        # A fusion ranks other labels beyond its shortlist, which would change the metrics.
        depth = min(fused.shortlist if fused else DEEPEST, _MOST_RANKED // max(1, scorer.rows))
        deep = _DeepRanking(ranking.labels, ranking.rerank, max(depth, rule.decision.max_labels or 0))
        return replace(scorer, ranking=deep)

    held_out, fragments = None, None
    if is_calibrated:
        named = "val" if "queries/val" in Table.open(data, "data").parents else None  # as in an export
        held_out, _, _ = group.decide(lambda: open_held_out(layouts[0], named, recipe.data, "A calibration"))
        fragments = open_fragments(layouts[0], model.columns)

    @functools.cache
    def left_out(split: str) -> tuple[Sequence[int], Sequence[int]]:
        return open_fusion(data, run, checkpoint).left_out(split) if by == "fused" else ((), ())

    def predictions_of(split: str) -> ScoredPredictions:
        return ScoredPredictions(fragments, *(left_out(split) if is_calibrated else ()))

    scorer, predictions = open_scorer(options.split), predictions_of(options.split)
    sets, shares = LabelSets(len(statistics.frequency)), [np.zeros(0)]

    def collect(*batch: Any) -> None:
        sets.collect(*batch)
        if is_calibrated:
            predictions.collect(*batch)
            shares.append(np.broadcast_to(share_of_fragments(batch[-1].tokens, fragments), len(batch[0])))

    choices: dict[str, Any] = {"filter": not options.no_filter, "ks": options.k, "seen_only": options.seen_only}
    with Bar(f"evaluate {options.split}", scorer.rows, quiet=not group.first) as bar:
        scores = scorer.score(options.limit, bar.update, zero_shot=options.zero_shot, collect=collect, **choices)
    calibration, curve = {}, None
    if held_out:
        show_activity(f"evaluate: calibrating on {held_out}")
        learned_from = predictions
        if held_out != options.split or not options.is_standard:
            learned_from = predictions_of(held_out)
            open_scorer(held_out).score(collect=learned_from.collect)
        curve, facts = calibrate(learned_from)
        facts = facts if held_out == options.split else measure(curve, predictions)
        described = {"split": held_out, "queries": learned_from.queries, **curve.described(facts)}
        calibration = {"calibration": described}
    given, facts = _give(rule, sets, curve, np.concatenate(shares))
    show_activity("evaluate: computing intervals")
    version = Version.of(Table.open(data, "data").manifest)
    report = {
        "step": checkpoint.step,
        "scores": by,
        "version": {"number": version.number, "part": version.part},
        **scores.report(),
        "averages": sets.at_k({*KS, *options.k}),
        "at_decision": facts,
        **calibration,
    }
    given_away = group.decide(lambda: left_out(options.split)[1])
    report |= {"given_away": len(given_away)} if given_away else {}
    show_activity("evaluate: comparing texts with the training texts")
    if options.limit is None:
        report |= group.decide(lambda: _seen_and_unseen(data, options.split, scores))
    kept = _kept(before, report["metrics"])
    if options.baseline or kept is None:
        show_activity("evaluate: measuring baselines")
        report |= group.decide(lambda: compare_baselines(layouts[0], recipe.data, scorer, scores, **choices))
    report = {**(kept or {}), **report}
    show_activity("evaluate: making the table of labels")

    def keep_results() -> dict[str, Any]:
        table = name_figures(sets.of_labels(given), layouts[0], scorer.queries, scores.ids, statistics.frequency)
        labels = summarize_labels(table, sets.rankings.top.shape[1])

        def save() -> None:
            write_labels(table, path_beside(place))
            write_json(place, {"split": options.split, **report, "labels": labels})
            if options.out is None:
                record_command(layouts[1])

        is_kept, own = keeps and keep(place, save, asked=options.out is not None), options.labels
        is_written = own is not None and keep(own, lambda: write_labels(table, own), asked=True)
        file = own if is_written else path_beside(place) if is_kept else None
        return {"labels": {**labels, "file": file}, "record": place if is_kept else None}

    return report | group.decide(keep_results)


_MOST_RANKED = 20_000_000  # labels in all rankings of a split that are kept, 180 MB; of fewer queries, DEEPEST each


@dataclass(frozen=True, eq=False)
class _DeepRanking(Ranking):
    """Ranks at least `depth` labels, for the figures of labels."""

    depth: int = 0

    def top_k(self, x: Any, k: int, *others: Any) -> Ranked:
        return super().top_k(x, max(k, self.depth), *others)


def _give(
    rule: Rule, sets: LabelSets, curve: Calibration | None, fragments: np.ndarray
) -> tuple[np.ndarray, dict[str, Any]]:
    """Return which labels of the rankings a decision gives, bool [N, K], and a description of these sets.

    `fragments` [N]: the share of fragments in each query's text. `cut_off`: number of queries to which more than the K
    best labels might be given.
    """
    top, reach = sets.rankings.top, reached(rule.decision, curve, sets.rankings.scores)
    if rule.may_give is not None:
        top = np.where(rule.may_give[top], top, PAD)
    if curve is not None and rule.decision.limit is not None:
        reach &= ~curve.is_none(np.full(len(top), np.inf), fragments)[:, None]
    chosen = choose(top, reach, rule.decision, rule.groups)
    decision, cut_off = {"decision": rule.decision.name, "limit": rule.decision.limit}, int((~chosen.certain).sum())
    facts = {**decision, "depth": top.shape[1], "cut_off": cut_off}
    return chosen.given, facts | sets.averages(chosen.given)


def _later(data: str, run: str) -> str | None:
    """Return DATA's digest if DATA is a later version of the data that the run was trained on. Raises InputError."""
    digest = Table.open(data, "data").digest
    return None if trained_digest(load_config(RunLayout(run).config)) == digest else digest


def _kept(before: dict[str, Any], metrics: dict[str, float]) -> dict[str, Any] | None:
    """Return the evaluation `before` if it has the same `metrics`; None if its baselines must be measured again."""
    is_same = all(metrics.get(name, value) == value for name, value in before.get("metrics", {}).items())
    return before if is_same else None if "baselines" in before else {}


def _seen_and_unseen(data: str, split: str, scores: SplitScores) -> dict[str, Any]:
    """Return metrics of "seen" queries (with a text that is also in train) and of "unseen" queries, if both exist.

    "gain_of_seen": 95 % intervals of the metrics on seen queries minus the metrics on unseen queries.
    """
    seen = seen_queries(data, split)
    if seen is not None:
        seen = seen[scores.counted]
    if seen is None or seen.all() or not seen.any():
        return {} if seen is None else {"seen": {"queries": int(seen.sum())}}
    parts = {"seen": seen, "unseen": ~seen}
    gains = bootstrap(scores.metrics.contributions(), texts=scores.metrics.texts, part=seen)
    return {
        **{name: {"queries": int(on.sum()), "metrics": scores.metrics.result(on)} for name, on in parts.items()},
        "gain_of_seen": {name: list(ends) for name, ends in gains.items()},
    }


_COMPARED = ("P@1", "P@5", "PSP@5")  # with baselines, and between parts


def _name(text: str, key: str) -> str:
    return clean_text(text or key, 30)


def view(report: dict[str, Any], split: str) -> Iterator[Grid | str]:
    """Yield the tables and lines that describe a report."""
    scored, left_out = report["queries"], report["without_active_labels"]
    of = f" of {scored + left_out:,} queries ({left_out:,} have no active label)" if left_out else " queries"
    columns, rows = metric_grid(report)
    rows += [[f"{name} F1", *(f"{f1:.2f}" for f1 in by_k.values())] for name, by_k in report["averages"].items()]
    yield Grid(f"{split}: {scored:,}{of}, {report['filter_pairs']:,} filter pairs", columns, rows)
    at, labels = report["at_decision"], report["labels"]
    means = {"mean over queries": "samples", "all pairs (micro)": "micro", "mean over labels (macro)": "macro"}
    rows = [[name, *(f"{value:.2f}" for value in at[key].values())] for name, key in means.items()]
    yield Grid(f"labels given ({at['decision']}): {at['predictions']:.2f} per query", ["%", *at["micro"]], rows)
    rows = [
        [
            _name(row["text"], row["label"]),
            *(f"{row[name]:,}" for name in ("training_points", "support", "found", "predicted")),
            ", ".join(_name(*pair) for pair in zip(row["missed_for_texts"], row["missed_for"], strict=True)),
        ]
        for row in labels["weakest"][:5]
    ]
    if rows:
        columns = ["label", "training points", "positives", "found", "given", "given instead"]
        yield Grid("labels that are found least often", columns, rows)
    same = {name: name for name in _COMPARED}
    recalls = {"R@1": "among the first 1", "R@5": "among the first 5"}  # of all positives; R@k is a mean over queries
    for key, title, group, counted, shown in (
        ("labels_by_frequency", "% of positives found, by the label's training points", "points", "positives", recalls),
        ("parts", "by the part that added the query", "part", "queries", same),
        ("labels_by_part", "% of positives found, by the part that added the label", "part", "positives", recalls),
    ):
        parts = report.get(key, {})
        columns = [name for name in shown if any(name in metrics for metrics in parts.values())]
        rows = [[p, f"{m[counted]:,}", *(f"{m[name]:.2f}" for name in columns)] for p, m in parts.items()]
        if rows:
            yield Grid(title, [group, counted, *(shown[name] for name in columns)], rows)
    if "baselines" in report:
        model = report["beside_baselines"]
        names = [name for name in _COMPARED if name in model["metrics"]]
        rows = []
        for line, metrics in {"this run": model["metrics"], **report["baselines"]}.items():
            ends = report["gains"].get(line, {})
            cells = [f" ({ends[name][0]:+.1f} to {ends[name][1]:+.1f})" if ends else "" for name in names]
            rows.append([line, *(f"{metrics[name]:.2f}{cell}" for name, cell in zip(names, cells, strict=True))])
        title = f"compared with baselines, on {model['queries']:,} queries of {split}"
        yield Grid(f"{title}; in brackets: 95 % interval of the gain", ["%", *names], rows)
    if "zero_shot" in report and report["zero_shot"]["queries"]:
        zero_shot = report["zero_shot"]
        title = f"{zero_shot['labels']:,} zero-shot labels, {zero_shot['queries']:,} queries with such a label"
        yield Grid(f"{title}, ranked among themselves", *metric_grid(zero_shot["alone"]))
        yield Grid(f"{title}, ranked among all labels", *metric_grid(zero_shot["among_all"]))


def remarks(report: dict[str, Any], split: str) -> Iterator[str]:
    """Yield sentences about a report: what differs between queries, and what is odd."""
    if "metrics" in report.get("seen", {}):
        seen, unseen = report["seen"], report["unseen"]
        values = [f"P@1 {part['metrics']['P@1']:.2f}" for part in (seen, unseen)]
        low, high = report["gain_of_seen"]["P@1"]
        by = report["metrics"]["P@1"] - unseen["metrics"]["P@1"]
        clear = f"P@1 of all queries is {by:.2f} too high"
        verdict = "lower on these" if high < 0 else "no clear difference" if low <= 0 else clear
        yield (
            f"{seen['queries']:,} queries of {split} repeat the text of a training point: {values[0]} on these "
            f"queries, {values[1]} on the other {unseen['queries']:,}, with a difference of {low:+.2f} to {high:+.2f}: "
            f"{verdict}"
        )
    if "given_away" in report:
        yield (
            f"{report['given_away']:,} labels have points in {split} alone, and DATA has hardly any other labels "
            f"without points: metrics of {split} are too high; see those that `extremis fuse` printed"
        )
    for line, ends in report.get("gains", {}).items():
        above = [name for name in _COMPARED if name in ends and ends[name][1] < 0]
        if above:
            yield f"odd: {', '.join(above)} of this run is clearly lower than for the baseline {line}"
    at, labels = report["at_decision"], report["labels"]
    if labels["never_found"]:
        yield (
            f"{labels['never_found']:,} of {labels['with_positives']:,} labels with positives are never found "
            f"({labels['never_given']:,} of them are given to no query); all are in "
            f"{labels['file'] or 'the table of ' + option('labels')}"
        )
    if at["cut_off"]:
        yield (
            f"{at['cut_off']:,} queries might be given more than the best {at['depth']} labels, which alone count "
            f"here: a greater {option('k')} counts further labels"
        )
    if "calibration" in report:
        facts = report["calibration"]
        rows = f"{facts['queries']:,} queries of {facts['split']}"
        on_halves = f"(each half of {rows} by a curve fitted to the other half)"
        yield describe_calibration(facts, on_halves if facts["split"] == split else f"of {split}, learned on {rows}")
    if "zero_shot" in report and not report["zero_shot"]["queries"]:
        labels = f"{report['zero_shot']['labels']:,} labels"
        yield f"no query of the split has any of the {labels} without training points"
    if "PSP@1" not in report["metrics"]:
        yield "no PSP: this data set has no propensity constants (set them with extremis shard --propensity A,B)"
