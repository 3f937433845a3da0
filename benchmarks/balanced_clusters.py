"""Claim: cluster sizes differ by at most one. Also: hard negatives that their batches miss (NGAME, Theorem 1).

    python -m benchmarks.balanced_clusters [--quick]

Points of the Tate collection are embedded on the unit sphere by TF-IDF and a truncated SVD; a label is the mean of its
points. This embedding is good in the theorem's sense, as a trained embedding is. r is a quantile of the distances of
points to their labels. A wrong label within r of a point is missed if no point of the batch has this label. Batches of
512 points are random, or consist of 16 random clusters of 32.
"""

import argparse
import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from benchmarks.common.report import report
from pipelines.cluster import balanced_order

TATE = Path(__file__).parents[1] / "examples" / "tate"
DIMENSION, BATCH, SIZE = 64, 512, 32
QUANTILES = (0.05, 0.1, 0.25, 0.5)
EPOCH_SECONDS, EPOCHS_A_CLUSTERING = 11.0, 5  # the size of `make demo`, and tau in the paper's table 9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a third of the points")
    quick = parser.parse_args().quick
    points = _lines("trn")[:: 3 if quick else 1]
    positives = _matrix([point["target_ind"] for point in points])
    x = _embedded([point["title"] for point in points])
    z = _on_sphere(positives.T @ x)
    row, column = positives.nonzero()
    radii = np.quantile(np.linalg.norm(x[row] - z[column], axis=1), QUANTILES).tolist()

    start = time.process_time()
    near, starts = balanced_order(x, SIZE, SIZE)
    seconds = time.process_time() - start
    draw = np.random.default_rng(0)
    sizes = np.diff(starts)
    clusters = np.empty(len(x), np.int64)
    clusters[near] = np.repeat(np.arange(len(sizes)), sizes)
    order = np.argsort(draw.permutation(len(sizes))[clusters], kind="stable")
    orders = {"clustered": order, "random": draw.permutation(len(x))}
    figures: dict[str, Any] = {
        "points": len(x),
        "labels": len(z),
        "clusters": len(sizes),
        "cluster_sizes": [int(sizes.min()), int(sizes.max())],
        "clustering_seconds": round(seconds, 2),
        "radii": {},
    }
    ratios = {"largest cluster less smallest": float(sizes.max() - sizes.min())}
    for quantile, radius in zip(QUANTILES, radii, strict=True):
        misses = {name: _misses(x, z, positives, order, radius) for name, order in orders.items()}
        kept = {name: 1 - counts["missed"] / counts["hard"] for name, counts in misses.items()}
        figures["radii"][str(quantile)] = {
            "r": round(radius, 3),
            "hard_a_point": round(misses["random"]["hard"] / misses["random"]["points"], 1),
            "share_missed": {name: round(1 - value, 4) for name, value in kept.items()},
            "theorem_1_rate": {n: float(f"{o['missed'] / (o['points'] * len(z)):.3g}") for n, o in misses.items()},
        }
        ratios[f"found, clustered over random, r at {quantile}"] = kept["clustered"] / kept["random"]
    if not quick:
        ratios["clustering over the epochs that it serves"] = seconds / (EPOCHS_A_CLUSTERING * EPOCH_SECONDS)
    report("clusters of points are equal within one", figures, ratios, {"largest cluster less smallest": "<1.5"})


def _misses(x: np.ndarray, z: np.ndarray, positives: csr_matrix, order: np.ndarray, radius: float) -> dict[str, int]:
    """Count hard negatives within `radius`, and hard negatives missing in their batch, over some batches in `order`."""
    batches = [order[start : start + BATCH] for start in range(0, len(order) - BATCH + 1, BATCH)]
    hard = missed = points = 0
    for batch in batches[:: max(1, len(batches) // 16)]:
        positive = positives[batch]
        near = x[batch] @ z.T >= 1 - radius**2 / 2
        near[positive.nonzero()] = False
        present = np.asarray(positive.sum(0)).reshape(-1) > 0
        hard, missed, points = hard + near.sum(), missed + near[:, ~present].sum(), points + len(batch)
    return {"hard": int(hard), "missed": int(missed), "points": points}


def _embedded(texts: list[str]) -> np.ndarray:
    from sklearn.decomposition import TruncatedSVD
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(sublinear_tf=True).fit_transform(texts)
    return _on_sphere(TruncatedSVD(DIMENSION, n_iter=2, random_state=0).fit_transform(words))


def _on_sphere(vectors: np.ndarray) -> np.ndarray:
    return (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9)).astype(np.float32)


def _matrix(positives: list[list[int]]) -> csr_matrix:
    starts = np.cumsum([0, *map(len, positives)])
    ids = np.concatenate([np.asarray(labels, np.int64) for labels in positives])
    ids = np.unique(ids, return_inverse=True)[1]  # labels of at least one point
    return csr_matrix((np.ones(len(ids)), ids, starts))


def _lines(name: str) -> list[dict[str, Any]]:
    with gzip.open(TATE / f"{name}.json.gz", "rt") as file:
        return [json.loads(line) for line in file]


if __name__ == "__main__":
    main()
