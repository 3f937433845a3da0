"""Rows per second of `extremis shard` against bare `tokenizers` batch encoding of the same texts on the same cores.

The time of a small input, which measures start-up (interpreter, Beam, worker processes, small files), is subtracted:
the rate is that of the additional rows of the large input. The pipeline reads, parses, hashes, shuffles, tokenizes,
sorts, counts and writes; the bare side encodes texts in memory. The sides run in turns; figures are medians.

    python -m benchmarks.shard [--quick] [--rows N]
"""

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
from tokenizers import Tokenizer

from benchmarks.common.report import interleave, medians, report
from pipelines.sharding import tokenizer

TATE = Path(__file__).parents[1] / "examples" / "tate"
BATCH = 4096
FILES = 4
BAR = 0.85


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rows, one round")
    parser.add_argument("--rows", type=int, help="rows of the large input")
    arguments = parser.parse_args()
    rows = arguments.rows or (150_000 if arguments.quick else 1_050_000)
    small = 20_000 if arguments.quick else 50_000
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), rows, small, 1 if arguments.quick else 3)


def measure(folder: Path, rows: int, small: int, rounds: int) -> None:
    """Write the inputs, run the sides in turns, and print the report."""
    texts = make_texts(rows)
    labels = write_input(folder / "large", texts)
    write_input(folder / "small", texts[:small])
    frozen = tokenizer.freeze(tokenizer.train_wordpiece(pa.chunked_array([texts[:200_000]]), 30_000), {}, 128)
    (folder / "tokenizer").mkdir()
    for name, content in frozen.files.items():
        (folder / "tokenizer" / name).write_bytes(content)
    bare = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
    worked: dict[str, list[float]] = {}
    sides = {
        "encode_batch": lambda: encode(bare.encode_batch, texts[small:]),
        "encode_batch_fast": lambda: encode(bare.encode_batch_fast, texts[small:]),
        "shard large": lambda: shard(folder, "large"),
        "shard small": lambda: shard(folder, "small"),
    }
    timed = {name: partial(with_cpu, side, worked.setdefault(name, [])) for name, side in sides.items()}
    seconds = medians(interleave(timed, rounds))
    cpu = medians(worked)
    more = rows - small
    fastest = min(seconds["encode_batch"], seconds["encode_batch_fast"])
    pipeline = seconds["shard large"] - seconds["shard small"]
    report(
        f"tokenize-and-shard reaches {BAR} of bare batch encoding, by processor time",
        {
            "rows": rows,
            "labels": labels,
            "characters a text": round(sum(map(len, texts)) / rows, 1),
            "bare rows/s": round(more / fastest),
            "shard rows/s": round(more / pipeline),
            "start-up seconds, taken out": round(seconds["shard small"], 1),
            "seconds": {name: round(value, 2) for name, value in seconds.items()},
            "CPU seconds": {name: round(value, 2) for name, value in cpu.items()},
            "rounds": rounds,
        },
        {
            "shard / bare": fastest / pipeline,
            # More reliable than the clock on a machine with other work.
            "shard / bare by processor time": min(cpu["encode_batch"], cpu["encode_batch_fast"])
            / (cpu["shard large"] - cpu["shard small"]),
        },
        {"shard / bare by processor time": BAR},
    )


def with_cpu(side: Callable[[], float], worked: list[float]) -> float:
    """Run `side`; append the CPU seconds of this process and its children to `worked`."""
    before = sum(os.times()[:4])
    try:
        return side()
    finally:
        worked.append(sum(os.times()[:4]) - before)


def encode(batch: object, texts: list[str]) -> float:
    """Return the seconds to encode all texts, one batch at a time."""
    start = time.perf_counter()
    for first in range(0, len(texts), BATCH):
        batch(texts[first : first + BATCH])  # type: ignore[operator]
    return time.perf_counter() - start


def shard(folder: Path, name: str) -> float:
    """Return the seconds of the command as users run it, on all cores."""
    out = folder / f"{name}-data"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "extremis", "shard", folder / name, out, "--tokenizer", folder / "tokenizer"]
    cores = len(os.sched_getaffinity(0))
    # The small input also runs on worker processes, so that their start is subtracted.
    beam = ["--", f"--direct_num_workers={cores}", "--direct_running_mode=multi_processing"]
    start = time.perf_counter()
    subprocess.run([*map(str, command), *beam], check=True, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def make_texts(rows: int) -> list[str]:
    """Make new texts of real words: each title of the Tate collection with subjects of another work."""
    with gzip.open(TATE / "trn.json.gz", "rt", encoding="utf-8") as file:
        works = [json.loads(line) for line in file]
    count = len(works)
    return [
        f"{works[i % count]['title']} {works[(i * 7919 + i // count) % count].get('content') or ''}"
        for i in range(rows)
    ]


def write_input(folder: Path, texts: list[str]) -> int:
    """Write JSON lines with string keys in several files; return the number of labels."""
    folder.mkdir()
    labels = max(100, len(texts) // 20)
    with (folder / "labels.jsonl").open("w") as out:
        for label in range(labels):
            out.write(json.dumps({"key": f"subject/{label}", "text": texts[label][:40]}) + "\n")
    per_file = -(-len(texts) // FILES)
    for number in range(FILES):
        with (folder / f"train-{number}.jsonl").open("w") as out:
            for row in range(number * per_file, min((number + 1) * per_file, len(texts))):
                named = [f"subject/{(row * step) % labels}" for step in (1, 31, 977)]
                out.write(json.dumps({"key": f"work-{row}", "text": texts[row], "labels": named}) + "\n")
    return labels


if __name__ == "__main__":
    main()
