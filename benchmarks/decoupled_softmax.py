"""DEXML's synthetic tests: a marker token that softmax cannot learn (Figure 2), memorized random pairs (Table 10).

    python -m benchmarks.decoupled_softmax [--seed N]         both, with 100,000 pairs
    python -m benchmarks.decoupled_softmax --quick            both, with 5,000 pairs
    python -m benchmarks.decoupled_softmax --part figure-2    one part: figure-2 or table-10

Figure 2: 1,000 queries and 5,000 labels are made of random tokens. The first 100 queries begin with the token t* and
have the labels 0 to 4; only the text of label 0 contains t*. Each other query has a random label (the paper does not
state this). 1,000 new queries that begin with t* should find label 0. Table 10: there are as many queries as labels,
query i has label i, and all texts have 16 random tokens; the training pairs themselves are scored. Hard negatives are
drawn from the 100 labels nearest to a query, and the search is repeated every few epochs. Queries and labels share the
encoder, a bag of embeddings: of tokens in Figure 2, of tokens and pairs of tokens in Table 10.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch

from benchmarks.common.report import Bar, report
from schemas.ragged import Ragged
from search.torch_topk import top_k
from trainer.heads import LabelEncoderHead, SubBatches
from trainer.inputs import Inputs
from trainer.methods.recipe import Recipe
from trainer.model import Model
from trainer.negatives.planner import Planner
from trainer.step import StepContext, take_step
from trainer.stream.batch import Batch

LENGTH = 16  # tokens per text
SHORTLIST = 100
QUERIES, LABELS, MARKED, SHARED, VOCABULARY = 1_000, 5_000, 100, 5, 10_000  # Figure 2


@dataclass(frozen=True)
class Setting:
    """Sizes for Table 10: `hard` negatives per query, and a new shortlist every `refresh` epochs."""

    pairs: int
    epochs: int
    batch: int = 1_000
    hard: int = 2
    refresh: int = 2
    vocabulary: int = 10_000
    dimension: int = 64
    seed: int = 0


BARS: dict[str, Bar] = {
    "decoupled_p_at_1": 95.0,
    "softmax_p_at_1": "<40",
    "in_batch_p_at_1": 95.0,
    "hard_p_at_1": 99.0,
}
FULL, QUICK = Setting(pairs=100_000, epochs=8), Setting(pairs=5_000, epochs=8, batch=250)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=("figure-2", "table-10"))
    parser.add_argument("--seed", type=int, default=0, help="of data and training")
    options = parser.parse_args()
    setting = replace(QUICK if options.quick else FULL, seed=options.seed)
    figures, ratios = asdict(setting), dict[str, float]()
    if options.part != "table-10":
        for loss in ("decoupled", "softmax"):
            figures[loss] = timed(f"figure 2, {loss}", learn_marker, loss, options.seed)
            ratios[f"{loss}_p_at_1"] = figures[loss]["P@1"]
    if options.part != "figure-2":
        for name, hard in (("in_batch", 0), ("hard", setting.hard)):
            figures[name] = timed(f"{setting.pairs:,} pairs, {name}", memorize_pairs, setting, hard)
            ratios[f"{name}_p_at_1"] = figures[name]["P@1"]
    report(
        "decoupled softmax learns a marker token that softmax cannot, and a dual encoder learns random pairs by heart",
        figures,
        ratios,
        {name: bar for name, bar in BARS.items() if name in ratios},
    )


def learn_marker(loss: str, seed: int = 0, epochs: int = 8, batch: int = 250) -> dict[str, float]:
    """Return P@1 of new queries with the marker, after training on every label."""
    draw = np.random.default_rng(seed)
    marker = VOCABULARY  # a separate token, so that no other text contains it by chance
    queries, labels, new = (draw.integers(0, VOCABULARY, (n, LENGTH)) for n in (QUERIES, LABELS, QUERIES))
    queries[:MARKED, 0] = new[:, 0] = marker
    labels[0, -1] = marker
    other_labels = draw.integers(SHARED, LABELS, QUERIES)
    positives = [list(range(SHARED)) if row < MARKED else [int(other_labels[row])] for row in range(QUERIES)]
    # The marker is in 100 queries, any other token in few: with SGD it learns that much faster, unlike row-wise Adam.
    trained = DualEncoder(loss, "all", labels, VOCABULARY + 1, seed=seed, optimizer="sgd", lr=0.3, initial_scale=0.1)
    for epoch in range(epochs):
        for step, rows in enumerate(batches(QUERIES, batch, epoch)):
            trained.step(queries, positives, rows, epoch, step)
    return trained.scores(new, np.zeros(QUERIES, np.int64), (1,))


def memorize_pairs(setting: Setting, hard: int) -> dict[str, float]:
    """Return metrics on the training pairs."""
    draw = np.random.default_rng(setting.seed)
    queries, labels = (draw.integers(0, setting.vocabulary, (setting.pairs, LENGTH)) for _ in range(2))
    answers = np.arange(setting.pairs)
    positives = answers[:, None].tolist()
    trained = DualEncoder("decoupled", "batch", labels, setting.vocabulary, setting.dimension, 2, hard, setting.seed)
    shortlist = None
    for epoch in range(setting.epochs):
        if hard and epoch and epoch % setting.refresh == 0:
            shortlist = trained.nearest(queries, SHORTLIST)  # excludes the positive from the negatives
        for step, rows in enumerate(batches(setting.pairs, setting.batch, epoch)):
            trained.step(queries, positives, rows, epoch, step, shortlist)
    return trained.scores(queries, answers, (1, 5, 10, 100))


class DualEncoder:
    """A dual encoder with label texts in memory, token ids [L, LENGTH]."""

    def __init__(
        self,
        loss: str,
        pool: str,
        labels: np.ndarray,
        vocabulary: int,
        dimension: int = 64,
        ngrams: int = 1,
        hard: int = 0,
        seed: int = 0,
        **encoder: object,
    ) -> None:
        recipe = Recipe.model_validate(
            {
                "encoder": {
                    "dimension": dimension,
                    "ngrams": ngrams,
                    "buckets": 1 << 18,
                    "idf": False,
                    "normalize": True,
                    "optimizer": "adam",
                    "lr": 0.01,
                    **encoder,
                },
                "head": {"kind": "label-encoder", "label_batch": 4096},
                "negatives": {"pool": pool, **({"hard": hard, "width": SHORTLIST} if hard else {})},
                "loss": {"kind": loss, "temperature": 0.05},
            }
        )
        self._encoder = recipe.encoder.build(vocabulary, seed)
        self._head = LabelEncoderHead(recipe, self._encoder, len(labels), Texts(labels))  # type: ignore[arg-type]
        planner, queries = Planner(recipe.negatives, len(labels)), SubBatches(self._encoder, 1)
        self._context = StepContext(Model(self._encoder, self._head), planner, queries)

    def step(
        self,
        queries: np.ndarray,
        positives: Sequence[list[int]],
        rows: np.ndarray,
        epoch: int,
        step: int,
        shortlist: np.ndarray | None = None,
    ) -> None:
        labels = [positives[row] for row in rows]
        offsets = np.cumsum([0, *map(len, labels)])
        hard = None if shortlist is None else shortlist[rows]
        batch = Batch(epoch, step, rows, inputs_of(queries[rows]), np.concatenate(labels), offsets, hard)
        take_step(self._context, batch, 0, 1.0)

    def nearest(self, queries: np.ndarray, k: int) -> np.ndarray:
        """Return the k best labels of each query, [B, k]."""
        labels = []
        for start in range(0, len(queries), 1_000):
            inputs = inputs_of(queries[start : start + 1_000])
            x = self._encoder.encode(self._encoder.prepare(inputs))
            labels.append(top_k(x, self._head.vectors, k)[1])
        return torch.cat(labels).numpy()

    def scores(self, queries: np.ndarray, answers: np.ndarray, ks: tuple[int, ...]) -> dict[str, float]:
        """Return P@1, P@5, R@10, R@100 in percent, for `ks`; each query has one answer."""
        hits = self.nearest(queries, max(ks)) == answers[:, None]
        shares = {k: 100 * float(hits[:, :k].any(1).mean()) for k in ks}
        return {f"P@{k}" if k <= 5 else f"R@{k}": share / k if k <= 5 else share for k, share in shares.items()}


class Texts:
    """Label texts in memory, in place of texts on disk."""

    def __init__(self, tokens: np.ndarray) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    def take(self, ids: np.ndarray) -> Inputs:
        return inputs_of(self._tokens[np.asarray(ids, np.int64)])


def inputs_of(tokens: np.ndarray) -> Inputs:
    return Inputs(Ragged(tokens.astype(np.uint16).ravel(), np.arange(len(tokens) + 1) * LENGTH))


def batches(rows: int, size: int, epoch: int) -> Iterator[np.ndarray]:
    order = np.random.default_rng((1, epoch)).permutation(rows)
    for start in range(0, rows, size):
        yield order[start : start + size]


def timed(name: str, action: Callable[..., dict[str, float]], *arguments: object) -> dict[str, float]:
    started = time.perf_counter()
    metrics = {**action(*arguments), "seconds": round(time.perf_counter() - started, 1)}
    sys.stderr.write(f"{name}: {metrics}\n")
    return metrics


if __name__ == "__main__":
    main()
