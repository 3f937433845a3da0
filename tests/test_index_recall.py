"""Every index that answers: its stored recall is that of NumPy, and an index below its target is refused."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from pipelines.mine import MineOptions, mine
from pipelines.mining.audit import Profile
from pipelines.mining.search import load_block
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.ragged import Ragged
from schemas.table import Table
from scoring import memory
from scoring.memory import NEIGHBOURS
from scoring.vectors import Vectors, write_indexes
from search.index import Factory, SearchParams, load_index, set_params
from search.topk import pad_vectors
from tests.builders import batch_of
from tests.command import TINY, call
from tests.pipelines.mining.world import World, plan_of
from trainer.group import ALONE
from trainer.heads import Classifier
from trainer.methods.sections import Classifier as ClassifierSection
from trainer.negatives import indexes
from trainer.negatives.base import SourceContext

CASE = Path(__file__).parent / "cases" / "export-index-recall"
L, D, Q, K = 700, 16, 60, 10
CODES, LINKS, LISTS = r"PQ|SQ|Flat", r"links", r"lists|nprobe"
KINDS = {
    "Flat": None,
    "IVF16,Flat": LISTS,
    "IVF16_HNSW8,Flat": LISTS,
    "IVF16,PQ8x4fs": CODES,
    "SQ4": CODES,
    "IVF16,SQ8": CODES,
    "OPQ4_16,PQ4x4": CODES,
    "HNSW4": LINKS,
}
Made = tuple[faiss.Index, SearchParams, float, np.ndarray, np.ndarray, int]  # index, effort, stored recall, data, width


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small k-means take long where threads wait for each other."""
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    faiss.omp_set_num_threads(threads)


def world() -> tuple[np.ndarray, np.ndarray]:
    """Vectors of very different lengths, in which a graph by inner product is not connected, and queries."""
    draw = np.random.default_rng(0)
    rows = draw.standard_normal((L, D)) * draw.lognormal(0, 0.8, (L, 1))
    return rows.astype(np.float32), draw.standard_normal((Q, D)).astype(np.float32)


def by_numpy(index: faiss.Index, params: SearchParams, queries: np.ndarray, rows: np.ndarray, width: int) -> float:
    """The fraction of the best labels among the candidates of the index, ranked by their products."""
    set_params(index, params)
    fetch = min(len(rows), width * params.factor + 8)
    _, candidates = index.search(pad_vectors(queries, index.d), fetch)
    scores = queries.astype(np.float64) @ rows.astype(np.float64).T
    shares = []
    for line, offered in zip(scores, candidates.tolist(), strict=True):
        found = sorted((label for label in offered if label >= 0), key=lambda label: -line[label])[:width]
        shares.append(len({*found} & {*np.argsort(-line)[:width].tolist()}) / width)
    return float(np.mean(shares))


def by_mining(spec: str, target: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    rows, queries = world()
    made = World(str(folder / "data"), str(folder / "run"), queries, rows, [[] for _ in queries], shards=1)
    made.write_dump()
    options = MineOptions(index=spec, target_recall=target, width=K, threads=1)
    manifest = mine(made.data, made.run, options=options)["queries"]
    plan = plan_of(made, options)
    loaded = load_block(plan, 0, Profile())
    params = loaded.params
    assert manifest.quality["index_recall"] == {"least": params.recall, "most": params.recall}
    sample = plan.inputs.sources[0].sample_queries(512, 0, D)
    return loaded.block.index, params, params.recall, sample, rows, K


def by_export(spec: str, target: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    rows, queries = world()
    (shard,), facts = write_indexes(spec, Vectors([rows]), queries, K, target, str(folder))
    params = SearchParams(**facts["efforts"][0])
    return load_index(str(folder / shard.path)), params, params.recall, queries, rows, K


def by_memory(spec: str, target: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(memory, "TARGET_RECALL", target)
    rows, queries = world()
    points = rows.astype(np.float16)
    unit = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    labels = Ragged(np.zeros(L, np.int32), np.arange(L + 1))
    made = memory.Memory(points, labels, L, Factory(spec)).indexed(queries, budget=0)
    params = SearchParams(made.measured["nprobe"], None, made.refine)
    return made.index, params, made.facts["measured"]["recall"], unit, points, NEIGHBOURS


def by_trainer(spec: str, target: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    monkeypatch.setattr(indexes, "TARGET_RECALL", target)
    rows, queries = world()
    head = Classifier(ClassifierSection(), L, D, seed=1)
    head.vectors.copy_(torch.from_numpy(rows))
    source = indexes.CopiedIndex(K, 0, SourceContext(head, ALONE), spec, 9, 0)
    source.find(batch_of([[] for _ in queries]), torch.from_numpy(queries))
    assert source._current is not None
    block, params = source._current
    return block.index, params, source.figures()["index_recall"], queries, rows, K


MAKERS = {"mine": by_mining, "export": by_export, "memory": by_memory, "trainer": by_trainer}


@pytest.mark.parametrize(
    ("maker", "spec"),
    [
        *itertools.product(("export",), KINDS),
        *itertools.product(("mine", "memory", "trainer"), ("IVF16,Flat", "IVF16,PQ8x4fs")),
    ],
)
def test_the_stored_recall_is_that_of_numpy_and_less_than_the_target_is_refused(
    maker: str, spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make: Callable[[str, float, Path, pytest.MonkeyPatch], Made] = MAKERS[maker]
    index, params, stored, queries, rows, width = make(spec, 0.05, tmp_path / "low", monkeypatch)
    assert stored == pytest.approx(
        by_numpy(index, params, queries, rows, width), abs=1e-4 if maker == "memory" else 1e-9
    )
    reached, refused, advice = None, "", "PQ codes" if maker == "memory" else KINDS[spec]
    try:
        reached = make(spec, 0.9999, tmp_path / "high", monkeypatch)[2]
    except InputError as error:
        refused = str(error)
    assert (reached or 0.0) >= 0.9999 or re.search(rf"finds 0\.\d+ of the nearest .*(?:{advice})", refused)


@pytest.mark.parametrize("maker", ["mine", "export", "memory", "trainer"])
def test_a_graph_that_reaches_too_few_labels_is_refused(
    maker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "PQ codes" if maker == "memory" else "'HNSW4': finds 0.* double the links"
    with pytest.raises(InputError, match=message):
        MAKERS[maker]("HNSW4", 0.9999, tmp_path, monkeypatch)


def test_an_option_that_the_user_has_set_is_named(tmp_path: Path) -> None:
    rows, queries = world()
    made = World(str(tmp_path / "data"), str(tmp_path / "run"), queries, rows, [[] for _ in queries])
    made.write_dump()
    done = call("mine", made.data, made.run, "--index", "IVF16,Flat", "--nprobe", 1, "--width", K)
    assert done.status == 2
    assert re.search(r"expected --target-recall 0.95. Raise --nprobe, or leave the option out", done.err), done.err
    assert not Path(made.layout.negatives(5, "queries")).exists()
    accepted = re.search(r"accept this recall with (--target-recall) ([\d.]+)\.", done.err)
    assert accepted is not None
    done = call("mine", made.data, made.run, "--index", "IVF16,Flat", "--nprobe", 1, "--width", K, *accepted.groups())
    assert done.status == 0, done.err
    assert re.search(r"queries: 60 rows, recall 0\.\d+ \(index IVF16,Flat when tuned: 0\.\d+\)", done.err), done.err


@pytest.mark.slow
def test_an_export_with_a_poor_graph_is_refused(tmp_path: Path) -> None:
    data, run, out = tmp_path / "data", tmp_path / "run", tmp_path / "out"
    assert call("shard", CASE / "raw", data, "--format", "xc").status == 0
    chosen = [flag for value in (*TINY, "encoder.dimension=64", "train.epochs=1") for flag in ("--set", value)]
    assert call("train", "random", data, run, *chosen).status == 0
    refused = call("export", data, run, out, "--index", "HNSW16", "--calibration-split", "none")
    assert refused.status == 2
    assert re.search(r"'HNSW16': finds 0\.\d+ of .* expected --target-recall 0.98. .*double the links", refused.err)
    assert not out.exists()
    done = call("export", data, run, out, "--index", "IVF32,Flat", "--calibration-split", "none", "--json")
    assert re.search(r"index IVF32,Flat: recall (0\.9[89]\d*|1\.0000) of the best 10 labels of 512 training", done.err)
    assert done.json["index"]["efforts"][0]["recall"] >= 0.98
    assert Table.open(DataLayout(str(data)).labels).rows == 3043
