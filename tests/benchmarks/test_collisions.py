"""The collision probe against all codes and scores compared in full."""

import numpy as np

from benchmarks.common.collisions import FIRST, clustered_probe, measure
from trainer.negatives.lsh import HashFunctions
from trainer.negatives.lsh_section import LshSection


def test_what_is_found_is_what_shares_a_code_with_the_query_in_some_table() -> None:
    labels, tables = 500, 20
    probe = clustered_probe(labels, 30, dimension=16, size=100, seed=3)
    options = LshSection(hard="all", width=4, bits=3, tables=tables, capacity=labels)  # nothing overflows
    figures = measure(probe, options)
    codes = HashFunctions("dwta", 16, 3, tables, 0, 4).codes(np.concatenate([probe.vectors, probe.x]))
    positives = probe.positives.values
    scores = probe.x @ probe.vectors.T
    scores[np.arange(30), positives] = -np.inf
    best = np.argsort(-scores)[:, :FIRST]
    for query, own in (("embedding", codes[labels:]), ("label", codes[positives])):
        shared = (own[:, None] == codes[None, :labels]).any(2)
        shared[np.arange(30), positives] = False
        assert figures[query] == {
            "labels": round(float(shared.sum(1).mean()), 1),
            "found": round(float(np.take_along_axis(shared, best, 1).mean()), 5),
            "uniform": round(float(shared.sum(1).mean()) / (labels - 1), 5),
        }
    assert figures["embedding"]["found"] > 1.5 * figures["embedding"]["uniform"]


def test_vectors_of_a_cluster_are_nearer_to_its_queries_than_others() -> None:
    probe = clustered_probe(1000, 50, size=200)
    scores = probe.x @ probe.vectors.T
    inside = probe.positives.values[:, None] // 200 == np.arange(1000) // 200
    assert scores[inside].mean() > scores[~inside].mean() + 50
