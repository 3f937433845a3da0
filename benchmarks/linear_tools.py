"""`auto` and linear tools on raw folders in the XC repository's JSON form, and anybody's ranking, with Annif's metrics.

    python -m benchmarks.linear_tools RAW --rows 1000 --tools auto bonsai --rankings DIR
    python -m benchmarks.linear_tools RAW --ranking FILE --beside DIR/tate-bonsai.jsonl --groups

The linear tools read TF-IDF of words and word pairs in title and content. With `auto`, its differences from each tool
have paired intervals. A ranking has a line per test row: a JSON list of labels' uids, best first, after the filter; or
an object, as `extremis predict --data` writes them. `--ranking` scores such a file instead of training; `--beside` adds
differences from another. F1@5 and Annif's NDCG leave out labels without a title, as `annif eval` does. A cut has the
first training rows in random order, their labels, and the test rows with one of them; `--folder` keeps it.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.datasets import dump_svmlight_file
from sklearn.feature_extraction.text import TfidfVectorizer

import extremis
from benchmarks.common.contributions import gains
from benchmarks.common.raw_cut import TEST_FILTER, cut, read
from benchmarks.common.report import report, require
from schemas.ragged import Ragged
from trainer.evaluation.evaluate import inverse_propensity
from trainer.evaluation.metrics import Contributions, Metrics, bootstrap, value

TATE = Path(__file__).parents[1] / "examples" / "tate"
OMIKUJI: dict[str, dict[str, Any]] = {
    "bonsai": {"cluster_balanced": False, "cluster_k": 100, "max_depth": 3},
    "parabel": {},
}
METRICS = "P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5", "nDCG@5"
DEPTH = 20  # labels of a ranking
POINTS = {"0": (0, 0), "1": (1, 1), "2-3": (2, 3), "4-10": (4, 10), "more": (11, sys.maxsize)}
# Words that only one of the two languages has often.
GERMAN = re.compile(r"\b(der|die|das|und|von|mit|im|ist|für|den|des|zu|auf|eine|einer|ein|dem|zur|als|wird)\b", re.I)
ENGLISH = re.compile(r"\b(the|of|and|to|is|for|a|on|with|by|as|this|that|are|from|at|it|be|which|can|we)\b", re.I)


class Raw(NamedTuple):
    texts: list[str]
    positives: Ragged
    test_texts: list[str]
    gold: Ragged
    labels: list[dict[str, Any]]
    struck: set[tuple[int, int]]  # (test row, label)
    test_uids: list[str]

    @property
    def frequency(self) -> np.ndarray:
        """Training points of each label, [L] int64."""
        return np.bincount(self.positives.entries, minlength=len(self.labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", nargs="?", type=Path, default=TATE)
    parser.add_argument("--rows", type=int, default=0, help="training rows of a cut; 0: all")
    parser.add_argument("--tools", nargs="+", default=["bonsai"], choices=["auto", *OMIKUJI])
    parser.add_argument("--min-df", type=int, default=1, help="of the vectorizer")
    parser.add_argument("--ranking", type=Path, help="score this ranking, and train nothing")
    parser.add_argument("--beside", type=Path, help="the ranking of another model on the same test rows")
    parser.add_argument("--rankings", type=Path, help="keep the tools' rankings here")
    parser.add_argument("--folder", type=Path, help="keep the cut's raw folder, data and run here")
    parser.add_argument("--nameless", action="store_true", help="without the texts of the labels")
    parser.add_argument("--seed", type=int, default=0, help="of auto")
    parser.add_argument("--minutes", type=float, help="of auto (default: as long as it takes)")
    parser.add_argument("--groups", action="store_true", help="by language (German, English) and by training points")
    parser.add_argument("--quick", action="store_true", help="500 rows")
    options = parser.parse_args()
    require(*([] if options.ranking or options.tools == ["auto"] else ["omikuji"]))
    rows = 500 if options.quick else options.rows
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        name, folder = options.raw.resolve().name, options.raw
        if rows or options.nameless:
            name = f"{name}-{rows or 'all'}" + "-nameless" * options.nameless
            folder = (options.folder or Path(scratch)) / name
            cut(options.raw, folder, rows, seen=True, named=not options.nameless)
        raw = load(folder)
        texts = np.unique(raw.test_texts, return_inverse=True)[1]
        parts = {"beside": score(raw, load_ranking(raw, options.beside))} if options.beside else {}
        for tool in [options.ranking.stem] if options.ranking else options.tools:
            facts: dict[str, Any] = {}
            if options.ranking:
                top = load_ranking(raw, options.ranking)
            elif tool == "auto":
                out = (options.folder or Path(scratch)) / f"{name}-auto"
                top = rank_auto(folder, raw, out, options.seed, options.minutes, facts)
            else:
                top = rank_linear(tool, raw, options.min_df, facts)
            if options.rankings and not options.ranking:
                options.rankings.mkdir(parents=True, exist_ok=True)
                lines = (json.dumps([raw.labels[i]["uid"] for i in row if i >= 0]) + "\n" for row in top)
                (options.rankings / f"{name}-{tool}.jsonl").write_text("".join(lines))
            own = score(raw, top)
            ends = bootstrap(own, texts=texts)
            figures[tool] = {each: [round(n, 2) for n in (value(part), *ends[each])] for each, part in own.items()}
            figures[tool] |= facts | ({"groups": groups(raw, top, own)} if options.groups else {})
            parts[tool] = own
    first = next(tool for tool in parts if tool != "beside")
    others = {tool: gains(parts[first], part, texts) for tool, part in parts.items() if tool != first}
    about = {"rows": len(raw.texts), "queries": raw.gold.rows, "brackets": "95 %", "differences": others}
    report(f"{first} beside linear tools on {name}", figures, {}, {}, **about)


def load(folder: Path) -> Raw:
    places = [folder / f"{name}.json.gz" for name in ("trn", "tst", "lbl")]
    train, test, labels = ([json.loads(line) for line in read(place)] for place in places)
    filters = (folder / TEST_FILTER).read_text().splitlines() if (folder / TEST_FILTER).exists() else []
    struck = {(int(row), int(label)) for row, label in map(str.split, filters)}
    return Raw(*_split(train), *_split(test), labels, struck, [point["uid"] for point in test])


def _split(points: Sequence[dict[str, Any]]) -> tuple[list[str], Ragged]:
    ids = [np.unique(np.array(point["target_ind"], np.int64)) for point in points]
    texts = [f"{point['title']} {point['content']}" for point in points]
    return texts, Ragged.from_counts(np.concatenate(ids), np.array([*map(len, ids)]))


def load_ranking(raw: Raw, place: Path) -> np.ndarray:
    """Return label ids [N, DEPTH], padded with -1, of a file of uids; unknown uids are errors."""
    number = {label["uid"]: i for i, label in enumerate(raw.labels)}
    lines = [json.loads(line) for line in place.read_text().splitlines()]
    if isinstance(lines[0], dict):
        of_keys = {line["key"]: line["labels"] for line in lines}
        lines = [of_keys[uid] for uid in raw.test_uids]
    rows = [[number[uid] for uid in line] for line in lines]
    if len(rows) != raw.gold.rows:
        raise SystemExit(f"{place}: {len(rows)} rankings for {raw.gold.rows} test rows")
    return _padded(raw, rows)


def _padded(raw: Raw, rows: Sequence[Sequence[int]]) -> np.ndarray:
    top = np.full((len(rows), DEPTH), -1, np.int64)
    for number, row in enumerate(rows):
        kept = [label for label in row if (number, label) not in raw.struck][:DEPTH]
        top[number, : len(kept)] = kept
    return top


class Clock:
    """Seconds since it was made: elapsed, and of the processor, with processes that have ended."""

    def __init__(self) -> None:
        self.began = os.times()

    def spent(self) -> dict[str, float]:
        *spent, elapsed = (now - then for now, then in zip(os.times(), self.began, strict=True))
        return {"seconds": round(elapsed, 1), "processor": round(sum(spent), 1)}


def rank_auto(folder: Path, raw: Raw, out: Path, seed: int, minutes: float | None, facts: dict[str, Any]) -> np.ndarray:
    """Shard, run `auto`, export, predict, fill in `facts`, and return label ids [N, DEPTH] of the test rows."""
    extremis.shard(folder, out / "data", propensity=(0.55, 1.5), progress=False)
    clock = Clock()
    extremis.run("auto", out / "data", out / "run", minutes=minutes, set=[f"train.seed={seed}"], progress=False)
    facts |= clock.spent() | {"recipe": json.loads((out / "run" / "auto.json").read_text())["chosen"]}
    extremis.export(out / "data", out / "run", out / "export", progress=False)
    place = out / "predictions.jsonl"
    extremis.predict(out / "export", place, data=out / "data", max_labels=DEPTH, progress=False)
    return load_ranking(raw, place)


def rank_linear(tool: str, raw: Raw, min_df: int, facts: dict[str, Any]) -> np.ndarray:
    """Train a tool with one thread, fill in `facts`, and return label ids [N, DEPTH] of the test rows."""
    clock = Clock()
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), min_df=min_df, sublinear_tf=True, dtype=np.float32)
    features, test_features = vectorizer.fit_transform(raw.texts), vectorizer.transform(raw.test_texts)
    rows = train_and_rank(raw, features, test_features, OMIKUJI[tool])
    facts |= clock.spent()
    return _padded(raw, rows)


def train_and_rank(
    raw: Raw, features: csr_matrix, test_features: csr_matrix, settings: dict[str, Any]
) -> list[list[int]]:
    """Return label ids, best first, of three trees of Omikuji with its defaults but for `settings`."""
    from omikuji import Model

    parameters = Model.default_hyper_param()
    for name, setting in settings.items():
        setattr(parameters, name, setting)
    entries, offsets = raw.positives
    targets = csr_matrix((np.ones(len(entries), np.float32), entries, offsets), (len(raw.texts), len(raw.labels)))
    filled = np.flatnonzero(np.diff(features.indptr))  # Omikuji cannot read a row without features
    with tempfile.NamedTemporaryFile() as file:
        file.write(f"{len(filled)} {features.shape[1]} {len(raw.labels)}\n".encode())
        dump_svmlight_file(features[filled], targets[filled], file, multilabel=True)
        file.flush()
        model = Model.train_on_data(file.name, parameters, 1)
    model.init_prediction_thread_pool(1)
    pairs = (zip(row.indices.tolist(), row.data.tolist(), strict=True) for row in test_features)
    return [[label for label, _ in model.predict(list(row), top_k=2 * DEPTH)] for row in pairs]


def score(raw: Raw, top: np.ndarray) -> dict[str, Contributions]:
    """Return the contributions of the test rows to METRICS, F1@5 and Annif's NDCG."""
    metrics = Metrics((1, 3, 5), inverse_propensity(raw.frequency, len(raw.texts), 0.55, 1.5))
    metrics.update(top, raw.gold)
    parts = metrics.contributions()
    named = np.array([bool(label["title"]) for label in raw.labels])
    gold = raw.gold.keep(named[raw.gold.entries])
    f1, ndcg = np.zeros(len(top), np.float32), np.ones(len(top), np.float32)
    discounts = 1 / np.log2(np.arange(2, 2 + max(10, gold.longest)))
    hits, counts = gold.contains(top), gold.counts
    for row in np.flatnonzero(counts):
        own = hits[row][(top[row] >= 0) & named[top[row]]][:10]
        f1[row] = 2 * own[:5].sum() / (5 + counts[row])
        ndcg[row] = (own * discounts[: len(own)]).sum() / discounts[: counts[row]].sum()
    return {name: parts[name] for name in METRICS} | {"F1@5": Contributions(f1), "NDCG, Annif": Contributions(ndcg)}


def groups(raw: Raw, top: np.ndarray, parts: dict[str, Contributions]) -> dict[str, Any]:
    """Return metrics by language, and recall@5 (%) of gold labels by their training points, with numbers of labels."""
    german = np.array([len(GERMAN.findall(text)) > len(ENGLISH.findall(text)) for text in raw.test_texts])
    found: dict[str, Any] = {}
    for language, rows in (("German", german), ("English or unknown", ~german)):
        own = {name: Contributions(*(each[rows] for each in part if each is not None)) for name, part in parts.items()}
        found[language] = {"queries": int(rows.sum())} | {name: round(value(part), 2) for name, part in own.items()}
    points, row_of = raw.frequency[raw.gold.entries], raw.gold.row_of()
    hit = (top[row_of, :5] == raw.gold.entries[:, None]).any(axis=1)
    for name, (least, most) in POINTS.items():
        own = hit[(points >= least) & (points <= most)]
        found[f"{name} points"] = [round(100 * float(own.mean()), 2) if len(own) else None, len(own)]
    return found


if __name__ == "__main__":
    main()
