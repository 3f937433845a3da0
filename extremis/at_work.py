"""Who is at work at a place, since when, how far, and what for it waits; from one listing and the heartbeats in it."""

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from extremis.result import Grid
from pipelines.progress import say_seconds
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import MANIFEST, RUN_FILE, RunLayout, parse_number
from schemas.manifest import open_manifest
from schemas.owners import KIND_FILE, LEASE_SECONDS, Sign, find_signs
from schemas.sizes import say_bytes, say_count
from schemas.storage import parse_object
from schemas.waits import SILENT_SECONDS
from trainer.recipe_files import load_config

_CLAIMS = ".claim"  # how the names of claims and heartbeats begin
_UNREAD = {".staging", ".parts", ".candidates"}  # folders of unfinished files
_FINISHED = RunLayout("").finished.lstrip("/")
Facts = dict[str, Any]


def look(place: str) -> tuple[list[Facts], list[Grid | str]]:
    """Return the facts of each run, data set and other table at or below `place`, and tables of them.

    Raises InputError if there is none; StorageError.
    """
    sizes = {name: found.size for name, found in storage.list_below(place).items()}
    outputs = [
        _describe(
            f"{place.rstrip('/')}/{root}".rstrip("/"), {n[len(root) :]: sizes[n] for n in sizes if n.startswith(root)}
        )
        for root in outermost(folders_of(sizes, _CLAIMS, RUN_FILE, MANIFEST, KIND_FILE))
    ]
    if not outputs:
        raise InputError(f"{place}: no run, data set or other table here, and nobody at work. Is the path right?")
    rows = [[*(each[key] for key in ("place", "kind", "state", "progress")), _total(each)] for each in outputs]
    grids: list[Grid | str] = [Grid("outputs", ["output", "kind", "state", "progress", "bytes"], rows, 4)]
    if processes := [_cells(process) for each in outputs for process in each["processes"]]:
        grids.append(Grid("processes", ["at", "doing", "since", "heartbeat", "state"], processes, 5))
    if len(outputs) == 1:
        kinds = [[kind, say_bytes(size)] for kind, size in outputs[0]["bytes"].items()]
        grids.append(Grid("bytes", ["kind", "bytes"], kinds))
    return outputs, grids


def folders_of(paths: Iterable[str], *names: str) -> set[str]:
    """Return the folders, with a slash at the end, of files whose names begin with one of `names`."""
    return {
        folder + slash for folder, slash, name in (path.rpartition("/") for path in paths) if name.startswith(names)
    }


def outermost(folders: set[str]) -> list[str]:
    """Return the folders, with a slash at the end, that are in no other one; "" contains all."""
    found: list[str] = []
    for folder in sorted(folders):
        if not found or not folder.startswith(found[-1]):
            found.append(folder)
    return found


def _total(output: Facts) -> str:
    return say_bytes(sum(output["bytes"].values()))


def _describe(url: str, sizes: Mapping[str, int]) -> Facts:
    processes = _processes(url, sizes)
    owner = next((each for each in processes if each["owns"] and each["at"] == url), None)
    is_run = RUN_FILE in sizes
    is_done = (_FINISHED if is_run else MANIFEST) in sizes
    state = "finished" if is_done else "stopped" if any(not name.startswith(".") for name in sizes) else "not begun"
    if owner is not None and not (is_run and is_done):
        state = owner["state"]
    told: Facts = {"kind": "unfinished", "progress": _say_facts(owner) if owner else ""}
    try:
        told |= _describe_run(url, sizes, owner) if is_run else _describe_table(url) if is_done else {}
    except (InputError, TableError) as error:  # other outputs are shown
        told |= {"kind": "damaged", "progress": str(error)}
    return {"place": url, "state": state, **told, "processes": processes, "bytes": _bytes_by_kind(sizes)}


def _describe_table(url: str) -> Facts:
    table = open_manifest(url)
    rows = table.parameters.get("rows", table.rows)
    words = ", ".join(f"{count:,} of {name}" for name, count in rows.items()) if isinstance(rows, dict) else f"{rows:,}"
    return {"kind": table.kind, "commit": table.commit, "progress": f"{words} rows", "rows": rows}


def _describe_run(url: str, sizes: Mapping[str, int], owner: Facts | None) -> Facts:
    """Return what a run's files and its owner's heartbeat tell."""
    run = RunLayout(url)
    config = load_config(run.config)
    finished = parse_object(storage.read_bytes(run.finished)) if _FINISHED in sizes else None

    def published(folder: str) -> set[int]:
        """Numbers of the finished tables in a folder of the run."""
        paths = (name.split("/") for name in sizes if name.startswith(f"{folder}/") and name.endswith(f"/{MANIFEST}"))
        return {number for _, name, *_ in paths if (number := parse_number(name)) is not None}

    epochs = (finished or config["recipe"]["train"])["epochs"]
    begun = sum(name.startswith("adoptions/") for name in sizes)
    step, tables = max(published("checkpoints"), default=None), len(published("negatives") | published("clusters"))
    words = [f"all {epochs} epochs" if finished else f"{begun} of {epochs} epochs begun"]
    words += [] if owner is None else [_say_facts(owner)]
    words += ["no checkpoint" if step is None else f"checkpoint at step {step:,}", f"tables: {tables}" * bool(tables)]
    told = {
        "kind": "run",
        "commit": config.get("versions", {}).get("commit"),
        "progress": ", ".join(filter(None, words)),
    }
    return {**told, "epochs_begun": begun, "epochs": epochs, "checkpoint": step, "tables": tables}


def _processes(url: str, sizes: Mapping[str, int]) -> list[Facts]:
    """Return each process at work in the output at `url`, owners first; one at several places, at the innermost."""
    found: dict[tuple[str, int], Facts] = {}
    for folder in sorted(folders_of(sizes, _CLAIMS), key=len):
        place = f"{url}/{folder}".rstrip("/")
        for sign in find_signs(place):
            found[sign.owner.machine, sign.owner.pid] = _process(place, sign)
    return sorted(found.values(), key=lambda process: not process["owns"])


def _process(place: str, sign: Sign) -> Facts:
    owner, shown = sign.owner, sign.beat.get("state", {}).items()
    facts = {name: value for name, value in shown if not isinstance(value, float) or math.isfinite(value)}  # as in JSON
    waits_for, since = facts.pop("waits_for", None), facts.pop("waits_since", None)
    waited, age = (None if then is None else max(0.0, time.time() - then) for then in (since, sign.beat.get("at")))
    state = "waiting" if waited is not None and waited > SILENT_SECONDS else "at work"
    state = "starting" if age is None else "silent" if age > LEASE_SECONDS else state
    told = {"at": place, "doing": owner.doing, "owns": sign.claims, "state": "dead" if owner.has_ended() else state}
    told |= {"host": owner.host, "pid": owner.pid, "since": owner.since, "heartbeat_age": age}
    return told | {"waits_for": waits_for, "waited": waited, "facts": facts}


def _cells(process: Facts) -> list[str]:
    said, age = process["state"], process["heartbeat_age"]
    if said == "waiting":
        said = f"waits for {process['waits_for'].rstrip(',')}, {say_seconds(process['waited'])}"
    doing = f"{process['doing']} by {process['pid']} on {process['host']}"
    heartbeat = "none yet" if age is None else f"{say_seconds(age)} ago"
    return [process["at"], doing, process["since"], heartbeat, "; ".join(filter(None, (said, _say_facts(process))))]


def _say_facts(process: Facts) -> str:
    """Describe how far a process is, from its heartbeat; "" if it is dead."""
    facts, parts = process["facts"] if process["state"] != "dead" else {}, []
    if "step" in facts:
        parts.append(f"step {say_count(facts['step'], facts['steps_total'])}, loss {facts.get('loss', math.nan):.3f}")
    if "tables" in facts:
        dump = f", at the dump of epoch {facts['epoch']}" if "epoch" in facts else ""
        parts.append(f"tables made: {facts['tables']}{dump}")
    if "recall" in facts:
        parts.append(f"recall {facts['recall']:.4f}")
    if "stage" in facts:
        parts.append(f"{facts['stage']}: {say_count(facts['rows'], facts.get('rows_total'))} rows")
    return ", ".join([*parts, f"{facts['retries']} retries"] if facts.get("retries") else parts)


def _bytes_by_kind(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each folder of an output, the largest first; apart those of unfinished and of loose files."""
    total: Counter[str] = Counter()
    for name, size in sizes.items():
        folder = name.partition("/")[0] if "/" in name else "files"
        total["unfinished" if _UNREAD.intersection(name.split("/")) else folder] += size
    return dict(total.most_common())
