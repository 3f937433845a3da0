"""`extremis plan`: estimates the bytes of every table and the memory of every step, and checks the memory limit."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

from extremis.console import results, table
from extremis.planning.estimate import Workload, estimate
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.shares import ALL_ROWS
from schemas.sizes import parse_bytes, say_bytes
from schemas.table import Table
from trainer.config.load import read_recipe
from trainer.config.merging import options_left_to_data
from trainer.evaluation.memory import plan_index
from trainer.methods.recipe import Recipe
from trainer.methods.rules import DataStatistics
from trainer.settings.data_statistics import HEAPS, measure
from trainer.settings.resolve import Resolved, apply_rules

PIPELINES = ("shard", "mine", "cluster")  # steps of a run that are pipelines
# Options of `extremis plan` that are fields of a workload, in addition to its recipe, memory and rows.
WORKLOAD_OPTIONS = (
    "tokens",
    "label_tokens",
    "labels_per_query",
    "key_bytes",
    "text_bytes",
    "vocabulary",
    "ranks",
    "workers",
)

_NGRAMS = 4  # factor of (tokens of all texts) ** HEAPS: 1.8 to 9 on texts of six data sets; buckets are rounded up
_STAGING_PEAK = 1.05  # peak bytes in staging, with tables, relative to the bytes of the input: 1.00 to 1.06 measured
_STAGING_TOTAL = 1.2  # total bytes written to staging, relative to the bytes of the input: 0.7 to 1.4 on four data sets

_JOB_SERVER = (
    "--runner=PortableRunner --job_endpoint=JOBSERVER:8099 --artifact_endpoint=JOBSERVER:8098 "
    '--environment_type=PROCESS --environment_config=\'{{"command": "/opt/extremis/bin/extremis-worker"}}\' '
    "--parallelism={workers}"
)

# Bytes of Java per Python worker, which do not grow with the data, because bulk data goes through files.
ENGINES = {
    "flink": 1728 << 20,  # Flink's default TaskManager with one slot
    "spark": 1320 << 20,  # an executor of 1,200 MiB, plus a tenth
}


def workload(
    data: str | None, queries: int | None, labels: int | None, recipe: Recipe, memory: str, averages: dict[str, Any]
) -> Workload:
    """Build a workload; averages, and counts that are None, come from DATA. Raises InputError, TableError."""
    if data is not None:
        layout = DataLayout(data)
        queries = queries or Table.open(layout.queries("train"), "queries").rows
        labels = labels or Table.open(layout.labels, "labels").rows
    if queries is None or labels is None:
        raise InputError(
            "plan needs the size of the data. Give --queries N and --labels L, or --data DATA for a similar data set."
        )
    described = Workload(queries, labels, recipe, memory=parse_bytes(memory), **averages)
    return described if data is None else described.with_averages_of(data)


def resolve_for(workload: Workload, recipe: str, overrides: Iterable[str], data: str | None) -> Resolved:
    """Compute the settings that the recipe `recipe` takes from the data. `data`: a sample of the data.

    Raises InputError for the same reasons as `resolve`, and TableError.
    """
    body = read_recipe(recipe, overrides)
    if not options_left_to_data(body):
        return Resolved(workload.recipe)
    return apply_rules(body, facts_of(workload, data), recipe)


def facts_of(workload: Workload, data: str | None) -> DataStatistics:
    """Return statistics of the planned data, from the workload's averages or scaled up from `data`.

    Raises TableError.
    """
    label_texts = workload.sources.get("labels", 0)
    queries = workload.trained_queries
    if data is None:
        tokens = queries * workload.tokens
        pairs = round(queries * workload.labels_per_query)
        ngrams = round(_NGRAMS * tokens**HEAPS)
        return DataStatistics(queries, workload.labels, pairs, label_texts, ngrams, workload.tokens)
    sample = measure(DataLayout(data), "train", ALL_ROWS, bool(label_texts))
    times = queries / sample.queries
    return replace(
        sample,
        queries=queries,
        labels=workload.labels,
        pairs=round(sample.pairs * times),
        label_texts=label_texts,
        ngrams=round(sample.ngrams * times**HEAPS),
    )


def with_streams_for(ranks: int, recipe: Recipe, say: Callable[[str], None]) -> Recipe:
    """Return the recipe with at least one stream for each of the `ranks`; report a change with `say`."""
    streams = recipe.order.streams * -(-ranks // recipe.order.streams)
    if streams == recipe.order.streams:
        return recipe
    say(f"order.streams = {streams} (a run on {ranks} ranks needs this setting)")
    return recipe.model_copy(update={"order": recipe.order.model_copy(update={"streams": streams})})


def plan(workload: Workload, engine: str | None = None) -> dict[str, Any]:
    """Estimate all sizes; return one JSON object.

    `engine`: engine that runs the pipelines; None: this machine. Raises InputError if mining needs more memory.
    """
    sizes = estimate(workload)
    over = {step: need for step, need in sizes.memory.items() if need > workload.memory}
    recipe, blocks = workload.recipe, sizes.blocks
    on_engine = None
    if engine is not None:
        stored = sum(sizes.tables[name].bytes for name in ("queries", "labels"))
        on_engine = plan_engine(engine, workload, sizes.memory, stored)
    facts = {"recipe": recipe.title, "dimension": recipe.encoder.dimension, "epochs": recipe.train.epochs}
    return {
        "workload": {**asdict(workload), **facts},
        "tables": {name: asdict(size) for name, size in sizes.tables.items()},
        "bytes": sum(size.bytes * size.times for size in sizes.tables.values()),
        "memory": sizes.memory,
        "mining": blocks
        and {
            "index": blocks.factory.spec,
            "blocks": len(blocks.bounds),
            "block_rows": blocks.block_rows,
            "query_batch": blocks.batch,
            "refreshes": workload.dumps,
        },
        "fusion": plan_memory(workload),
        "steps": workload.steps,
        "on_engine": on_engine,
        "over": over,
        "go": not over,
    }


def plan_memory(workload: Workload) -> dict[str, Any]:
    """Return how much memory `extremis fuse` needs for training points, with the default limit and without a limit."""
    sizes = workload.queries, workload.recipe.encoder.dimension, workload.labels_per_query
    settled = plan_index(*sizes)
    return {
        "index": settled.factory.spec,
        "points": settled.points,
        "memory_bytes": settled.bytes,
        "stored_bytes": settled.stored,
        "milliseconds": settled.milliseconds,
        "memory_bytes_of_all": plan_index(*sizes, budget=1 << 62).bytes,
    }


def plan_engine(name: str, workload: Workload, memory: dict[str, int], tables: int) -> dict[str, Any]:
    """Return what the pipelines need on the engine `name`. `memory`: bytes of a process, for each step.

    `tables`: bytes of queries and labels.
    """
    worker = max(memory[step] for step in PIPELINES if step in memory)
    input_bytes = workload.input_bytes
    return {
        "engine": name,
        "workers": workload.workers,
        "options": _JOB_SERVER.format(workers=workload.workers),
        "worker_bytes": worker,
        "slot_bytes": worker + ENGINES[name],
        "input_bytes": input_bytes,
        "staging_bytes": int(_STAGING_PEAK * input_bytes),
        "network_bytes": int(input_bytes + 2 * _STAGING_TOTAL * input_bytes + tables),
    }


def show(plan: dict[str, Any]) -> None:
    """Print the tables, the steps and the verdict."""
    rows = []
    for name, size in plan["tables"].items():
        numbers = [f"{size['rows']:,}", f"{size['shards']:,}", say_bytes(size["bytes"]), str(size["times"])]
        rows.append([name, *numbers, say_bytes(size["bytes"] * size["times"])])
    table("in storage", ["table", "rows", "shards", "bytes", "times", "in all"], rows)
    limit = plan["workload"]["memory"]
    steps = [[step, say_bytes(need), "fits" if need <= limit else "too much"] for step, need in plan["memory"].items()]
    table(f"each process, with {say_bytes(limit)}", ["step", "memory", ""], steps)
    mining = plan["mining"]
    if mining:
        results.print(
            f"mining: {mining['blocks']:,} block(s) of up to {mining['block_rows']:,} vectors, "
            f"index {mining['index']}, {mining['query_batch']:,} queries at a time, {mining['refreshes']} refresh(es)",
        )
    fusion = plan["fusion"]
    size, stored, all_bytes = (
        say_bytes(fusion[name]) for name in ("memory_bytes", "stored_bytes", "memory_bytes_of_all")
    )
    all_points = fusion["points"] == plan["workload"]["queries"]
    results.print(
        f"fusion: {fusion['points']:,} points, index {fusion['index']}, {size} in memory, {stored} stored, about "
        f"{fusion['milliseconds']:.2g} ms per query in large "
        f"batches{'' if all_points else f'; all points need --memory {all_bytes}'}"
    )
    if plan["on_engine"]:
        _show_engine(plan["on_engine"])
    over = ", ".join(f"{step} needs {say_bytes(need)}" for step, need in plan["over"].items())
    verdict = f"does not fit: {over}" if over else "every step fits"
    results.print(f"{say_bytes(plan['bytes'])} in storage, {plan['steps']:,} steps; {verdict}")


def _show_engine(plan: dict[str, Any]) -> None:
    results.print(f"pipelines on {plan['engine']} with {plan['workers']:,} worker(s)")
    worker, slot, staging, network, read = (
        say_bytes(plan[f"{name}_bytes"]) for name in ("worker", "slot", "staging", "network", "input")
    )
    results.print(f"  memory: {worker} per worker, {slot} per slot with a worker")
    traffic = f"{network} read and written by shard, for about {read} of input"
    results.print(f"  storage: at most {staging} of temporary files; {traffic}")
    results.print(f"  options after --: {plan['options']}")
