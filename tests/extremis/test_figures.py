"""Every figure of `evaluate` and of the manifests, computed again by a plain program from raw files and predictions."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from extremis.evaluation import remarks
from schemas.storage import write_json
from tests import plain_figures as plain
from tests.command import Done, call, sets
from trainer.evaluation.metrics import Contributions, bootstrap


@dataclass(frozen=True)
class Measured:
    """A set in two parts, a run on it, an export of the run, and all labels with their training points by id."""

    made: plain.GrowingSet
    data: Path
    run: Path
    exported: Path
    counts: list[tuple[str, int]]

    @property
    def calibration(self) -> dict[str, Any]:
        return json.loads((self.exported / "calibration.json").read_text())

    def predict(self, split: str, *arguments: str | Path) -> dict[str, list[tuple[str, float]]]:
        out = self.run.parent / "predictions.jsonl"
        done(
            "predict",
            self.exported,
            "--data",
            self.data,
            "--split",
            split,
            out,
            "--max-labels",
            "99",
            "--overwrite",
            *arguments,
        )
        return plain.read_predictions(out)


def done(*arguments: str | Path) -> Done:
    result = call(*arguments)
    assert result.status == 0, result.err
    return result


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("figures")
    made = plain.write_growing(folder / "raw")
    options = "--tokenizer", "train:500", "--propensity", f"{plain.A},{plain.B}"
    done("shard", made.first, folder / "data" / "1", *options)
    done("shard", made.second, folder / "data" / "2", "--onto", folder / "data" / "1", "--part", "two")
    data, run, exported = folder / "data" / "2", folder / "run", folder / "exported"
    done("train", "astra", data, run, *sets("train.epochs=3", "order.batch=16", "negatives.random=8"))
    done("export", data, run, exported)
    rows = [row for part in sorted((exported / "labels").glob("*.parquet")) for row in pq.read_table(part).to_pylist()]
    return Measured(made, data, run, exported, [(row["key"], row["frequency"]) for row in rows])


def same(found: Any, expected: Any, where: str = "") -> None:
    """Compare nested figures; `found` may have more keys."""
    if isinstance(expected, dict):
        assert expected.keys() <= found.keys(), where
        for name, value in expected.items():
            same(found[name], value, f"{where} {name}")
    elif isinstance(expected, str):
        assert found == expected, where
    else:
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5), where


def alike(found: list[float], expected: tuple[float, float], where: str) -> None:
    """Two intervals of one distribution by different draws: the ends are within a fifth of the width."""
    width = max(expected[1] - expected[0], found[1] - found[0])
    assert found == pytest.approx(expected, abs=0.2 * width + 1e-4), where


Rankings = dict[str, list[str]]
SEEN = {"seen": True, "unseen": False}


def ranked(scored: dict[str, list[tuple[str, float]]]) -> Rankings:
    return {key: [label for label, _ in row] for key, row in scored.items()}


@pytest.fixture(scope="module", params=["test", "val"])
def split(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def report(measured: Measured, split: str) -> dict[str, Any]:
    options = "--split", split, "--zero-shot", "--baseline", "--calibrate", "--json"
    return done("evaluate", measured.data, measured.run, *options).json


@pytest.fixture(scope="module")
def scored(measured: Measured, split: str) -> dict[str, list[tuple[str, float]]]:
    return measured.predict(split)


@pytest.fixture(scope="module")
def labels(measured: Measured, split: str, scored: dict[str, Any]) -> Rankings:
    """Active labels of the queries that have any, in the split's order."""
    active = measured.made.active(split)
    return {key: active[key] for key in scored if key in active}


def test_metrics_and_their_groups_are_those_of_the_predictions(
    measured: Measured, split: str, report: dict[str, Any], scored: dict[str, Any], labels: Rankings
) -> None:
    made, of, top = measured.made, measured.made.splits[split], ranked(scored)
    assert scored.keys() == of.texts.keys()
    assert not made.retired & {label for row in top.values() for label in row}
    weights, seen = made.inverse_propensity, made.seen(split)
    expected = {
        "queries": len(labels),
        "without_active_labels": len(of.texts) - len(labels),
        "filter_pairs": sum(map(len, of.filters.values())),
        "version": {"number": 2, "part": "two"},
        "metrics": plain.metrics(top, labels, weights),
        "labels_by_frequency": plain.recall_of_groups(
            top, labels, {label: plain.frequency_group(count) for label, count in measured.counts}
        ),
        "labels_by_part": plain.recall_of_groups(top, labels, made.label_parts),
    }
    groups = {name: {k: row for k, row in labels.items() if seen[k] == value} for name, value in SEEN.items()}
    expected |= {n: {"queries": len(some), "metrics": plain.metrics(top, some, weights)} for n, some in groups.items()}
    parts = {part: {key: row for key, row in labels.items() if of.parts[key] == part} for part in ("0001", "two")}
    if all(parts.values()):
        expected["parts"] = {
            p: {"queries": len(some), **plain.metrics(top, some, weights)} for p, some in parts.items()
        }
    same(report, expected)
    for name, interval in plain.intervals(top, labels, weights, of.texts).items():
        alike(report["intervals"][name], interval, name)
    for name, interval in plain.intervals_of_difference(
        top, groups["seen"], groups["unseen"], weights, of.texts
    ).items():
        alike(report["gain_of_seen"][name], interval, name)
    assert report["weakest"]["queries"] == plain.weakest_queries(top, labels)
    weakest = {row["label"]: (row["found"], row["support"]) for row in report["labels"]["weakest"]}
    assert weakest == plain.weakest_labels(top, labels)


def test_zero_shot_labels_are_ranked_alone_and_among_all(
    measured: Measured, split: str, report: dict[str, Any], scored: dict[str, Any], labels: Rankings
) -> None:
    others, texts = measured.run.parent / "others", measured.made.splits[split].texts
    others.write_text("".join(f"{label}\n" for label, _ in measured.counts if label not in plain.UNTRAINED))
    own = {key: [x for x in row if x in plain.UNTRAINED] for key, row in labels.items()}
    own = {key: row for key, row in own.items() if row}
    assert own
    same(report["zero_shot"], {"labels": len(plain.UNTRAINED), "queries": len(own)})
    alone = ranked(measured.predict(split, "--never", f"@{others}"))
    for name, top in (("alone", alone), ("among_all", ranked(scored))):
        found, weights = report["zero_shot"][name], dict.fromkeys(plain.OLD + plain.NEW, 1.0)
        metrics = plain.metrics(top, own, weights)
        same(found["metrics"], {metric: metrics[metric] for metric in found["metrics"]})
        for metric, ends in found["intervals"].items():
            alike(ends, plain.intervals(top, own, weights, texts)[metric], metric)


def test_baselines_are_ranked_for_the_queries_of_the_model(
    measured: Measured, split: str, report: dict[str, Any], scored: dict[str, Any], labels: Rankings
) -> None:
    made, of, train = measured.made, measured.made.splits[split], measured.made.splits["train"]
    weights, asked = made.inverse_propensity, {key: of.texts[key] for key in labels}
    trained = {key: train.texts[key] for key in measured.predict("train")}
    votes = plain.nearest_votes(asked, trained, train.labels)
    ids = {label: number for number, (label, _) in enumerate(measured.counts)}
    nearest = {key: sorted(row, key=lambda x: (-round(row[x], 6), ids[x])) for key, row in votes.items()}
    tops = {"popular labels": plain.popular(measured.counts, labels), "nearest queries by TF-IDF": nearest}
    assert report["beside_baselines"] == {"queries": len(labels), "metrics": report["metrics"]}
    for name, top in tops.items():
        left = {key: [x for x in row if x not in {*made.retired, *of.filters.get(key, ())}] for key, row in top.items()}
        same(report["baselines"][name], plain.metrics(left, labels, weights), name)
        for metric, interval in plain.intervals(ranked(scored), labels, weights, of.texts, left).items():
            alike(report["gains"][name][metric], interval, f"{name} {metric}")


def test_one_curve_is_shipped_and_tested_on_rows_that_it_was_not_fitted_to(
    measured: Measured, split: str, report: dict[str, Any], scored: dict[str, Any], labels: Rankings
) -> None:
    shipped, tested = measured.calibration, report["calibration"]
    val, active = measured.predict("val"), measured.made.active("val")
    assert (shipped["split"], tested["split"]) == ("val", "val")
    assert shipped["queries"] == tested["queries"] == len(active)
    limits = {name: shipped["none_of_these"][name] for name in ("probability", "score", "fragments")}
    same(tested["none_of_these"], limits)
    for name in ("scores", "probabilities"):
        np.testing.assert_allclose(tested["curve"][name], shipped["curve"][name], rtol=1e-4, atol=1e-5)
    bounds = shipped["precision"]
    for place in range(0, len(bounds["scores"]), 20):
        expected = plain.precision_bound(val, active, measured.made.splits["val"].texts, bounds["scores"][place])
        assert bounds["bounds"][place] == pytest.approx(expected, abs=1e-6)
    if split == "val":  # two halves, each by a curve that is fitted to the other half, in both commands
        fields = {name: shipped[name] for name in ("ece", "brier", "uncalibrated")}
        same(tested, {**fields, "none_of_these": shipped["none_of_these"]})
        return
    x, y = shipped["curve"]["scores"], shipped["curve"]["probabilities"]
    assert limits["fragments"] == 0, "all words of the set are tokens"
    same(tested, plain.calibration(lambda score: float(np.interp(score, x, y)), limits["score"], scored, labels))


def test_manifests_count_what_the_files_have(measured: Measured) -> None:
    made, train = measured.made, measured.made.splits["train"]
    for name, of in made.splits.items():
        table = json.loads((measured.data / "queries" / name / "_manifest.json").read_text())
        assert table["rows"] == len(of.texts)
        whole = json.loads((measured.data / "_manifest.json").read_text())["parameters"]
        assert whole["rows"][name] == len(of.texts)
    first = json.loads((measured.data.parent / "1" / "queries" / "train" / "_manifest.json").read_text())
    assert first["counters"]["empty_texts"] == 1
    labels = json.loads((measured.data / "labels" / "_manifest.json").read_text())
    assert labels["rows"] == len(made.labels)
    assert labels["parameters"]["training_points"] == len(train.texts)
    assert labels["counters"]["without_training_points"] == len(plain.UNTRAINED)
    assert dict(measured.counts) == made.frequency
    exported = json.loads((measured.exported / "_manifest.json").read_text())
    assert exported["rows"] == len(made.labels)
    assert exported["parameters"]["training_points"] == len(train.texts)
    assert exported["parameters"]["retired"] == len(made.retired)
    assert exported["parameters"]["calibration"] == measured.calibration


def test_a_later_evaluation_keeps_what_it_does_not_measure(
    measured: Measured, split: str, report: dict[str, Any]
) -> None:
    command = "evaluate", measured.data, measured.run, "--split", split, "--json"
    kept = next((measured.run / "evaluations").glob(f"{split}-*.json"))
    before = json.loads(kept.read_text())
    assert done(*command).json == report
    assert json.loads(kept.read_text()) == before
    if split == "test":
        before["metrics"]["P@1"] += 1  # other scores, as of another fusion
        del before["crc32"], before["calibration"]
        write_json(str(kept), before)
        renewed = done(*command).json
        assert renewed["gains"] == report["gains"]
        assert "zero_shot" not in renewed


@pytest.mark.parametrize(
    ("seen", "unseen", "said"),
    [(0.9, 0.5, "too high"), (0.5, 0.9, ": lower on these"), (0.5, 0.5, "no clear difference")],
)
def test_metrics_are_called_too_high_only_where_seen_texts_score_clearly_higher(
    seen: float, unseen: float, said: str
) -> None:
    is_seen, draw = np.arange(1000) % 4 == 0, np.random.default_rng(0)
    hits = (draw.random(1000) < np.where(is_seen, seen, unseen)).astype(np.float32)
    ends = bootstrap({"P@1": Contributions(hits)}, part=is_seen)["P@1"]
    of = {
        n: {"queries": int(on.sum()), "metrics": {"P@1": 100 * hits[on].mean()}}
        for n, on in (("seen", is_seen), ("unseen", ~is_seen))
    }
    report = {**of, "metrics": {"P@1": 100 * hits.mean()}, "gain_of_seen": {"P@1": ends}}
    assert said in next(remarks(report, "test"))
