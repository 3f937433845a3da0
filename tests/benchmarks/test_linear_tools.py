"""A cut keeps its rows' labels by name, and F1@5 and Annif's NDCG equal their definitions."""

import gzip
import json
import math
import random

import numpy as np
import pytest

from benchmarks.common.raw_cut import cut, read
from benchmarks.linear_tools import load, load_ranking, score
from trainer.evaluation.metrics import value


@pytest.fixture
def raw(tmp_path):
    draw, folder = random.Random(0), tmp_path / "raw"
    folder.mkdir()
    points = [
        {"uid": f"q{i}", "title": f"t{i}", "content": "", "target_ind": draw.sample(range(40), 3)} for i in range(90)
    ]
    labels = [{"uid": f"l{i}", "title": "name" if i % 4 else "", "content": ""} for i in range(40)]
    for name, lines in (("trn", points[:60]), ("tst", points[60:]), ("lbl", labels)):
        with gzip.open(folder / f"{name}.json.gz", "wt") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    (folder / "filter_labels_test.txt").write_text("".join(f"{row} {row % 7}\n" for row in range(30)))
    return folder


def named(folder, split):
    """Return the uids of each point's labels, and of its struck labels, by the point's uid."""
    points, labels = ([json.loads(line) for line in read(folder / f"{name}.json.gz")] for name in (split, "lbl"))
    pairs = [map(int, line.split()) for line in (folder / "filter_labels_test.txt").read_text().splitlines()]
    struck = {(points[row]["uid"], labels[label]["uid"]) for row, label in pairs if split == "tst"}
    return {point["uid"]: {labels[i]["uid"] for i in point["target_ind"]} for point in points}, struck


def test_a_cut_keeps_rows_and_the_labels_that_they_have(raw, tmp_path):
    cut(raw, tmp_path / "cut", 8, seen=True)
    train, _ = named(tmp_path / "cut", "trn")
    assert len(train) == 8
    assert train.items() <= named(raw, "trn")[0].items()
    seen = set[str]().union(*train.values())
    test, struck = named(raw, "tst")
    expected = {uid: labels & seen for uid, labels in test.items() if labels & seen}
    assert named(tmp_path / "cut", "tst") == (
        expected,
        {(q, label) for q, label in struck if {q} <= {*expected} and label in seen},
    )
    cut(raw, tmp_path / "plain", 8)
    assert named(tmp_path / "plain", "trn")[0] == train
    assert named(tmp_path / "plain", "tst") == (test, struck)


def test_metrics_of_annif_are_their_definitions(raw, tmp_path):
    draw, data = random.Random(1), load(raw)
    rows = [[f"l{i}" for i in draw.sample(range(40), 30)] for _ in range(30)]
    (tmp_path / "ranking").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = score(data, load_ranking(data, tmp_path / "ranking"))
    f1, ndcg, names = [], [], {label["uid"] for label in data.labels if label["title"]}
    for number, (row, gold) in enumerate(zip(rows, named(raw, "tst")[0].values(), strict=True)):
        kept = [uid for uid in row if uid != f"l{number % 7}"][:20]
        hits = [uid in gold for uid in kept if uid in names]
        f1.append(2 * sum(hits[:5]) / (5 + len(gold & names)))
        ideal = sum(1 / math.log2(rank + 2) for rank in range(len(gold & names)))
        ndcg.append(sum(hit / math.log2(rank + 2) for rank, hit in enumerate(hits[:10])) / ideal if ideal else 1)
    assert value(found["F1@5"]) == pytest.approx(100 * np.mean(f1), rel=1e-5)
    assert value(found["NDCG, Annif"]) == pytest.approx(100 * np.mean(ndcg), rel=1e-5)
