"""The closed loop's queries have the truth that they are said to have, and its search finds the best labels."""

import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch

from benchmarks.common.clustered_queries import (
    BLOCK,
    CLUSTER,
    CLUSTER_VOCABULARY,
    CLUSTER_WORDS,
    EACH,
    FACET_VOCABULARY,
    FACET_WORDS,
    FACETS,
    HIDDEN,
    VOCABULARY,
    WORDS,
    QueryDistribution,
    write_clustered,
)
from benchmarks.common.exact_top import keep_best


@pytest.fixture(scope="module")
def distribution() -> QueryDistribution:
    return QueryDistribution.of(50_000, 100_003)


def test_ids_are_a_permutation_of_the_labels(distribution: QueryDistribution) -> None:
    ids = distribution.label_ids(np.arange(distribution.labels))
    assert np.array_equal(np.sort(ids), np.arange(distribution.labels))
    assert np.array_equal(distribution.cluster_of(ids), np.arange(distribution.labels) // CLUSTER)


def test_the_labels_of_a_query_are_one_facet_of_one_covered_cluster(distribution: QueryDistribution) -> None:
    labels = distribution.draw("train", 0, 5000).labels
    clusters = distribution.cluster_of(labels)
    assert (clusters == clusters[:, :1]).all()
    assert 0 <= clusters.min() <= clusters.max() < distribution.clusters
    facets = {tuple(sorted(row)) for row in labels.tolist()}
    assert len({label for facet in facets for label in facet}) == EACH * len(facets)


def test_words_tell_clusters_and_all_but_the_hidden_tell_facets(distribution: QueryDistribution) -> None:
    queries = distribution.draw("train", 0, BLOCK)
    facets, words = queries.labels[:, 0], queries.words[:, CLUSTER_WORDS : CLUSTER_WORDS + FACET_WORDS]
    shown = words[:, 0] < CLUSTER_VOCABULARY + FACET_VOCABULARY
    assert abs((~shown).mean() - HIDDEN) < 0.01
    assert distribution.best == pytest.approx(1 - HIDDEN + HIDDEN / FACETS)
    for facet in np.unique(facets)[:20]:
        assert len(np.unique(words[(facets == facet) & shown])) <= 3
    assert queries.words.min() >= 0
    assert queries.words.max() < VOCABULARY


def test_a_query_is_the_same_whichever_rows_are_drawn_with_it(distribution: QueryDistribution) -> None:
    whole, part = distribution.draw("test", BLOCK, 2 * BLOCK), distribution.draw("test", BLOCK + 100, BLOCK + 110)
    assert np.array_equal(whole.words[100:110], part.words)
    assert np.array_equal(whole.labels[100:110], part.labels)
    assert not np.array_equal(distribution.draw("train", BLOCK, BLOCK + 10).words, whole.words[:10])


def test_scipy_reads_what_is_written_and_two_writes_are_the_same(
    distribution: QueryDistribution, tmp_path: Path
) -> None:
    rows = BLOCK + 10
    for name in ("first", "second"):
        write_clustered(tmp_path / name, distribution, rows, 10)
    for file in sorted((tmp_path / "first").iterdir()):
        assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()
        assert zipfile.ZipFile(file).testzip() is None
    features = scipy.sparse.load_npz(tmp_path / "first" / "trn_X_Xf.npz")
    labels = scipy.sparse.load_npz(tmp_path / "first" / "trn_X_Y.npz")
    assert features.shape == (rows, VOCABULARY)
    assert labels.shape == (rows, distribution.labels)
    last = distribution.draw("train", BLOCK, rows)
    assert np.array_equal(features.indices.reshape(-1, WORDS)[BLOCK:], last.words)
    assert np.array_equal(labels.indices.reshape(-1, EACH)[BLOCK:], last.labels)


def test_the_best_of_all_blocks_are_the_best_of_all_labels() -> None:
    draw = torch.Generator().manual_seed(0)
    x, vectors = torch.randn(40, 8, generator=draw), torch.randn(1000, 8, generator=draw)
    scores, ids = torch.full((40, 5), -torch.inf), torch.full((40, 5), -1)
    for first in range(0, 1000, 64):
        keep_best(scores, ids, x @ vectors[first : first + 64].T, first)
    assert torch.equal(ids, (x @ vectors.T).topk(5, dim=1).indices)
