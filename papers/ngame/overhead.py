"""NGAME's overhead from measured parts: clusters every few epochs, over these epochs of a transformer (Table 5).

    python -m papers.ngame.overhead [--queries 45000]

An epoch encodes each query and one label, forward and backward: processor seconds a text of a DistilBERT (6 layers,
D = 768, random weights, which cost what trained ones do), of 32 tokens as the short texts of Table 9. Clusters are
those of `extremis cluster`, of random embeddings.
"""

import argparse
import resource
from collections.abc import Callable

import numpy as np
import torch
from transformers import DistilBertConfig, DistilBertModel

from benchmarks.common.report import report
from pipelines.cluster import balanced_order

DIMENSION, TOKENS, BATCH, ROUNDS = 768, 32, 64, 3
SIZE, EVERY = 320, 5  # final C, and tau (Table 9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=45_000)
    queries = parser.parse_args().queries
    model = DistilBertModel(DistilBertConfig(dim=DIMENSION))
    texts = torch.randint(0, 30_000, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        model(texts).last_hidden_state.mean().backward()

    step()
    of_text = min(seconds(step) for _ in range(ROUNDS)) / BATCH
    x = np.random.default_rng(0).standard_normal((queries, DIMENSION), np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    clusters = seconds(lambda: balanced_order(x, SIZE, SIZE))
    epochs = EVERY * 2 * queries * of_text  # a query and one of its positives
    report(
        "clusters add little to epochs of a transformer",
        {"seconds_a_text": of_text, "seconds_of_clusters": clusters, "queries": queries, "cluster": SIZE},
        {"clusters_over_epochs": clusters / epochs},
        {"clusters_over_epochs": "<0.02"},
    )


def seconds(action: Callable[[], object]) -> float:
    """Return the processor seconds of an action."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    action()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    main()
