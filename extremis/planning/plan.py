"""`extremis plan`: bytes of every table, memory and time of every step, and whether they fit."""

from dataclasses import asdict
from typing import Any

from extremis.console import results, table
from extremis.planning import sample
from extremis.planning.engine import plan_engine
from extremis.planning.sizes import measure
from extremis.planning.workload import Workload
from extremis.spinner import doing
from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from schemas.sizes import parse_bytes, say_bytes
from trainer.config import Recipe


def workload(
    data: str | None, queries: int | None, labels: int | None, recipe: Recipe, memory: str, averages: dict[str, Any]
) -> Workload:
    """Make a workload; numbers that are None are those of DATA. Raises InputError, TableError."""
    if data is not None:
        layout = DataLayout(data)
        queries = queries or open_manifest(layout.queries("train"), "queries").rows
        labels = labels or open_manifest(layout.labels, "labels").rows
    if queries is None or labels is None:
        raise InputError("how much data is there? Give --queries N and --labels L, or --data DATA for one like it.")
    return Workload(queries, labels, recipe, memory=parse_bytes(memory), **averages)


def plan(workload: Workload, data: str | None, calibrate: bool, engine: str | None = None) -> dict[str, Any]:
    """Estimate sizes, and times with `calibrate`, as one JSON object. `data`: a sample that stands for all rows.

    `engine`: where the pipelines run, if not on this machine.

    Raises InputError: wrong numbers, too little memory for mining; TableError: no DATA there.
    """
    workload, rows = sample.made_up(workload) if data is None else sample.from_data(data, workload)
    doing("plan: writing samples of the tables")
    sizes = measure(workload, rows)
    seconds, steps = None, None
    if calibrate:
        from extremis.planning.calibrate import calibrate as measure_rates

        doing("plan: sharding, mining and training a little, to measure this machine")
        rates = measure_rates(workload, sizes)
        steps = rates.seconds(workload)
        seconds = {"rates": asdict(rates), "steps": steps}
    over = {step: need for step, need in sizes.memory.items() if need > workload.memory}
    recipe, blocks = workload.recipe, sizes.blocks
    on_engine = None
    if engine is not None:
        stored = sum(sizes.tables[name].bytes for name in ("queries", "labels"))
        on_engine = plan_engine(engine, workload, sizes.memory, stored, steps)
    facts = {
        "recipe": recipe.title,
        "dimension": recipe.encoder.dimension,
        "epochs": recipe.train.epochs,
    }
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
        "steps": workload.steps,
        "seconds": seconds,
        "on_engine": on_engine,
        "over": over,
        "go": not over,
    }


def show(plan: dict[str, Any]) -> None:
    """Print the tables, the steps and the verdict."""
    rows = []
    for name, size in plan["tables"].items():
        numbers = [f"{size['rows']:,}", f"{size['shards']:,}", say_bytes(size["bytes"]), str(size["times"])]
        rows.append([name, *numbers, say_bytes(size["bytes"] * size["times"])])
    table("on storage", ["table", "rows", "shards", "bytes", "times", "in all"], rows)
    times = (plan["seconds"] or {}).get("steps", {})
    limit = plan["workload"]["memory"]
    steps = [
        [step, say_bytes(need), "fits" if need <= limit else "too much", say_time(times.get(step))]
        for step, need in plan["memory"].items()
    ]
    table(f"each process, of {say_bytes(limit)}", ["step", "memory", "", "time"], steps)
    mining = plan["mining"]
    if mining:
        results.print(
            f"mining: {mining['blocks']:,} block(s) of up to {mining['block_rows']:,} vectors, "
            f"index {mining['index']}, {mining['query_batch']:,} queries at a time, {mining['refreshes']} refresh(es)",
        )
    if plan["on_engine"]:
        _show_engine(plan["on_engine"])
    over = ", ".join(f"{step} needs {say_bytes(need)}" for step, need in plan["over"].items())
    verdict = f"no go: {over}" if over else "go: every step fits"
    results.print(f"{say_bytes(plan['bytes'])} on storage, {plan['steps']:,} steps; {verdict}")


def _show_engine(plan: dict[str, Any]) -> None:
    """Print what the pipelines take on an engine."""
    name, hours = plan["engine"], plan["hours"]
    times = ", ".join(f"{step} {say_time(3600 * some)}" for step, some in (hours or {}).items())
    times = times or ("not estimated (--no-calibrate)" if plan["is_measured"] else f"never measured on {name}")
    lines = [
        f"memory: {say_bytes(plan['worker_bytes'])} a worker, {say_bytes(plan['slot_bytes'])} a slot with it",
        f"storage: {say_bytes(plan['staging_bytes'])} of staging at most; {say_bytes(plan['network_bytes'])} read and "
        f"written by shard, for about {say_bytes(plan['input_bytes'])} of input",
        f"time: {times}",
        f"behind --: {plan['options']}",
    ]
    results.print(f"the pipelines on {name}, {plan['workers']:,} worker(s)")
    for line in lines:
        results.print(f"  {line}")


def say_time(seconds: float | None) -> str:
    """Format seconds as `3.2 h`; None, not measured, as an empty text."""
    if seconds is None:
        return ""
    for unit, length in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s"
