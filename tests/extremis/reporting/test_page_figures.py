"""Every figure of a report on two runs, and of `inspect`, computed again by a plain program from raw files."""

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from tests import plain_figures as plain
from tests.command import Done, call, sets
from tests.report_page import Page


@dataclass(frozen=True)
class Reported:
    """A set in two parts, its data, two runs with the second carrying the first one's fusion, and the page."""

    made: plain.GrowingSet
    folder: Path
    page: Page
    counts: list[tuple[str, int]]  # labels by id with training points

    @property
    def data(self) -> Path:
        return self.folder / "data" / "2"

    def predictions(self, split: str) -> dict[str, list[tuple[str, float]]]:
        """The second run's, of all labels."""
        out = self.folder / f"{split}.jsonl"
        done(
            "predict",
            self.folder / "exported",
            "--data",
            self.data,
            "--split",
            split,
            out,
            "--max-labels",
            99,
            "--overwrite",
        )
        return plain.read_predictions(out)

    def top(self, split: str) -> dict[str, list[str]]:
        return {key: [label for label, _ in row] for key, row in self.predictions(split).items()}

    def records(self, run: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text().splitlines()]

    def tokens(self, split: str) -> dict[str, int]:
        tokenizer = Tokenizer.from_file(str(self.data.parent / "1" / "tokenizer" / "tokenizer.json"))
        return {key: len(tokenizer.encode(text).ids) for key, text in self.made.splits[split].texts.items()}


def done(*arguments: object) -> Done:
    result = call(*map(str, arguments))
    assert result.status == 0, result.err
    return result


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Reported:
    folder = tmp_path_factory.mktemp("page")
    made, one, two = plain.write_growing(folder / "raw"), folder / "data" / "1", folder / "data" / "2"
    done("shard", made.first, one, "--tokenizer", "train:500", "--propensity", f"{plain.A},{plain.B}", "--keep-text")
    done("shard", made.second, two, "--onto", one, "--part", "two")
    small = "order.batch=16", "negatives.random=8", "negatives.hard=0"
    done("train", "astra", one, folder / "first", *sets(*small, "train.epochs=3", "data.holdout=0.2"))
    done("fuse", one, folder / "first")
    done("train", "astra", two, folder / "second", "--from", folder / "first", *sets(*small, "train.epochs=2"))
    for run in ("first", "second"):
        for split in ("test", "train"):
            done("evaluate", two, folder / run, "--split", split)
    done("export", two, folder / "second", folder / "exported")
    done("report", two, folder / "first", folder / "second", "--out", folder / "page.html", "--queries", 60)
    rows = [row for part in sorted((folder / "exported/labels").iterdir()) for row in pq.read_table(part).to_pylist()]
    assert {row["key"]: row["frequency"] for row in rows} == made.frequency
    counts = [(row["key"], row["frequency"]) for row in rows]
    return Reported(made, folder, Page((folder / "page.html").read_text()), counts)


def near(found: Iterable[Any], expected: Iterable[float], precision: float = 1e-4) -> None:
    assert [float(value) for value in found] == pytest.approx([*expected], rel=precision, abs=precision)


def names_of(reported: Reported) -> tuple[str, str]:
    first, second = reported.page.body["runs"]
    assert first.endswith("/first (astra)")
    return first, second


def test_held_out_scores_are_those_of_the_run_or_say_whose_they_are(reported: Reported) -> None:
    """The first run's are its own; those that the second carries say so."""
    page, folder = reported.page, reported.folder
    first, second = names_of(reported)
    own, carried = (next(w for w in page.words if w.startswith(f"Scores {of}")) for of in ("of", "carried from"))
    (held_out,) = {int(number) for words in (own, carried) for number in re.findall(r" on (\d+) queries", words)}
    assert own == f"Scores of {first} on {held_out} queries of holdout, in %"
    assert carried == f"Scores carried from {folder}/first, measured there on {held_out} queries of holdout, in %"
    (manifest,) = (folder / "first" / "fusion").glob("*/_manifest.json")
    facts = json.loads(manifest.read_text())["parameters"]
    assert held_out == facts["queries"]
    assert 0.1 < (held_out + len(facts["repeated"])) / 240 < 0.3  # of 0.2, by chance
    shown = page.table(f"scores-{first}")
    assert page.table(f"scores-{second}") == shown
    titles = {"vectors": "vectors alone", "linear ranker": "linear ranker alone"}
    stated = {titles.get(name, name): [of["P@1"], of["P@5"]] for name, of in facts["metrics"].items()}
    assert {row["scores"] for row in shown} == stated.keys()
    for row in shown:
        near([row["P@1"], row["P@5"]], stated[row["scores"]], 0.01)


@pytest.mark.parametrize("split", ["test", "train"])
def test_metrics_are_those_of_the_predictions(reported: Reported, split: str) -> None:
    made, page, (_, second) = reported.made, reported.page, names_of(reported)
    top, labels, weights = reported.top(split), made.active(split), made.inverse_propensity
    rows = page.table(f"metrics-{split}")
    row = next(row for row in rows if row["run"] == second)
    expected = plain.metrics(top, labels, weights)
    assert (int(row["queries"]), row["scores"]) == (len(labels), "fused")
    shown = [name for name in row if "@" in name]
    assert shown == ["P@1", "P@5", "nDCG@5", "R@5", "PSP@1", "PSP@5"]
    near([row[name] for name in shown], [expected[name] for name in shown])
    titles = [words for words in page.words if words.startswith("All metrics on")]
    assert f"All metrics on {split}{' (training queries, not a test)' if split == 'train' else ''}, in %" in titles
    if split == "test":
        for part, keys in (("seen", True), ("unseen", False)):
            some = {key: labels[key] for key, seen in made.seen(split).items() if seen == keys and key in labels}
            row = next(r for r in page.table(f"seen-{split}") if (r["run"], r["queries"]) == (second, part))
            assert int(row["number"]) == len(some)
            near([row["P@5"]], [plain.metrics(top, some, weights)["P@5"]])
    found = plain.recall_of_groups(top, labels, made.label_parts)
    drawn = page.chart("metrics", f"label-parts-{split}")
    assert "R@5" not in str(drawn)  # R@5 is a mean over queries, this is a share of all positives
    if isinstance(drawn, str):
        assert drawn.endswith(f"{second} found: {found['0001']['R@5']:.4g} % (part 0001)")
    else:
        near(drawn[f"{second} found"].values(), [found[part]["R@5"] for part in drawn[f"{second} found"]])
    if split == "train":
        of = made.splits[split].parts
        for name, values in page.chart("metrics", "parts-train").items():
            if name.startswith(second):
                for part, value in values.items():
                    some = {key: row for key, row in labels.items() if of[key] == part}
                    near([value], [plain.metrics(top, some, weights)[name.split()[-1]]])


@pytest.mark.parametrize("split", ["test", "train"])
def test_weakest_queries_are_counted_from_the_predictions(reported: Reported, split: str) -> None:
    made, page, (_, second) = reported.made, reported.page, names_of(reported)
    top, labels, texts = reported.top(split), made.active(split), made.splits[split].texts
    order = [*top]
    groups: dict[str, list[tuple[int, int]]] = {}
    for row, found, of in plain.weakest_queries(top, labels):
        groups.setdefault(texts[order[row]], []).append((found, of))
    expected = [(text, sum(f for f, _ in pairs), sum(n for _, n in pairs)) for text, pairs in groups.items()]
    shown = page.table(f"weakest-queries-{second}-{split}")
    assert [(row["query"], int(row["found"]), int(row["positives"])) for row in shown] == expected[:20]


def test_queries_on_the_page_have_the_predictions_of_the_run(reported: Reported) -> None:
    made, body = reported.made, reported.page.body
    keys, expected = [key for key, _ in reported.counts], {s: reported.predictions(s) for s in ("test", "train")}
    assert len(body["queries"]) == 60
    for query in body["queries"]:
        of, view = made.splits[query["split"]], query["runs"][1]
        assert query["text"] == " ".join(of.texts[query["key"]].split())
        assert {keys[label] for label in query["positives"]} == {*of.labels[query["key"]]}
        row = expected[query["split"]][query["key"]][:10]
        assert [keys[label] for label, _ in view["predictions"]] == [label for label, _ in row]
        near([score for _, score in view["predictions"]], [score for _, score in row], 1e-3)
        assert view["hit"] == (row[0][0] in of.labels[query["key"]])
    assert {body["labels"][str(label)][2] == count for label, (_, count) in enumerate(reported.counts)} == {True}


def test_the_data_are_counted_from_the_files(reported: Reported) -> None:
    made, page = reported.made, reported.page
    tail = sorted((count for _, count in reported.counts), reverse=True)
    (words,) = (w for w in page.words if w.startswith(f"{len(made.labels)} labels, "))
    unseen, head = re.findall(r"([\d.]+) of them without|account for ([\d.]+) %", words)
    assert int(unseen[0]) == tail.count(0)
    near([head[1]], [100 * tail[0] / sum(tail)], 1e-3)
    drawn = page.chart("data", "tail")["training points"]
    assert drawn == {rank: tail[rank - 1] for rank in drawn}
    assert [*drawn][0 :: len(drawn) - 1] == [1, sum(count > 0 for count in tail)]
    for row in page.table("data"):
        split = made.splits[row["split"]]
        points, seen = len(split.texts), made.seen(row["split"])
        assert int(row["rows"]) == points
        near([row["labels per point"]], [sum(map(len, split.labels.values())) / points], 1e-3)
        near([row["tokens per point"]], [sum(reported.tokens(row["split"]).values()) / points], 1e-3)
        assert int(row["empty texts"]) == [*split.texts.values()].count("")
        if row["split"] != "train":
            assert int(row["in train"]) == sum(seen.values())


def test_histograms_count_the_rows_of_each_split_in_equal_bins(reported: Reported) -> None:
    made, page = reported.made, reported.page
    lengths = {
        "labels": {name: Counter(map(len, of.labels.values())) for name, of in made.splits.items()},
        "tokens": {name: Counter(reported.tokens(name).values()) for name in made.splits},
    }
    for name, counters in lengths.items():
        drawn = page.chart("data", name)
        assert drawn.keys() == counters.keys()
        assert len({tuple(line) for line in drawn.values()}) == 1
        for split, line in drawn.items():
            total = sum(counters[split].values())
            near(line.values(), [100 * counters[split][value] / total for value in line], 1e-3)


def test_curves_are_those_of_the_records(reported: Reported) -> None:
    page, runs = reported.page, dict(zip(("first", "second"), names_of(reported), strict=True))
    records = {name: reported.records(run) for run, name in runs.items()}
    for identity, kind, field in (("epoch-loss", "epoch", "loss"), ("throughput", "epoch", "rows_per_second")):
        drawn = page.chart("training", identity)
        for name, rows in records.items():
            expected = {row["epoch"]: row[field] for row in rows if row["kind"] == kind}
            assert [*drawn[name]] == [*expected]
            near(drawn[name].values(), expected.values())
    validation = next(c for c in page.body["charts"]["training"] if c["id"] == "validation")
    assert validation["title"] == "Validation of classifier scores"
    configs = [(reported.folder / run / "config.toml").read_text() for run in ("first", "second")]
    splits = {re.search(r'\[recipe.validation\][^\[]*split = "(.*)"', config)[1] or "holdout" for config in configs}  # type: ignore[index]
    on = " or ".join(sorted(splits))
    assert validation["note"] == f"ranked by the vectors, without a fusion, on the first queries of {on}"
    for name, line in page.chart("training", "validation").items():
        run, metric = name.rsplit(" ", 1)
        near(line.values(), [row[metric] for row in records[run] if row["kind"] == "validation"])
    for row in page.table("runs"):
        epochs = [each for each in records[row["run"]] if each["kind"] == "epoch"]
        near([row["seconds"], row["loss"]], [sum(each["seconds"] for each in epochs), epochs[-1]["loss"]], 1e-3)


def test_the_last_validation_is_the_metric_of_the_classifier(reported: Reported) -> None:
    """The chart says that it draws classifier scores: evaluate by these gives the same."""
    first, _ = names_of(reported)
    line = reported.page.chart("training", "validation")[f"{first} P@1"]
    report = done(
        "evaluate", reported.folder / "data/1", reported.folder / "first", "--split", "holdout", "--step", "newest",
        "--scores", "classifier", "--json",
    ).json  # fmt: skip
    near([[*line.values()][-1]], [report["metrics"]["P@1"]])


def test_inspect_counts_what_the_files_hold(reported: Reported) -> None:
    made, folder = reported.made, reported.data
    body = done("inspect", folder, "--json", "--rows", 500, "--split", "val").json
    shards = {path: path.stat().st_size for path in folder.rglob("part-*")}
    for name, table in body["tables"].items():
        own = [size for path, size in shards.items() if path.is_relative_to(folder / name)]
        if name.startswith("queries/"):
            assert table["rows"] == len(made.splits[name.partition("/")[2]].texts)
        elif name == "labels":
            assert table["rows"] == len(made.labels)
        assert table["bytes"] >= sum(own)
    keys = [key for key, _ in reported.counts]
    of = made.splits["val"]
    assert {query["key"] for query in body["queries"]} == {*of.texts}
    for query in body["queries"]:
        assert query["text"] == " ".join(of.texts[query["key"]].split())
        assert {keys[each["label_id"]] for each in query["positives"]} == {*of.labels[query["key"]]}
        assert {each["text"] for each in query["positives"]} == {made.labels[x] for x in of.labels[query["key"]]}
