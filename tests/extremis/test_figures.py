"""Every figure of `evaluate` and of the manifests, computed again by a plain program from raw files and predictions."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests import plain_figures as plain
from tests.command import Done, call, sets


@dataclass(frozen=True)
class Measured:
    """A set in two parts, a run on it, an export of the run, and all labels with their training points by id."""

    made: plain.GrowingSet
    data: Path
    run: Path
    exported: Path
    counts: list[tuple[str, int]]

    def predict(self, split: str, *arguments: str | Path) -> dict[str, list[tuple[str, float]]]:
        out = self.run.parent / "predictions.jsonl"
        done(
            "predict", self.exported, "--data", self.data, "--split", split, out, "--k", "99", "--overwrite", *arguments
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
    done(
        "train", "astra", data, run, *sets("train.epochs=3", "order.batch=16", "data.holdout=0.2", "negatives.random=8")
    )
    done("export", data, run, exported, "--calibrate", "--precision", "0.2,0.4")
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


@pytest.mark.parametrize("split", ["test", "val"])
def test_metrics_and_their_groups_are_those_of_the_predictions(measured: Measured, split: str) -> None:
    made, of = measured.made, measured.made.splits[split]
    report = done("evaluate", measured.data, measured.run, "--split", split, "--zero-shot", "--json").json
    scored = measured.predict(split)
    assert scored.keys() == of.texts.keys()
    top = {key: [label for label, _ in row] for key, row in scored.items()}
    assert not {made.retired & {*row} for row in top.values()} - {frozenset()}
    labels, weights = made.active(split), made.inverse_propensity
    labels = {key: labels[key] for key in top if key in labels}
    groups = {
        "seen": [key for key, seen in made.seen(split).items() if seen and key in labels],
        "unseen": [key for key, seen in made.seen(split).items() if not seen and key in labels],
    }
    expected = {
        "queries": len(labels),
        "without_active_labels": len(of.texts) - len(labels),
        "filter_pairs": sum(map(len, of.filters.values())),
        "version": {"number": 2, "part": "two"},
        "metrics": plain.metrics(top, labels, weights),
        "deciles": plain.deciles(top, labels, measured.counts),
        "labels_by_frequency": plain.recall_of_groups(
            top, labels, {label: plain.frequency_group(count) for label, count in measured.counts}
        ),
        "labels_by_part": plain.recall_of_groups(top, labels, made.label_parts),
    }
    for name, keys in groups.items():
        some = {key: labels[key] for key in keys}
        expected[name] = {"queries": len(some), "metrics": plain.metrics(top, some, weights)}
    parts = {part: {key: row for key, row in labels.items() if of.parts[key] == part} for part in ("0001", "two")}
    if all(parts.values()):
        expected["parts"] = {
            p: {"queries": len(some), **plain.metrics(top, some, weights)} for p, some in parts.items()
        }
    same(report, expected)
    assert report["weakest"]["queries"] == plain.weakest_queries(top, labels)
    keys = [label for label, _ in measured.counts]
    weakest = {keys[label]: (found, count) for label, found, count in report["weakest"]["labels"]}
    assert weakest == plain.weakest_labels(top, labels)
