"""Rehearsal of a run: does the work of one rank and one worker on this machine, and compares it with the plan.

Labels, steps, windows and row groups have the same sizes as in the run. If `minutes` is too short for a stage, the
stage processes only some of its steps, rows or input, and the measured time is scaled up. Each process of a run is also
a process in the rehearsal. All processes write to one folder, which is removed at the end.
"""

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from benchmarks.rehearsal.stage import Sizes, Stage, Task, removed_if_killed, run_in_process
from extremis.console import results, table
from extremis.planning import Estimate, Workload, estimate, saved_bytes
from schemas.errors import InputError
from schemas.sizes import say_bytes
from schemas.storage import require_room

_DUMP_BYTES_PER_MINUTE = 500 << 20  # bytes of embeddings to dump per minute
_COMPARED_SIZES = ("memory", "storage", "network")
_CONCURRENT_STAGES = ("stream", "plan")  # threads run these stages during a step


@dataclass(frozen=True)
class Rehearsal:
    """A rehearsal of the rank `rank`, with files below `folder`.

    network, disk: bytes per second (disk 0: measure it). latency: seconds per message.
    """

    workload: Workload
    rank: int = 0
    network: float = 1.25e9
    disk: float = 0.0
    minutes: float = 5.0
    folder: str = ""
    latency: float = 1e-4

    @cached_property
    def planned(self) -> Estimate:
        """Bytes and memory according to the formulas. Raises InputError if mining needs more memory."""
        return estimate(self.workload)

    @property
    def embeddings(self) -> float:
        """Bytes of a dump's embeddings that one rank writes."""
        return 2 * self.workload.rows * self.workload.columns / self.workload.ranks

    def sizes(self, rows: int) -> Sizes:
        """Return the sizes that the stages need, for a workload with `rows` rows."""
        values: dict[str, Any] = {of.name: getattr(self.workload, of.name, of.default) for of in fields(Sizes)}
        values |= {"queries": rows, "width": self.workload.recipe.negatives.table_width}
        if blocks := self.planned.blocks:
            most = max(stop - start for start, stop in blocks.bounds)
            values |= {"block_rows": most, "blocks": len(blocks.bounds), "batch": blocks.batch}
            values["index"] = blocks.factory.spec
        return Sizes(**values)


def parse_speed(text: str) -> float:
    """Parse a speed such as `10Gbit` or `400Mbit` (per second), and return bytes per second. Raises InputError."""
    match = re.fullmatch(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT])bit(?:/s)?\s*", text, re.IGNORECASE)
    if match is None or not float(match[1]):
        raise InputError(f"{text!r}: expected bits per second, for example 10Gbit or 400Mbit.")
    return float(match[1]) * 1000.0 ** (1 + "KMGT".index(match[2].upper())) / 8


def rehearse(work: Rehearsal, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all stages; return the stages, the totals and the bottlenecks of the whole run, as JSON values.

    Raises TableError, and InputError for an invalid rank, too little memory or space, or rows that cannot be generated.
    """
    dump_share = min(1.0, work.minutes * _DUMP_BYTES_PER_MINUTE / work.embeddings)
    _require_possible(work, dump_share)
    from benchmarks.rehearsal import rank_stages, worker_stages

    workload, stages = work.workload, list[Stage]()
    temporary = tempfile.TemporaryDirectory(prefix="extremis-rehearsal-", dir=work.folder or None)
    with temporary as folder, removed_if_killed(folder):
        disk = work.disk or _disk_speed(folder)
        of_worker = Task(folder, work.sizes(workload.queries), 60 * work.minutes)
        of_rank = replace(
            of_worker, recipe=workload.recipe, rank=work.rank, ranks=workload.ranks, dump_share=dump_share
        )
        steps = [(worker_stages.shard, of_worker), (rank_stages.make_tables, of_rank), (rank_stages.train, of_rank)]
        if work.planned.blocks:
            of_worker = replace(of_worker, sizes=work.sizes(workload.rows))
            steps += [(worker_stages.make_dump, of_worker), (worker_stages.mine, of_worker)]
        for stage, task in steps:
            say(f"rehearsing: {stage.__name__.replace('_', ' ')}")
            stages += run_in_process(stage, task)
    return _sum_up(work, disk, stages)


def _require_possible(work: Rehearsal, dump_share: float) -> None:
    """Raise InputError for workloads that cannot be rehearsed on this machine."""
    from trainer.sizes import free_memory

    workload, recipe = work.workload, work.workload.recipe
    if work.rank >= workload.ranks:
        raise InputError(f"--rank {work.rank}: expected a rank below --ranks {workload.ranks}; ranks count from 0.")
    if recipe.encoder.inputs != "tokens" or recipe.is_clustered or (workload.dumps and workload.searched != "vectors"):
        raise InputError(
            "the rehearsal supports only synthetic rows of tokens, without clusters. Leave out "
            "encoder.inputs, clusters or memory."
        )
    need, free = work.planned.memory["train"], free_memory()
    if need > free:
        raise InputError(
            f"rank {work.rank} of {workload.ranks} needs {say_bytes(need)} of memory, and {say_bytes(free)} are free. "
            "Plan with more --ranks or a lower --dimension, or rehearse on a larger machine."
        )
    needs = {
        "a dump and its scratch file": int(2 * dump_share * work.embeddings),
        "a checkpoint and vectors": 2 * sum(saved_bytes(workload)),
        "tables": 1 << 30,
    }
    require_room(work.folder or tempfile.gettempdir(), needs, "Give another --folder, or fewer --minutes.")


def _disk_speed(folder: str) -> float:
    """Measure how fast the disk writes a file, in bytes per second."""
    body, began = os.urandom(1 << 20), time.perf_counter()
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(128):
            file.write(body)
        os.fsync(file.fileno())
        return 128 * len(body) / (time.perf_counter() - began)


def _step_bytes(workload: Workload) -> float:
    """Return the bytes that a rank sends per step (docs/ranks.md), with ring all-reduce for sums."""
    recipe, ranks, columns = workload.recipe, workload.ranks, workload.columns
    points, texts = workload.trained_queries, workload.sources.get("labels", 0)
    positives, tokens = (
        (points * a_query + texts * a_label) / (points + texts)
        for a_query, a_label in ((workload.labels_per_query, 1.0), (workload.tokens, workload.label_tokens))
    )
    own = 1 if recipe.encodes_labels else 1 / ranks  # share of a row's labels that a rank receives
    gathered = 12 + 4 * positives * own + 8 * columns
    if hard := recipe.negatives.max_hard:
        gathered += 4 + 4 * hard * own
    encoder = recipe.encoder
    options = encoder.model_dump()
    if ngrams := options.get("ngrams"):  # a bag: its updates are sent as ids, weights and gradients of texts
        features = ngrams * tokens * (1 - options["feature_dropout"])
        gathered += 4 + 8 * features + 4 * encoder.dimension
        encoder = encoder.model_copy(update={"ngrams": 1})
    size = encoder.implementation.size(encoder, 0 if ngrams else workload.vocabulary, workload.dense)
    dense = size.parameters * recipe.encoders
    return (ranks - 1) / ranks * (recipe.order.batch * gathered + 2 * dense)


def _planned_stages(work: Rehearsal) -> dict[str, tuple[float, dict[str, float]]]:
    """Return, for each stage, how often a rank or worker runs the stage, and the planned bytes."""
    workload, recipe, tables, memory = work.workload, work.workload.recipe, work.planned.tables, work.planned.memory
    share, a_rank = 1 / workload.workers, 1 / workload.ranks
    epochs, hard = recipe.train.epochs, [recipe.uses_table(epoch) for epoch in range(recipe.train.epochs)]

    def bytes_of(*kinds: str) -> float:
        return sum(size.bytes for name, size in tables.items() if name.startswith(kinds))

    read = bytes_of(*workload.sources, *(["negatives"] if any(hard) else []))
    saved = {"storage": float(sum(saved_bytes(workload)))}
    stages: dict[str, tuple[float, dict[str, float]]] = {
        "shard": (share, {"memory": memory["shard"], "storage": bytes_of("queries", "labels")}),
        "start": (1, {}),
        "adoption": (sum(hard), {}),
        "stream": (workload.steps, {"storage": read * epochs / workload.steps * a_rank}),
        "plan": (workload.steps, {}),
        "step": (workload.steps, {"memory": memory["train"], "network": _step_bytes(workload)}),
        "checkpoint": (-(-epochs // (recipe.checkpoint.every_epochs or epochs)), saved),
        "dump": (workload.dumps, {"storage": bytes_of("embeddings", "vectors") * a_rank}),
        "resume": (0, saved),
    }
    if blocks := work.planned.blocks:
        vectors = tables["vectors"].bytes / len(blocks.bounds)
        times = workload.dumps * share
        stages["block"] = times * len(blocks.bounds), {"memory": memory["mine"], "storage": vectors}
        stages["merge"] = times, {"storage": bytes_of("negatives")}
    return stages


def _sum_up(work: Rehearsal, disk: float, stages: list[Stage]) -> dict[str, Any]:
    """Return the stages, with their seconds in the whole run and their bottlenecks; seconds per step; and limits."""
    planned, rows = _planned_stages(work), list[dict[str, Any]]()
    for stage in stages:
        times, sizes = planned[stage.name]
        bounds = {
            "one thread" if stage.name in _CONCURRENT_STAGES else "the processor": stage.seconds,
            "the network": (stage.network or 0.0) / work.network + stage.messages * work.latency,
            "the disk": (stage.storage or sizes.get("storage", 0.0)) / disk,
        }
        bound = max(bounds, key=lambda name: bounds[name])
        each = stage.seconds + bounds["the network"] if stage.messages else bounds[bound]  # waits for messages
        rows.append({**asdict(stage), "planned": sizes, "times": times, "bound": bound, "each": each})
    a_step = next(row["each"] for row in rows if row["name"] == "step")
    for row in rows:
        counted = row["each"] - a_step if row["name"] in _CONCURRENT_STAGES else row["each"]
        row["whole_seconds"] = row["times"] * max(0.0, counted)
    over = [row["name"] for row in rows if (row["memory"] or 0) > work.workload.memory]
    limits = [f"memory of {say_bytes(work.workload.memory)} ({name})" for name in over]
    limits += [f"{row['bound']} ({row['name']})" for row in sorted(rows, key=lambda row: -row["whole_seconds"])]
    seconds = {step: sum(row["whole_seconds"] for row in rows if row["step"] == step) for step in work.planned.memory}
    facts = {"rank": work.rank, "ranks": work.workload.ranks, "network": work.network, "disk": disk}
    facts["latency"] = work.latency
    return {**facts, "stages": rows, "seconds": seconds, "limits": limits}


def show(body: dict[str, Any]) -> None:
    """Print the stages, and the totals of the whole run."""
    rows = [
        [
            row["name"],
            *(_pair(row[name], row["planned"].get(name)) for name in _COMPARED_SIZES),
            f"{row['seconds']:,.3g} s",
            f"{row['times']:,.4g}",
            _format_time(row["whole_seconds"]),
            "; ".join(_notes(row)),
        ]
        for row in body["stages"]
    ]
    network = f"network {say_bytes(body['network'])}/s and {1000 * body['latency']:g} ms per message"
    speeds = f"{network}, disk {say_bytes(body['disk'])}/s"
    title = f"rank {body['rank']} of {body['ranks']}, measured / planned; {speeds}"
    table(title, ["stage", *_COMPARED_SIZES, "time", "times", "in all", "done, bound by"], rows)
    whole = _format_time(sum(body["seconds"].values()))
    results.print(f"the whole run: {whole}; the main bottlenecks are {', then '.join(body['limits'][:3])}")


def _notes(row: dict[str, Any]) -> Iterator[str]:
    if row["note"]:
        yield row["note"]
    if row["messages"]:
        yield f"{row['messages']:g} messages"
    if row["each"] > row["seconds"]:
        yield row["bound"]


def _pair(measured: float | None, planned: float | None) -> str:
    """Format a pair of measured and planned bytes."""
    if not measured and not planned:
        return ""
    return " / ".join("?" if count is None else say_bytes(count) for count in (measured, planned))


def _format_time(seconds: float) -> str:
    """Format seconds, for example as `3.2 h`."""
    for unit, length in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s"
