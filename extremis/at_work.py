"""Who is at work at a place, since when, how far, and what for it waits; from one listing and the heartbeats in it."""

import posixpath
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from extremis.result import Grid
from pipelines.progress import say_seconds
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import MANIFEST, RUN_FILE, RunLayout, parse_number
from schemas.manifest import open_manifest
from schemas.owners import CLAIM_FILE, HEARTBEAT, KIND_FILE, LEASE_SECONDS, Sign, find_signs
from schemas.sizes import say_bytes, say_count
from schemas.storage import join, parse_object
from schemas.waits import SILENT_SECONDS
from trainer.recipe_files import load_config

_COMMANDS = {"trained": "train", "mined": "mine", "sharded": "shard", "clustered": "cluster", "exported": "export"}
_COMMANDS |= {"embedded": "embed", "compared": "ablate", "handed over": "tuples"}
_MARKS = (RUN_FILE, MANIFEST, KIND_FILE, CLAIM_FILE)  # files at the root of an output
_UNREAD = {".staging", ".parts", ".candidates"}  # folders of unfinished files
_FINISHED = RunLayout("").finished.lstrip("/")


def look(place: str) -> tuple[list[dict[str, Any]], list[Grid | str]]:
    """Return the facts of each run, data set and other table at or below `place`, and tables of them.

    Raises InputError if there is none; StorageError.
    """
    sizes = storage.list_below(place)
    outputs = [_describe(place, root, _below(sizes, root)) for root in _roots(sizes)]
    if not outputs:
        raise InputError(f"{place}: no run, data set or other table here, and nobody at work. Is the path right?")
    columns = ["output", "kind", "state", "how far", "bytes"]
    rows = [
        [each["place"], each["kind"], each["state"], each["progress"]["words"], say_bytes(sum(each["bytes"].values()))]
        for each in outputs
    ]
    grids: list[Grid | str] = [Grid("outputs", columns, rows)]
    if processes := [_cells(process) for each in outputs for process in each["processes"]]:
        columns = ["process", "at", "since", "heartbeat", "state"]
        grids.append(Grid("processes", columns, processes))
    if len(outputs) == 1:
        kinds = [[kind, say_bytes(size)] for kind, size in outputs[0]["bytes"].items()]
        grids.append(Grid("bytes", ["kind", "bytes"], kinds))
    return outputs, grids


def _roots(sizes: Mapping[str, int]) -> list[str]:
    """Return the outermost folders of outputs, relative to the listed place; "": the place itself."""
    marked = {
        posixpath.dirname(name)
        for name in sizes
        if posixpath.basename(name) in _MARKS or posixpath.basename(name).startswith(HEARTBEAT)
    }
    outermost: list[str] = []
    for folder in sorted(marked, key=lambda folder: folder.split("/") if folder else []):
        if not outermost or not _is_within(folder, outermost[-1]):
            outermost.append(folder)
    return outermost


def _is_within(folder: str, root: str) -> bool:
    return not root or f"{folder}/".startswith(f"{root}/")


def _below(sizes: Mapping[str, int], root: str) -> dict[str, int]:
    start = len(root) + bool(root)
    return {name[start:]: size for name, size in sizes.items() if _is_within(name, root)}


def _describe(place: str, root: str, sizes: Mapping[str, int]) -> dict[str, Any]:
    url = join(place, root) if root else place
    processes = _processes(url, sizes)
    is_run, owner = RUN_FILE in sizes, next((each for each in processes if each["owns"] and each["at"] == url), None)
    done = (_FINISHED if is_run else MANIFEST) in sizes
    if owner is not None and not (is_run and done):
        state = owner["state"]
    else:
        begun = any(not name.startswith(".") for name in sizes)
        state = "finished" if done else "stopped" if begun else "not begun"
    facts = {"place": url, "state": state, "processes": processes, "bytes": _bytes_by_kind(sizes)}
    if is_run or done:
        try:
            return {**facts, **(_describe_run(url, sizes, owner) if is_run else _describe_table(url))}
        except (InputError, TableError) as error:  # others are shown
            return {**facts, "kind": "damaged", "progress": {"words": str(error)}}
    words = _say_facts(owner["facts"]) if owner else ""
    return {"kind": "unfinished", **facts, "progress": {"words": words}}


def _describe_table(url: str) -> dict[str, Any]:
    table = open_manifest(url)
    rows = table.parameters.get("rows", table.rows)
    words = ", ".join(f"{count:,} of {name}" for name, count in rows.items()) if isinstance(rows, dict) else f"{rows:,}"
    return {"kind": table.kind, "commit": table.commit, "progress": {"words": f"{words} rows", "rows": rows}}


def _processes(url: str, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return each process at work in the output at `url`, owners first; one at several places, at the innermost."""
    folders = {
        posixpath.dirname(name)
        for name in sizes
        if posixpath.basename(name) == CLAIM_FILE or posixpath.basename(name).startswith(HEARTBEAT)
    }
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for folder in sorted(folders, key=len):
        place = join(url, folder) if folder else url
        for sign in find_signs(place):
            found[sign.owner.machine, sign.owner.pid] = _process(place, sign)
    return sorted(found.values(), key=lambda process: not process["owns"])


def _process(place: str, sign: Sign) -> dict[str, Any]:
    owner, facts = sign.owner, dict(sign.beat.get("state", {}))
    waits_for, since = facts.pop("waits_for", None), facts.pop("waits_since", None)
    waited, age = (None if then is None else max(0.0, time.time() - then) for then in (since, sign.beat.get("at")))
    if owner.has_ended():
        state = "ended"
    elif age is None:
        state = "starting"
    elif age > LEASE_SECONDS:
        state = "silent"
    else:
        state = "waiting" if waited is not None and waited > SILENT_SECONDS else "at work"
    told = {"command": _COMMANDS.get(owner.doing, owner.doing), "state": state, "at": place, "owns": sign.claims}
    told |= {"host": owner.host, "pid": owner.pid, "since": owner.since, "heartbeat_age": age}
    return told | {"waits_for": waits_for, "waited": waited, "facts": facts}


def _cells(process: Mapping[str, Any]) -> list[str]:
    age, said = process["heartbeat_age"], process["state"]
    if said == "waiting":
        said = f"waits for {process['waits_for'].rstrip(',')}, {say_seconds(process['waited'])}"
    words = _say_facts(process["facts"]) if said not in ("ended", "starting") else ""
    return [
        f"{process['command']}, {process['pid']} on {process['host']}",
        process["at"],
        process["since"],
        "none yet" if age is None else f"{say_seconds(age)} ago",
        f"{said}; {words}" if words else said,
    ]


def _say_facts(facts: Mapping[str, Any]) -> str:
    """Describe how far a process is, from its heartbeat."""
    parts = []
    if "step" in facts:
        parts.append(f"step {say_count(int(facts['step']), int(facts['steps_total']))}, loss {facts['loss']:.3f}")
    if "tables" in facts:
        parts.append(f"{facts['tables']} tables made" + (f", on epoch {facts['epoch']}" if "epoch" in facts else ""))
    if "recall" in facts:
        parts.append(f"recall {facts['recall']:.4f}")
    if "stage" in facts:
        parts.append(f"{facts['stage']}: {say_count(facts['rows'], facts.get('rows_total'))} rows")
    if facts.get("retries"):
        parts.append(f"{facts['retries']} retries")
    return ", ".join(parts)


def _describe_run(url: str, sizes: Mapping[str, int], owner: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the facts of a run that its files and its owner's heartbeat tell."""
    run = RunLayout(url)
    config = load_config(run.config)
    finished = parse_object(storage.read_bytes(run.finished)) if _FINISHED in sizes else None

    def published(folder: str) -> list[int]:
        """Numbers of the finished tables below a folder of the run."""
        paths = (name.split("/") for name in sizes if name.startswith(f"{folder}/") and name.endswith(f"/{MANIFEST}"))
        return sorted({number for _, name, *_ in paths if (number := parse_number(name)) is not None})

    epochs = (finished or config["recipe"]["train"])["epochs"]
    begun = [name for name in sizes if name.startswith("adoptions/")]
    checkpoints, tables = published("checkpoints"), {*published("negatives"), *published("clusters")}
    words = [f"all {epochs} epochs" if finished else f"epoch {len(begun)} of {epochs}"]
    words += [said] if owner and (said := _say_facts(owner["facts"])) and owner["state"] != "ended" else []
    words += [f"checkpoint at step {checkpoints[-1]:,}" if checkpoints else "no checkpoint"]
    words += [f"{len(tables)} tables"] if tables else []
    progress = {"words": ", ".join(words), "epochs_begun": len(begun), "epochs": epochs, "tables": len(tables)}
    progress["checkpoint"] = checkpoints[-1] if checkpoints else None
    return {"kind": "run", "commit": config.get("versions", {}).get("commit"), "progress": progress}


def _bytes_by_kind(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes of each folder of an output, the largest first; apart those of unfinished and of loose files."""
    total: Counter[str] = Counter()
    for name, size in sizes.items():
        folder = name.partition("/")[0] if "/" in name else "files"
        total["unfinished" if _UNREAD.intersection(name.split("/")) else folder] += size
    return dict(total.most_common())
