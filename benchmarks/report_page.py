"""Seconds, memory and bytes of `extremis report` for a run on 10M queries.

    python -m benchmarks.report_page [--quick]

10,485,760 synthetic queries with a table of 10 negatives each, 1,048,576 labels with texts, and a run of 40 steps with
its checkpoint; a trainer's records of 20 epochs are appended to the records of these steps. The page is built as by a
user, with 300 queries, their negatives and predictions over all labels.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.common.joined_tables import LABELS, VOCABULARY, JoinedTables
from benchmarks.common.process_memory import measure
from benchmarks.common.report import report
from pipelines.options import ShardOptions
from schemas import arrow, storage
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, Shard, columns_of, open_manifest, publish
from schemas.shard_files.parquet import list_array, list_column, writing_shard
from schemas.table import Table
from trainer.loop import Trainer
from trainer.settings.resolve import resolve

ROWS = {False: 10 << 20, True: 1 << 20}
WIDTH, GROUP, WORDS, STEPS, EPOCHS, EVERY = 10, 8192, 4, 40, 20, 20
RECIPE = ("encoder.dimension=64", "encoder.hidden=0", "encoder.residual=false", "encoder.buckets=65536")
SECONDS, MEGABYTES = 60.0, 5.0


class _Enough(Exception):
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1,048,576 queries")
    rows = ROWS[parser.parse_args().quick]
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as folder:
        tables = JoinedTables(str(Path(folder) / "data"), rows, WIDTH, GROUP)
        run = str(Path(tables.negatives).parents[2])
        _train(tables, run)
        out = str(Path(folder) / "report.html")
        command = [sys.executable, "-m", "extremis", "report", tables.root, run, "--out", out]
        done = measure(command)
        if done.status:
            sys.exit(f"{' '.join(command)}: status {done.status}")
        size = Path(out).stat().st_size / 1e6
        report(
            f"the page of a run on {rows:,} queries is small, and there within a minute",
            {"rows": rows, "labels": LABELS, "peak_gib": round(done.peak_bytes / 2**30, 2)},
            {"seconds": done.seconds, "megabytes": size},
            {"seconds": f"<{SECONDS}", "megabytes": f"<{MEGABYTES}"},
        )


def _train(tables: JoinedTables, run: str) -> None:
    """Write DATA, a run with a few steps on it, and records of many steps."""
    tables.write()
    queries = open_manifest(tables.queries, "queries")
    data = DataLayout(tables.root)
    parents = {"queries/train": queries.digest, "labels": _labels(tables).digest, "tokenizer": _tokenizer(data).digest}
    options = ShardOptions(propensity_a=0.55, propensity_b=1.5).model_dump(mode="json")
    parameters = {"propensity": {"a": 0.55, "b": 1.5}, "options": options, "input": {}}
    publish(data.root, Manifest(kind="data", parents=parents, parameters=parameters))
    settings = [*RECIPE, f"train.epochs={EPOCHS}", f"checkpoint.every_steps={STEPS // 2}"]
    recipe = resolve("random", settings, data.root).recipe

    def on_step(step: int, total: int, loss: float) -> None:
        if step == STEPS:
            raise _Enough

    epochs = Trainer.start(data.root, run, recipe, lambda line: None).train(on_step)
    with contextlib.suppress(_Enough):
        next(epochs)
    epochs.close()
    url = RunLayout(run).metrics
    lines = [json.loads(line) for line in storage.read_bytes(url).splitlines()]
    last = next(line for line in reversed(lines) if line["kind"] == "train")
    per_epoch = -(-tables.rows // recipe.order.batch)
    lines += [{**last, "step": step} for step in range(STEPS + EVERY, EPOCHS * per_epoch, EVERY)]
    storage.write_bytes(url, "".join(json.dumps(line) + "\n" for line in lines).encode())


def _tokenizer(data: DataLayout) -> Manifest:
    model = Tokenizer(WordLevel({"[UNK]": 0, **{f"w{n}": n for n in range(1, VOCABULARY)}}, "[UNK]"))
    model.pre_tokenizer = Whitespace()
    body = model.to_str().encode()
    storage.write_bytes(storage.join(data.tokenizer, "tokenizer.json"), body)
    entry = Shard(path="tokenizer.json", rows=0, bytes=len(body), sha256=storage.sha256(body))
    return publish(data.tokenizer, Manifest(kind="tokenizer", shards=(entry,), parameters={"vocabulary": VOCABULARY}))


def _labels(tables: JoinedTables) -> Manifest:
    """Write labels with four words each, and the numbers of their queries."""
    queries = open_manifest(tables.queries, "queries")
    frequency = np.zeros(LABELS, np.int64)
    for group in Table(tables.queries, queries).batches(["label_ids"]):
        frequency += np.bincount(list_column(group, "label_ids").values, minlength=LABELS)
    schema = arrow.labels(arrow.token_type(VOCABULARY))
    draw = np.random.default_rng(1)
    url = DataLayout(tables.root).labels
    with writing_shard(url, 0, 1, schema, GROUP) as shard:
        for low in range(0, LABELS, GROUP):
            ids = np.arange(low, min(low + GROUP, LABELS))
            words = draw.integers(1, VOCABULARY, (len(ids), WORDS)).astype(np.uint16)
            texts = [" ".join(f"w{word}" for word in row) for row in words.tolist()]
            tokens = list_array(words.reshape(-1), np.arange(len(ids) + 1) * WORDS, pa.uint16())
            columns = [pa.array(ids), pa.array(np.char.mod("l%d", ids)), pa.array(texts), tokens]
            shard.write(pa.Table.from_arrays([*columns, pa.array(frequency[ids])], schema=schema))
    manifest = Manifest(
        kind="labels",
        columns=columns_of(schema),
        shards=(shard.entry,),
        rows=LABELS,
        row_group_rows=GROUP,
        id_range=(0, LABELS),
        parameters={"training_points": tables.rows},
    )
    return publish(url, manifest)


if __name__ == "__main__":
    main()
