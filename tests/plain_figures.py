"""A plain program that computes figures again, from raw files and predictions; and the set that it is tried on.

It imports nothing of Extremis: dictionaries, lists and NumPy. Labels and queries are named by their keys. The set has
what makes figures differ: texts that repeat within a split and between splits, labels without training points, a
filter, and a second version that adds points, labels and queries, replaces points and retires a label.
"""

import gzip
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

KS = (1, 3, 5, 10)
A, B = 0.55, 1.5  # propensity constants
WORDS = [first + second for first in ("ba", "ke", "li", "mo", "nu", "ra", "si", "to") for second in ("da", "fe", "go")]
OLD, NEW = [f"L{n}" for n in range(16)], [f"N{n}" for n in range(5)]  # labels of the first and of the second part
RETIRED, UNTRAINED = "L3", ("L14", "L15", "N4")  # of UNTRAINED no training point has a label


@dataclass
class Split:
    """The rows of a split by key: texts, labels, the part that each row came with, and filtered labels."""

    texts: dict[str, str] = field(default_factory=dict)
    labels: dict[str, list[str]] = field(default_factory=dict)
    parts: dict[str, str] = field(default_factory=dict)
    filters: dict[str, list[str]] = field(default_factory=dict)

    def add(self, part: str, rows: Iterable[tuple[str, str, list[str]]]) -> None:
        for key, text, labels in rows:
            self.texts[key], self.labels[key], self.parts[key] = text, labels, part


@dataclass
class GrowingSet:
    """What the files of a set say: its splits, all labels by key with their texts, and the part of each label."""

    first: Path  # INPUT of the first part
    second: Path  # INPUT of the second part, to shard --onto the first
    splits: dict[str, Split]
    labels: dict[str, str]
    label_parts: dict[str, str]
    retired: frozenset[str]

    @property
    def frequency(self) -> dict[str, int]:
        """Training points of each label."""
        return frequency(self.splits["train"].labels.values(), self.labels)

    @property
    def inverse_propensity(self) -> dict[str, float]:
        return inverse_propensity(self.frequency, len(self.splits["train"].labels))

    def active(self, split: str) -> dict[str, list[str]]:
        """Labels of each query that are not retired, of the queries that have any."""
        kept = {key: [x for x in labels if x not in self.retired] for key, labels in self.splits[split].labels.items()}
        return {key: labels for key, labels in kept.items() if labels}

    def seen(self, split: str) -> dict[str, bool]:
        """Whether a query has a text that a training point has too."""
        texts = {*self.splits["train"].texts.values()} - {""}
        return {key: text in texts for key, text in self.splits[split].texts.items()}


def write_growing(folder: Path) -> GrowingSet:
    """Write the set's two INPUTs below `folder`; the first part is named 0001, the second `two`."""
    draw = random.Random(66)
    splits = {"train": Split(), "test": Split(), "val": Split()}
    trained = {"1": [x for x in OLD if x not in UNTRAINED], "2": [x for x in OLD + NEW if x not in UNTRAINED]}
    pool: list[str] = []

    def rows(name: str, count: int, labels: Sequence[str]) -> list[tuple[str, str, list[str]]]:
        made = []
        for number in range(count):
            own = sorted({labels[min(int(draw.expovariate(0.25)), len(labels) - 1)] for _ in range(1 + number % 3)})
            text = " ".join([*(WORDS[(OLD + NEW).index(label)] for label in own), *draw.choices(WORDS, k=2)])
            if pool and number % 5 == 4:
                text = draw.choice(pool)  # a text that another point has, maybe with other labels
            pool.append(text)
            made.append((f"{name}{number}", "" if number == 7 else text, own))
        return made

    splits["train"].add("0001", rows("p", 240, trained["1"]))
    splits["test"].add("0001", rows("t", 60, OLD))
    splits["val"].add("0001", rows("v", 60, OLD))
    splits["test"].labels |= {"t3": [RETIRED], "t6": ["L14", "L0"], "t9": ["L15"], "t12": [RETIRED, "L1"]}
    splits["test"].filters = {f"t{n}": draw.sample(OLD, 1 + n % 3) for n in range(0, 60, 4)}
    first, second = folder / "first", folder / "second"
    for place in (first, second):
        place.mkdir(parents=True)
    texts = {label: f"label {WORDS[number]}" for number, label in enumerate(OLD + NEW)}
    _write(first / "lbl.json.gz", ({"uid": label, "title": texts[label]} for label in OLD))
    for name, split in (("trn", "train"), ("tst", "test"), ("val", "val")):
        of = splits[split]
        lines = (
            {"uid": key, "title": of.texts[key], "target_ind": [*map(OLD.index, of.labels[key])]} for key in of.texts
        )
        _write(first / f"{name}.json.gz", lines)
    order = [*splits["test"].texts]
    pairs = ((order.index(key), OLD.index(x)) for key, listed in splits["test"].filters.items() for x in listed)
    (first / "filter_labels_test.txt").write_text("".join(f"{row} {label}\n" for row, label in pairs))
    for split, added in (
        ("train", [*rows("q", 90, trained["2"]), *((f"p{n}", f"{WORDS[20]} {WORDS[n]}", ["N0"]) for n in range(4))]),
        ("val", rows("u", 40, OLD + NEW)),
    ):
        splits[split].add("two", added)
        _write(second / f"{split}.jsonl.gz", ({"key": k, "text": text, "labels": own} for k, text, own in added))
    kept = [label for label in OLD + NEW if label != RETIRED]
    _write(second / "labels.jsonl.gz", ({"key": label, "text": texts[label]} for label in kept))
    parts = dict.fromkeys(OLD, "0001") | dict.fromkeys(NEW, "two")
    return GrowingSet(first, second, splits, texts, parts, frozenset([RETIRED]))


def _write(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def read_predictions(path: Path) -> dict[str, list[tuple[str, float]]]:
    """Read what `extremis predict … OUT.jsonl` wrote: labels with scores, best first, of each key, in order."""
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return {row["key"]: [*zip(row["labels"], row["scores"], strict=True)] for row in rows}


def frequency(labels: Iterable[Sequence[str]], known: Iterable[str]) -> dict[str, int]:
    counts = Counter(itertools.chain.from_iterable(labels))
    return {label: counts[label] for label in known}


def inverse_propensity(counts: Mapping[str, int], points: int) -> dict[str, float]:
    scale = (math.log(points) - 1) * (B + 1) ** A
    return {label: 1 + scale * (count + B) ** -A for label, count in counts.items()}


def terms(top: Sequence[str], labels: Sequence[str], weights: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    """What one query adds to the two sums of each metric, which is 100 x the quotient of the sums."""
    result = {}
    for k in KS:
        discount = [1 / math.log2(rank + 2) for rank in range(k)]
        hits = [label in labels for label in top[:k]]
        hits += [False] * (k - len(hits))
        ideal = sum(discount[: len(labels)])
        gains = [weights[label] if hit else 0.0 for label, hit in itertools.zip_longest(top[:k], hits)]
        best = sorted((weights[label] for label in labels), reverse=True)[:k]
        result[f"P@{k}"] = sum(hits) / k, 1.0
        result[f"R@{k}"] = sum(hits) / len(labels), 1.0
        result[f"F1@{k}"] = 2 * sum(hits) / (min(k, len(top)) + len(labels)), 1.0
        result[f"nDCG@{k}"] = sum(itertools.compress(discount, hits)) / ideal, 1.0
        ideal_of_all = sum(1 / math.log2(rank + 2) for rank in range(len(labels)))
        result[f"nDCG-all@{k}"] = sum(itertools.compress(discount, hits)) / ideal_of_all, 1.0
        result[f"PSP@{k}"] = sum(gains), sum(best)
        discounted = (sum(x * d for x, d in zip(row, discount, strict=False)) / ideal for row in (gains, best))
        result[f"PSnDCG@{k}"] = next(discounted), next(discounted)
    return result


def metrics(
    top: Mapping[str, Sequence[str]], labels: Mapping[str, Sequence[str]], weights: Mapping[str, float]
) -> dict[str, float]:
    """Metrics x 100 over the queries in `labels`."""
    rows = [terms(top[key], labels[key], weights) for key in labels]
    return {name: 100 * sum(r[name][0] for r in rows) / sum(r[name][1] for r in rows) for name in rows[0]}


def intervals(
    top: Mapping[str, Sequence[str]],
    labels: Mapping[str, Sequence[str]],
    weights: Mapping[str, float],
    texts: Mapping[str, str],
    below: Mapping[str, Sequence[str]] | None = None,
) -> dict[str, tuple[float, float]]:
    """95 % intervals of metrics, or of gains over the ranking `below`: texts are drawn, each with all its queries."""
    own = {key: terms(top[key], labels[key], weights) for key in labels}
    if below is not None:
        for key, gains in own.items():
            other = terms(below[key], labels[key], weights)
            own[key] = {name: (a - other[name][0], b) for name, (a, b) in gains.items()}
    return {name: ends(draw(own, name, texts)) for name in next(iter(own.values()))}


def intervals_of_difference(
    top: Mapping[str, Sequence[str]],
    some: Mapping[str, Sequence[str]],
    others: Mapping[str, Sequence[str]],
    weights: Mapping[str, float],
    texts: Mapping[str, str],
) -> dict[str, tuple[float, float]]:
    """95 % intervals of the metrics over the queries `some` minus the metrics over the queries `others`."""
    first, second = ({key: terms(top[key], of[key], weights) for key in of} for of in (some, others))
    return {name: ends(draw(first, name, texts) - draw(second, name, texts)) for name in next(iter(first.values()))}


def draw(rows: Mapping[str, Mapping[str, tuple[float, float]]], name: str, texts: Mapping[str, str]) -> np.ndarray:
    """The metric `name` over 4,000 draws of the texts of `rows`, each text with all its queries."""
    sums: dict[str, np.ndarray] = {}
    for key, row in rows.items():
        sums[texts[key]] = sums.get(texts[key], np.zeros(2)) + row[name]
    times = np.random.default_rng(len(rows)).multinomial(len(sums), [1 / len(sums)] * len(sums), 4000)
    achieved, achievable = (times @ np.array([*sums.values()])).T
    return 100 * achieved / achievable


def ends(values: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(values, [0.025, 0.975]).tolist()
    return low, high


def recall_of_groups(
    top: Mapping[str, Sequence[str]], labels: Mapping[str, Sequence[str]], group_of: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    """Labels, positives, and the share of the positives found at each k, of the labels of each group."""
    result = {}
    for group in dict.fromkeys(group_of.values()):
        pairs = [(key, x) for key, listed in labels.items() for x in listed if group_of[x] == group]
        if pairs:
            found = {f"R@{k}": 100 * sum(x in top[key][:k] for key, x in pairs) / len(pairs) for k in KS}
            result[group] = {"labels": sum(g == group for g in group_of.values()), "positives": len(pairs), **found}
    return result


def frequency_group(count: int) -> str:
    names = {0: "0", 1: "1", 2: "2-3", 3: "2-3"}
    return names.get(count, "4-10" if count <= 10 else "more than 10")


def weakest_queries(top: Mapping[str, Sequence[str]], labels: Mapping[str, Sequence[str]]) -> list[list[int]]:
    """[row, found among the best 5, labels] of the 100 queries that lack most; rows are numbered as in `top`."""
    rows = [(row, sum(x in labels[k] for x in top[k][:5]), len(labels[k])) for row, k in enumerate(top) if k in labels]
    rows.sort(key=lambda row: (row[1] / min(5, row[2]), -row[2], row[0]))
    return [[*row] for row in rows[:100] if row[1] < min(5, row[2])]


def weakest_labels(top: Mapping[str, Sequence[str]], labels: Mapping[str, Sequence[str]]) -> dict[str, tuple[int, int]]:
    """(queries whose best 5 have the label, queries with the label) of each label that some query misses."""
    counts = Counter(x for listed in labels.values() for x in listed)
    found = Counter(x for key, listed in labels.items() for x in listed if x in top[key][:5])
    return {label: (found[label], count) for label, count in counts.items() if found[label] < count}


def precision_bound(
    predictions: Mapping[str, Sequence[tuple[str, float]]],
    labels: Mapping[str, Sequence[str]],
    texts: Mapping[str, str],
    lowest: float,
) -> float:
    """Lower bound (95 %) of the precision of all labels from a score on: equal texts are one observation."""
    of_texts: dict[str, list[bool]] = {}
    for key in labels:
        for x, score in predictions[key]:
            if score >= lowest - 1e-6:
                of_texts.setdefault(texts[key], []).append(x in labels[key])
    rows = [(len(hits), sum(hits)) for hits in of_texts.values()]
    count, right = (sum(column) for column in zip(*rows, strict=True))
    share = right / count
    m = max(2, len(rows))
    variance = m / (m - 1) * sum((h - share * n) ** 2 for n, h in rows)
    spread = share * (1 - share) * count
    clustering = max(1, variance / spread if spread else sum(n * n for n, _ in rows) / count)
    z = 1.6449**2 / (count / clustering)
    return (share + z / 2 - math.sqrt(z * (share * (1 - share) + z / 4))) / (1 + z)


def errors_of(probabilities: Sequence[float], hits: Sequence[bool]) -> dict[str, float]:
    """ECE over 15 bins of equal width, and the Brier score."""
    bins: dict[int, list[float]] = {}
    for probability, hit in zip(probabilities, hits, strict=True):
        bins.setdefault(min(int(probability * 15), 14), []).append(probability - hit)
    ece = sum(abs(sum(apart)) for apart in bins.values()) / len(hits)
    return {"ece": ece, "brier": sum((p - hit) ** 2 for p, hit in zip(probabilities, hits, strict=True)) / len(hits)}


def calibration(
    curve: Callable[[float], float],
    none_below: float,
    predictions: Mapping[str, Sequence[tuple[str, float]]],
    labels: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Errors of a curve from scores to probabilities, and of sigmoids; "none of these" where the best is below."""
    pairs = [(score, x in labels[key]) for key in labels for x, score in predictions[key][:10]]
    hits = [hit for _, hit in pairs]
    best = [(predictions[key][0][1], predictions[key][0][0] in labels[key]) for key in labels if predictions[key]]
    none = [hit for score, hit in best if score < none_below]
    return {
        **errors_of([curve(score) for score, _ in pairs], hits),
        "uncalibrated": errors_of([1 / (1 + math.exp(-score)) for score, _ in pairs], hits),
        "none_of_these": {"queries": len(none) / len(best), "wrong": none.count(False) / max(1, len(none))},
    }


def popular(counts: Sequence[tuple[str, int]], queries: Iterable[str]) -> dict[str, list[str]]:
    """The labels by training points, for every query; `counts`: labels by id."""
    order = [label for label, _ in sorted(counts, key=lambda pair: -pair[1])]
    return dict.fromkeys(queries, order)


NEIGHBOURS, TEMPERATURE, TITLE = 30, 0.1, 0.5


def nearest_votes(
    queries: Mapping[str, str], texts: Mapping[str, str], labels: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, float]]:
    """Votes for labels by the nearest `texts` by TF-IDF of words; of equally near texts, by the first.

    A text is of one line, which is a title, too: its words count again with TITLE.
    """
    documents = Counter(itertools.chain.from_iterable({*text.split()} for text in texts.values()))

    def weigh(text: str) -> dict[str, float]:
        tf_idf = {
            word: (1 + math.log(count)) * (math.log((1 + len(texts)) / (1 + documents[word])) + 1)
            for word, count in Counter(text.split()).items()
            if word in documents
        }
        norm = math.sqrt(sum(weight**2 for weight in tf_idf.values())) or 1
        return {word: weight / norm for word, weight in tf_idf.items()}

    weighed = {key: weigh(text) for key, text in texts.items()}
    result = {}
    for query, text in queries.items():
        own = weigh(text)
        cosines = {key: sum(w * other.get(word, 0) for word, w in own.items()) for key, other in weighed.items()}
        places = enumerate(cosines.items())
        near = sorted((-round(cosine, 6), place, key) for place, (key, cosine) in places if cosine > 0)
        shares = {key: math.exp((1 + TITLE**2) * (cosines[key] - 1) / TEMPERATURE) for *_, key in near[:NEIGHBOURS]}
        votes = Counter[str]()
        for key, share in shares.items():
            votes.update(dict.fromkeys(labels[key], share / sum(shares.values())))
        result[query] = dict(votes)
    return result
