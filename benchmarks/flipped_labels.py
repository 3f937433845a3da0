"""How many flipped labels are among the first suspects of `extremis crossval`.

    python -m benchmarks.flipped_labels DATA [DATA...] --out FOLDER

5 % of the given labels that can be judged are replaced, each by another label that can be judged, drawn by its training
points, which the row has not. If F are flipped, the first F / 2 suspects among given labels are looked at.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.common.report import report
from extremis.crossvalidation import read_training, score_folds
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.table import Table
from scoring.crossval import FEWEST, Rows, judge

BAR = 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="sharded data sets")
    parser.add_argument("--out", type=Path, required=True, help="folds are kept here, so that a killed call goes on")
    parser.add_argument("--rows", type=int, default=1 << 62, help="the first rows only, which are as good as random")
    parser.add_argument("--share", type=float, default=0.05, help="of the given labels to flip")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--group", choices=["equal", "near"], default="equal")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    figures, ratios = {}, {}
    for data in options.data:
        rows = first(read_training(DataLayout(data), options.folds, options.group).rows, options.rows)
        noisy, flipped = flip(rows, options.share, options.seed)
        made = {name: getattr(options, name) for name in ("rows", "share", "folds", "group", "seed")}
        made["data"] = Table.open(data, "data").digest
        judged = judge(noisy, score_folds(noisy, str(options.out / f"{made['data'][:12]}-{noisy.labels.rows}"), made))
        known, half = np.flatnonzero(judged.known), int(flipped.sum()) // 2
        orders = {"support": judged.support, "probability": judged.probability}
        suspects = {name: known[np.argsort(by[known], kind="stable")[:half]] for name, by in orders.items()}
        ratios[data] = float(flipped[suspects["support"]].mean())
        figures[data] = {
            "rows": noisy.labels.rows,
            "given_labels": len(flipped),
            "not_judged": int((~judged.known).sum()),
            "flipped": int(flipped.sum()),
            "flipped_and_not_judged": int((flipped & ~judged.known).sum()),
            "flipped_among_first_half": {name: float(flipped[some].mean()) for name, some in suspects.items()},
        }
    bars = dict.fromkeys(options.data, BAR)
    report("flipped labels are the first suspects", figures, ratios, bars, settings={**vars(options), "out": None})


def first(rows: Rows, count: int) -> Rows:
    fold = rows.fold[:count]
    pairs, words, labels = (
        rows.pairs.slice(0, len(fold)),
        rows.words.slice(0, len(fold)),
        rows.labels.slice(0, len(fold)),
    )
    return replace(rows, pairs=pairs, words=words, labels=labels, fold=fold)


def flip(rows: Rows, share: float, seed: int) -> tuple[Rows, np.ndarray]:
    """Return `rows` with flipped labels, and which of the given labels [V] are flipped."""
    random = np.random.default_rng(seed)
    row, given = rows.labels.row_of(), rows.labels.entries.astype(np.int64)
    judged = rows.points_elsewhere.min(0) >= FEWEST
    can_flip = np.flatnonzero(judged[given])
    chosen = random.choice(can_flip, round(share * len(can_flip)), replace=False)
    chance = np.cumsum(np.where(judged, np.bincount(given, minlength=rows.count), 0))
    taken = {*(row * rows.count + given).tolist()}
    for place in chosen.tolist():
        while (
            key := int(row[place] * rows.count + np.searchsorted(chance, random.integers(chance[-1]), "right"))
        ) in taken:
            pass
        taken.add(key)
        given[place] = key % rows.count
    flipped = np.zeros(len(given), bool)
    flipped[chosen] = True
    return replace(rows, labels=Ragged(given, rows.labels.offsets)), flipped


if __name__ == "__main__":
    main()
