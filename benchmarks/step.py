"""The classifier's part of a step (gather, score, loss, backward, update) at 131K to 100M labels.

Each of 512 queries has 10 positives, 100 hard and 400 random negatives. All labels are drawn uniformly, so rows are not
close to each other in memory. Each query has its own random negatives (261,120 pairs, and nearly as many rows at 100M
labels), or all queries share a pool. D = 64, bfloat16, row-wise Adagrad. Each number of labels is measured in turns
with the smallest number. Also measured: the time for touching the same rows without any work, the step of full
one-vs-all, the step with separate gather, loss, backward and update (as for losses other than binary cross-entropy),
the step on a mapped file, and the bytes that a step has to touch. Candidates are planned beforehand, as the stream's
threads do, on one thread; planning is measured in turns with the step.

    python -m benchmarks.step [--quick] [--folder DIR]
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import numba
import numpy as np
import torch

from benchmarks.common.report import interleave, medians, report
from trainer.heads import Classifier
from trainer.inputs import Inputs
from trainer.methods.sections import Classifier as Config
from trainer.negatives.draws import RandomPool
from trainer.negatives.planner import own_pool, range_candidates, shared_pool
from trainer.one_vs_all import binary_cross_entropy
from trainer.stream import Batch
from trainer.stream.batch import Candidates
from trainer.threads import map_ranges

B, D = 512, 64
POSITIVES, HARD, RANDOM = 10, 100, 400
SIZES = {"131K": 131_072, "1.3M": 1_305_265, "19M": 19_049_952, "100M": 100_000_000}
SMALLEST, LARGEST = "131K", "100M"
FORMS = ("own", "shared")
WAYS = {"fused": "", "planning": ", planning", "bare": ", rows alone", "apart": ", apart"}
LR = 0.01
DTYPE = "bfloat16"
LINE = 32  # columns per cache line
CHUNK = 4096  # labels per chunk in full one-vs-all
ROUNDS, QUICK_ROUNDS = 15, 9
BATCHES = 5  # batches of candidates: their rows have left the caches before a batch is reused
NEEDED_GIB = {"100M": 15.0}


@dataclass
class ClassifierSteps:
    """A classifier with `labels` labels, and batches of candidates."""

    classifier: Classifier
    x: torch.Tensor
    own_pools: list[Candidates]
    shared_pools: list[Candidates]
    batches: list[Batch]
    step: int = 0

    @classmethod
    def of(cls, labels: int, storage: str = "memory") -> "ClassifierSteps":
        classifier = Classifier(Config(dtype=DTYPE, storage=storage, lr=LR), labels, D, 0)
        _fill(classifier.vectors)
        classifier.matrix.state["square"].fill_(1e-3)
        draw = np.random.default_rng(labels)
        batches = [_batch(draw, labels, step) for step in range(BATCHES)]
        own, shared = ([_plan(form, batch, labels) for batch in batches] for form in FORMS)
        x = torch.from_numpy(draw.standard_normal((B, D)).astype(np.float32))
        return cls(classifier, x, own, shared, batches)

    def candidates(self, form: str) -> list[Candidates]:
        return self.own_pools if form == "own" else self.shared_pools

    def fused(self, form: str) -> float:
        """Return the seconds of a step in one pass over its rows."""
        return self._timed(form, lambda candidates: self.classifier.descend(self.x, candidates, 1.0, self.step, 1 / B))

    def apart(self, form: str) -> float:
        """Return the seconds of a step as gather, loss, backward and update."""
        return self._timed(form, self._apart)

    def planning(self, form: str) -> float:
        """Return the seconds for drawing and merging a step's candidates."""
        batch = self.batches[self.step % BATCHES]
        self.step += 1
        began = time.perf_counter()
        _plan(form, batch, self.classifier.labels)
        return time.perf_counter() - began

    def bare(self, form: str) -> float:
        """Return the seconds for only reading and writing a step's rows and their Adagrad sums."""
        matrix, sums = self.classifier.vectors.view(torch.int16).numpy(), self.classifier.matrix.state["square"].numpy()
        return self._timed(
            form,
            lambda candidates: map_ranges(
                lambda _, start, stop: _touch(matrix, sums, candidates.ids, start, stop), len(candidates.ids)
            ),
        )

    def full(self) -> float:
        """Return the seconds of a step of full one-vs-all."""
        began = time.perf_counter()
        for start in range(0, self.classifier.labels, CHUNK):
            self._apart(range_candidates(self.batches[0], start, min(start + CHUNK, self.classifier.labels)))
        return time.perf_counter() - began

    def rows(self, form: str) -> float:
        """Return the number of distinct labels of a batch."""
        return float(np.mean([len(candidates.ids) for candidates in self.candidates(form)]))

    def _timed(self, form: str, work: Callable[[Candidates], object]) -> float:
        candidates = self.candidates(form)[self.step % BATCHES]
        self.step += 1
        began = time.perf_counter()
        work(candidates)
        return time.perf_counter() - began

    def _apart(self, candidates: Candidates) -> torch.Tensor:
        leaf = self.x.clone().requires_grad_()
        w = self.classifier.matrix.gather(candidates.ids)
        (binary_cross_entropy(leaf, w, candidates) / B).backward()
        self.classifier.matrix.update(candidates.ids, w, LR, self.step)
        return leaf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="131K and 1.3M labels only")
    parser.add_argument("--folder", help="where the mapped file goes; default: the temporary folder")
    arguments = parser.parse_args()
    names = ["131K", "1.3M"] if arguments.quick else [name for name in SIZES if _fits(name)]
    rounds = QUICK_ROUNDS if arguments.quick else ROUNDS
    figures: dict[str, object] = {}
    ratios: dict[str, float] = {}
    small = ClassifierSteps.of(SIZES[SMALLEST])
    for name in names[1:]:
        large = ClassifierSteps.of(SIZES[name])
        for form in FORMS:
            _compare(figures, ratios, form, name, (small, large), rounds)
        figures[f"bytes {name}"] = {form: _bytes(large, form) for form in FORMS}
        if SIZES[name] <= SIZES["1.3M"]:
            _against_full(figures, ratios, SMALLEST, small, 3)
            _against_full(figures, ratios, name, large, 1)
        del large
    figures[f"bytes {SMALLEST}"] = {form: _bytes(small, form) for form in FORMS}
    figures["own pool, planning: ms at the speed of memory"] = round(_planning_limit(small) * 1e3, 2)
    if not arguments.quick:
        _mapped(figures, ratios, arguments.folder, rounds)
    for form in FORMS:
        ratios[f"bytes of rows touched over the least, {form} pool"] = _touched(small, form) / _least(small, form)
    largest = names[-1]
    report(
        f"the classifier's part of a step costs at {largest} labels at most 1.5 times what it costs at {SMALLEST}, and "
        "planning takes at most half of its time, own pools at most 2 ms on one core",
        figures,
        ratios,
        {f"{form} pool: {largest} over {SMALLEST}": "<1.5" for form in FORMS}
        | {f"{form} pool: planning over the step at {name}": "<0.5" for form in FORMS for name in (SMALLEST, largest)}
        | {f"own pool: ms of planning at {name}": "<2.0" for name in (SMALLEST, largest)},
    )


def _compare(
    figures: dict, ratios: dict, form: str, name: str, sizes: tuple[ClassifierSteps, ClassifierSteps], rounds: int
) -> None:
    small, large = sizes
    middle = {}
    for way in WAYS:
        sides = {
            name_of: lambda steps=steps, way=way: getattr(steps, way)(form)
            for name_of, steps in ((SMALLEST, small), (name, large))
        }
        for run in sides.values():
            run()
        middle[way] = medians(interleave(sides, rounds))
        title = f"{form} pool{WAYS[way]}"
        figures[f"{title}: ms at {SMALLEST} beside {name}"] = round(middle[way][SMALLEST] * 1e3, 2)
        figures[f"{title}: ms at {name}"] = round(middle[way][name] * 1e3, 2)
        ratios[f"{title}: {name} over {SMALLEST}"] = middle[way][name] / middle[way][SMALLEST]
    for size in (SMALLEST, name):
        ratios[f"{form} pool: ms of planning at {size}"] = middle["planning"][size] * 1e3
        ratios[f"{form} pool: planning over the step at {size}"] = middle["planning"][size] / middle["fused"][size]


def _against_full(figures: dict, ratios: dict, name: str, steps: ClassifierSteps, rounds: int) -> None:
    times = interleave({"full": steps.full, "own": lambda: steps.fused("own")}, rounds)
    middle = medians(times)
    figures[f"full one-vs-all: ms at {name}"] = round(middle["full"] * 1e3, 1)
    ratios[f"full one-vs-all over own pool at {name}"] = middle["full"] / middle["own"]


def _mapped(figures: dict, ratios: dict, folder: str | None, rounds: int) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as directory:
        mapped, held = ClassifierSteps.of(SIZES["19M"], directory), ClassifierSteps.of(SIZES["19M"])
        sides = {"19M in memory": lambda: held.fused("own"), "19M in a file": lambda: mapped.fused("own")}
        for run in sides.values():
            run()
        middle = medians(interleave(sides, rounds))
        figures["own pool: ms at 19M in a mapped file"] = round(middle["19M in a file"] * 1e3, 2)
        ratios["own pool at 19M: mapped file over memory"] = middle["19M in a file"] / middle["19M in memory"]


def _fill(vectors: torch.Tensor) -> None:
    """Write nonzero values into every row, so that every page is allocated."""
    block = (torch.randn(1 << 16, D, generator=torch.Generator().manual_seed(0)) * 0.1).to(vectors.dtype)
    for start in range(0, len(vectors), len(block)):
        rows = vectors[start : start + len(block)]
        rows.copy_(block[: len(rows)])


def _batch(draw: np.random.Generator, labels: int, step: int) -> Batch:
    drawn = np.sort(draw.integers(0, labels - POSITIVES - HARD, (B, POSITIVES + HARD)), axis=1)
    distinct = draw.permuted(drawn + np.arange(POSITIVES + HARD), axis=1)
    positives = np.sort(distinct[:, :POSITIVES], axis=1).reshape(-1).astype(np.int32)
    hard = np.ascontiguousarray(distinct[:, POSITIVES:]).astype(np.int32)
    return Batch(0, step, np.arange(B), Inputs(), positives, np.arange(B + 1) * POSITIVES, hard)


def _plan(form: str, batch: Batch, labels: int) -> Candidates:
    draws, at = RandomPool(labels), {"seed": 0, "epoch": 0, "step": batch.step}
    if form == "own":
        return own_pool(batch, batch.hard, draws.draw_own(RANDOM, batch.rows, **at), labels / RANDOM)
    return shared_pool(batch, batch.hard, draws.draw(RANDOM, **at), labels / RANDOM)


@numba.njit(nogil=True)
def _touch(vectors: np.ndarray, sums: np.ndarray, ids: np.ndarray, start: int, stop: int) -> None:
    for i in range(start, stop):
        for column in range(0, vectors.shape[1], LINE):
            vectors[ids[i], column] ^= 1
        sums[ids[i]] *= np.float32(0.999)


def _least(steps: ClassifierSteps, form: str) -> float:
    """Return the bytes of the rows and their Adagrad sums, read once and written once."""
    return steps.rows(form) * 2 * (D * 2 + 4)


def _touched(steps: ClassifierSteps, form: str) -> float:
    """Return these bytes in whole cache lines: two lines for a row, and a third line for its sum."""
    return steps.rows(form) * 2 * (D * 2 + 64)


def _bytes(steps: ClassifierSteps, form: str) -> dict[str, int]:
    """Return the bytes of rows and their state, of pairs, and of a float32 copy of the rows, which the step avoids."""
    pairs = float(np.mean([len(candidates.pair_query) for candidates in steps.candidates(form)]))
    return {
        "rows": round(steps.rows(form)),
        "least": round(_least(steps, form)),
        "in cache lines": round(_touched(steps, form)),
        "pairs, read and sorted by label": round(pairs * 4 * (4 + 4)),
        "a copy of the rows and its gradient, each written and read": round(steps.rows(form) * D * 4 * 4),
    }


def _planning_limit(steps: ClassifierSteps) -> float:
    """Return the seconds in which memory moves the input (labels) and output (labels, pairs) of planning once."""
    candidates = steps.own_pools[0]
    pairs = candidates.pair_query, candidates.pair_label, candidates.pair_positive, candidates.pair_weight
    size = B * (POSITIVES + HARD + RANDOM) * 4 + candidates.ids.nbytes + sum(column.nbytes for column in pairs)
    source, target = np.ones(1 << 26, np.uint8), np.zeros(1 << 26, np.uint8)
    seconds = []
    for _ in range(5):
        began = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - began)
    return size * min(seconds) / (2 * len(source))


def _fits(name: str) -> bool:
    needed = NEEDED_GIB.get(name, 0.0)
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) / 2**20
    if free < needed:
        sys.exit(f"{name} labels take {needed:g} GiB, {free:.1f} are available: stop what else runs, or give --quick")
    return True


if __name__ == "__main__":
    main()
