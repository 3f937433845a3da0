"""Operations and bytes of a step on a GPU, counted on PyTorch's `meta` device: no GPU is needed or timed.

Batches have 512 queries with 10 positives, 50 hard and 400 random negatives; there are 100M labels, with D = 64 in
bfloat16 and row-wise Adagrad. Two steps are counted: the classifier's step with own pools, with a shared pool, and with
a chunk of full one-vs-all; and the whole step of a bag of embeddings with a residual layer and dropout. Views do not
count as operations; Triton's kernels are counted where they are called. The bytes of an operation are all bytes that it
reads and writes; of matrices with looked-up rows, only these rows count. Sorting is one operation here but about nine
launches on a GPU, and a cumulative sum is two launches; AdamW is a dozen operations here but one kernel on a GPU. Host
milliseconds are processor time of the thread that prepares a bag's step.

    python -m benchmarks.launches [--quick]
"""

import argparse
import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common.report import report
from benchmarks.gpu.random_queries import plan, random_batch
from trainer.group import ALONE
from trainer.heads import Classifier, WholeBatch
from trainer.methods.recipe import Recipe
from trainer.methods.sections import Classifier as Config
from trainer.model import Model
from trainer.negatives.planner import Planner, range_candidates
from trainer.rows import triton_kernels
from trainer.step import Clock, StepContext, plan_for_device, take_step
from trainer.stream import Batch

META = torch.device("meta")
B, D, LABELS, CHUNK = 512, 64, 100_000_000, 1 << 16
TOKENS, VOCABULARY, BUCKETS = 32, 30_522, 1 << 18
_NO_WORK = {"empty", "new_empty", "empty_like", "empty_strided", "lift_fresh", "_local_scalar_dense", "set_"}
_NO_WORK |= {"_record_function_enter_new", "_record_function_exit"}
_LOOK_UPS = {"index_select", "gather", "embedding_bag", "_embedding_bag"}  # read a part of the first argument
MICROSECONDS, GIGABYTES = 5.0, 4300.0  # expected seconds per launch, and bytes per second of an H200's memory


class Counting(TorchDispatchMode):
    """Counts operations by name, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: collections.Counter[str] = collections.Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        if name not in _NO_WORK and not func.is_view:
            self.operations[name] += 1
            read = args[1:] if name in _LOOK_UPS else args
            self.bytes += _bytes((read, kwargs, result)) + (_bytes(result) if name in _LOOK_UPS else 0)
        return result

    def kernel(self, name: str, moved: int) -> None:
        """Count a Triton kernel."""
        self.operations[name] += 1
        self.bytes += moved


class _Kernel:
    """Replaces a Triton kernel, because these do not run on `meta`."""

    def __init__(self, name: str, counting: Counting) -> None:
        self._name, self._counting = name, counting

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self._launch

    def _launch(self, *given: Any, **_: Any) -> None:
        """Count bytes: for vectors and their state only touched rows, for other arguments all bytes."""
        assert {each.device for each in given if isinstance(each, torch.Tensor)} == {META}, "it is on another device"
        if self._name == "update_kernel":
            rows, count, ways, rest = given[:4], len(given[4]), 2, given[4:]
            rows = tuple(each for each in rows if len(each) == len(given[0]))  # others replace absent arguments
        elif self._name == "score_kernel":
            rows, count, ways, rest = given[1:2], len(given[3]), 1, (given[0], *given[2:])
        else:
            rows, count, ways, rest = (), 0, 0, given
        touched = sum(ways * count * tensor_bytes(each[:1]) for each in rows)
        others = {id(each): each for each in rest if isinstance(each, torch.Tensor)}.values()
        self._counting.kernel(self._name, touched + sum(map(tensor_bytes, others)))


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor."""
    return tensor.numel() * tensor.element_size()


def _bytes(values: Any) -> int:
    return sum(tensor_bytes(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


@contextlib.contextmanager
def counting() -> Iterator[Counting]:
    """Count the operations of the block on `meta`, which acts as a GPU with Triton."""
    count = Counting()
    kernels = [name for name in vars(triton_kernels) if name.endswith("_kernel")]
    with contextlib.ExitStack() as patches:
        for name in kernels:
            patches.enter_context(mock.patch.object(triton_kernels, name, _Kernel(name, count)))
        for module in ("trainer.one_vs_all", "trainer.rows.matrix"):
            patches.enter_context(mock.patch(f"{module}.kernels_of", return_value=triton_kernels))
        with count:
            yield count


def classifier_step(pool: str, size: int = B, labels: int = LABELS, **config: Any) -> Counting:
    """Count the classifier's step as in `Head.learn`, with candidates planned beforehand."""
    classifier = Classifier(Config(dtype="bfloat16", lr=0.01, **config), labels, D, 0, device=META)
    batch = random_batch(size, labels, 0)
    candidates = range_candidates(batch, 0, CHUNK) if pool == "full" else plan(batch, labels, pool, META)
    x = torch.empty(size, D, device=META)
    with counting() as count:
        classifier.descend(x, candidates, 1.0, 0, 1 / size)
    return count


def _open_bag(size: int, labels: int) -> tuple[StepContext, Batch]:
    """Return a bag's context, and a batch prepared and planned as by the stream's threads."""
    encoder = {"dimension": D, "buckets": BUCKETS, "residual": True, "dropout": 0.1, "feature_dropout": 0.1}
    recipe = Recipe.model_validate(
        {
            "encoder": encoder,
            "classifier": {"dtype": "bfloat16"},
            "negatives": {"pool": "own", "random": 400, "hard": 50},
        }
    )
    model = Model.build(recipe, VOCABULARY, labels, device=META)
    queries = WholeBatch(model.encoder, ALONE, Clock().lap)
    context = StepContext(model, Planner(recipe.negatives, labels, merges=False), queries)
    batch = random_batch(size, labels, 0, TOKENS, VOCABULARY)
    prepare = queries.preparing()
    assert prepare is not None
    batch = replace(batch, candidates=plan_for_device(lambda each: plan(each, labels, "own", META), META, batch))
    return context, replace(batch, prepared=prepare(batch))


def bag_step(size: int = B, labels: int = LABELS) -> tuple[Counting, float]:
    """Count a bag's whole step; also return the host milliseconds of the preparation in a thread."""
    context, batch = _open_bag(size, labels)
    take_step(context, batch, 0, 1.0)  # builds the optimizer
    with counting() as count:
        take_step(context, batch, 1, 1.0)
    encoder = context.model.encoder
    return count, _host_milliseconds(lambda step: encoder.prepare(batch.inputs, (0, step)))


def _host_milliseconds(work: Callable[[int], object]) -> float:
    """Return the milliseconds of the thread per call."""
    times = []
    for number in range(51):
        began = time.thread_time()
        work(number)
        times.append(time.thread_time() - began)
    return float(np.median(times)) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a batch of 16")
    size = 16 if parser.parse_args().quick else B
    figures: dict[str, Any] = {}
    counts = {pool: classifier_step(pool, size) for pool in ("own", "shared", "full")}
    counts["full, bfloat16"] = classifier_step("full", size, products="bfloat16")
    counts["bag"], ahead = bag_step(size)
    for name, count in counts.items():
        launches = count.operations.total()
        figures[name] = {
            "operations": launches,
            "megabytes": round(count.bytes / 1e6, 2),
            "expected ms, launches": round(launches * MICROSECONDS / 1e3, 3),
            "expected ms, bytes": round(count.bytes / GIGABYTES / 1e6, 3),
            "by name": dict(count.operations.most_common()),
        }
    figures["bag, host ms"] = {"prepared ahead": round(ahead, 3)}
    ratios = {"operations, own pools": counts["own"].operations.total()}
    report(
        "a step on a GPU with own pools is at most 25 operations",
        figures,
        ratios,
        {"operations, own pools": "<25.5"},
    )


if __name__ == "__main__":
    main()
