"""What nobody needs of a place: one rule for the end of a run, `refresh.keep`, `extremis clean` and `data drop`.

A run resumes from one of its newest checkpoints and then follows the recorded adoptions. It adopts ever newer tables,
and the miner compares with the table before. So a run needs its dumps from the epoch of the oldest such checkpoint on,
dumps that no table was mined from yet, and every table from the one on that the oldest of these epochs adopted. A
finished run resumes nowhere. Versions and exports are needed by others in their folder, and by who reads them.
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extremis.at_work import folders_of, outermost
from extremis.console import say
from extremis.versioning import Listed, ListedData, ListedExport
from schemas import storage
from schemas.errors import ClaimedError, InputError, StorageError
from schemas.layout import MANIFEST, RUN_FILE, RunLayout, epoch_folder, parse_number
from schemas.manifest import open_manifest
from schemas.owners import CLAIM_FILE, KIND_FILE, claimed, find_signs, forget_ended
from schemas.sizes import say_bytes
from schemas.storage import FileInfo, join, read_json, relative, resolve, write_json
from scoring.export_versions import REPLACED, find_current
from trainer.methods.sections import LEAD
from trainer.recipe_files import load_config

STAGING = "staging"  # kind of what processes have left, and of their claims
REMOVING = ".removing.json"  # names of what a removal, perhaps an interrupted one, removes
Files = Mapping[str, FileInfo]
Numbered = Mapping[int, Files]  # files below each numbered folder of a run


@dataclass(frozen=True)
class Unneeded:
    """What nobody needs: `names`, paths from `root`, in the order of removal. Who removes them claims `root`."""

    root: str
    kind: str
    names: Sequence[str]
    size: int

    def __str__(self) -> str:
        place = resolve(self.root, "." if len(self.names) > 1 else self.names[0])
        return f"{place}: {self.kind}, {say_bytes(self.size)}"


def find_unneeded(place: str, keep: int | None = None, older_than: float = math.inf) -> list[Unneeded]:
    """Return what nobody needs of the runs, data sets and exports at or below `place`, in the order of removal.

    `keep`: newest tables of a run (None: its `refresh.keep`, or one), and newest versions of data. Staging, parts and
    versions must be `older_than` seconds, and exports no longer current for so long. Raises TableError, StorageError.
    """
    files, before, found = storage.list_below(place), time.time() - older_than, list[Unneeded]()
    if not files:
        say(f"{place}: nothing is here. Is the path right?")
    runs = outermost(folders_of(files, RUN_FILE))
    for run in runs:
        try:
            found += _of_run(RunLayout(join(place, run)), _below(files, run), keep)
        except (InputError, FileNotFoundError) as error:  # a checkpoint may have just been replaced
            say(f"{join(place, run)}: nothing of this run is removed: {error}")
    outside = {name: files[name] for name in files if not name.startswith(tuple(runs))}
    found += _of_versions(place, outside, keep or 1, before)
    staged = {name.partition(".staging/")[0] for name in files if "/.staging/" in f"/{name}"}
    for folder in sorted(staged & folders_of(files, MANIFEST, KIND_FILE) | folders_of(files, CLAIM_FILE)):
        left = {name: each for name, each in _below(files, folder).items() if name.startswith((".staging/", ".claim"))}
        found += _untouched(join(place, folder), ".staging", left, STAGING, before)
    for folder in sorted(folders_of(outside, REMOVING)):
        if folder + MANIFEST not in files and not _is_used(url := join(place, folder)):
            names = read_json(join(url, REMOVING))["names"]
            size = sum(_size(_below(files, folder + name)) for name in names)
            found.append(Unneeded(url, "left by a removal", names, size))
    return found


def _below(files: Files, folder: str) -> Files:
    return {name.removeprefix(folder): files[name] for name in files if name.startswith(folder)}


def _is_used(url: str) -> bool:
    return any(not sign.is_over for sign in find_signs(url))


def _size(files: Files) -> int:
    return sum(found.size for found in files.values())


def _untouched(root: str, name: str, files: Files, kind: str, before: float) -> Iterator[Unneeded]:
    """Yield the folder `name` with `files`, if nobody works at `root` and none is newer than `before`."""
    if max(found.written for found in files.values()) < before and not _is_used(root):
        yield Unneeded(root, kind, [name], _size(files))


def _of_run(run: RunLayout, files: Files, keep: int | None) -> Iterator[Unneeded]:
    recipe = load_config(run.config)["recipe"]
    numbered: dict[str, dict[int, dict[str, FileInfo]]] = defaultdict(lambda: defaultdict(dict))
    for name, found in files.items():
        kind, folder, rest = (*name.split("/", 2), "", "")[:3]
        if (number := parse_number(folder.removesuffix(".json"))) is not None:
            numbered[kind][number][rest] = found
    dumps, is_clustered = numbered["dumps"], bool(numbered["clusters"])
    tables = numbered["clusters" if is_clustered else "negatives"]
    first, oldest = math.inf, math.inf
    if run.finished.rpartition("/")[2] not in files:
        saved = sorted(step for step, names in numbered["checkpoints"].items() if MANIFEST in names)
        resumed = saved[-recipe["checkpoint"]["keep"] :][:1]
        first, oldest = _needed_from(run, resumed, dumps, tables, numbered["adoptions"])
    whole = [n for n, names in tables.items() if _published(names) and not any(CLAIM_FILE in name for name in names)]
    kept = sorted(whole)[-int(keep or recipe.get("refresh", {}).get("keep") or 1) :]
    for number in sorted({*tables, *(epoch + LEAD for epoch in dumps)}):
        root = run.clusters(number, "queries") if is_clustered else epoch_folder(run.negatives_root, number)
        own, epoch = _below(tables.get(number, {}), "queries/" if is_clustered else ""), number - LEAD
        if any(name.startswith(".claim") for name in own) and _is_used(root):
            continue
        if epoch in dumps and epoch < first:
            yield Unneeded(root, "dumps", [relative(root, run.dump(epoch))], _size(dumps[epoch]))
        names = {name.partition("/")[0] for name in own if not name.startswith(".claim")}
        if names and number < oldest and number not in kept:
            yield Unneeded(root, "tables", sorted(names, key=lambda name: (name != MANIFEST, name)), _size(own))


def _needed_from(
    run: RunLayout, resumed: Sequence[int], dumps: Numbered, tables: Numbered, adoptions: Iterable[int]
) -> tuple[float, float]:
    """Return the epoch of the oldest dump, and the number of the oldest table, that an unfinished run needs."""
    if not resumed:
        return -math.inf, -math.inf
    made = {epoch: {"vectors", *_published(tables.get(epoch + LEAD, {}))} for epoch in dumps}
    unmined = (epoch for epoch in dumps if _published(dumps[epoch]) - made[epoch])
    state = open_manifest(run.checkpoint(resumed[0]), "checkpoint").parameters
    first = min(state["progress"]["epoch"], *unmined, math.inf)
    for epoch in sorted((epoch for epoch in adoptions if epoch <= first), reverse=True):
        if (adopted := read_json(run.adoption(epoch))["table_epoch"]) is not None:
            return first, adopted
    return first, -math.inf


def _published(names: Iterable[str]) -> set[str]:
    """Return the tables whose manifests are among `names`."""
    return {name.removesuffix(f"/{MANIFEST}") for name in names if name.endswith(f"/{MANIFEST}")}


def _of_versions(place: str, files: Files, keep: int, before: float) -> Iterator[Unneeded]:
    """Yield what no other version needs: parts, data behind the newest `keep`, exports behind the current one."""
    roots = {resolve(join(place, root), "."): root for root in outermost(folders_of(files, MANIFEST))}
    for folder in sorted({resolve(url, "..") for url in roots}):
        data, old = ListedData.below(folder), list[Listed]()
        listed: list[Listed] = [*data, *ListedExport.below(folder)]
        for each in listed:
            if (root := roots.get(each.url)) is None:
                continue
            stamp = files.get(root + REPLACED)
            if isinstance(each, ListedData):
                numbers = sorted({other.version.number for other in data if other.family == each.family})
                stamp = files.get(root + MANIFEST) if each.version.number < numbers[-keep:][0] else None
                named = {part for other in data for part, url in other.parts.items() if url == each.url}
                for part in {name.partition("/")[0] for name in _below(files, f"{root}parts/")} - named:
                    own = _below(files, f"{root}parts/{part}/")
                    yield from _untouched(each.url, f"parts/{part}", own, "parts that no version names", before)
            if stamp is not None and stamp.written < before and not _is_used(each.url):
                old.append(each)
        while gone := next((each for each in reversed(old) if not why_needed(each, listed)), None):
            size = sum(_size(_below(files, roots[gone.url] + name)) for name in gone.names)
            yield Unneeded(gone.url, f"{gone.KIND} versions", gone.names, size)
            listed.remove(gone)
            old.remove(gone)


def why_needed(item: Listed, listed: Iterable[Listed]) -> str:
    """Say why a data set or an export cannot be removed from its folder, where `listed` are too; "" if it can."""
    folder = resolve(item.url, "..")
    if isinstance(item, ListedExport) and (current := find_current(folder)) and resolve(current, ".") == item.url:
        return f"this is the current export of {folder}. Make another export current first."
    if others := [each.table.url for each in listed if each.url != item.url and item.url in each.needs]:
        first = "Drop the newest of these first"
        return f"files of this {item.KIND} are needed by {', '.join(others)}. {first}."
    readers = (sign.owner.work for sign in find_signs(item.url) if not (sign.claims or sign.is_over))
    return next((f"{work}. Wait until it has ended." for work in readers), "")


def remove(found: Iterable[Unneeded]) -> list[Unneeded]:
    """Remove what was found, and return what was removed: all but what another process claims. Raises StorageError."""
    removed, kept = list[Unneeded](), set[str]()
    for each in found:
        if each.root in kept:  # a table stays while its dump stays
            continue
        try:
            with claimed(each.root, "removed", say):
                _remove(each.root, each.names)
            if not storage.list_names(each.root):
                storage.remove(each.root, recursive=True)  # an empty folder
            removed.append(each)
        except ClaimedError as error:
            kept.add(each.root)
            say(f"kept: {error}")
    return removed


def _remove(root: str, names: Sequence[str]) -> None:
    """Remove `names`, paths from `root`, which this process has claimed; after a crash, the next removal goes on."""
    if names[0] == MANIFEST:  # without one, nobody would find the rest
        write_json(join(root, REMOVING), {"names": [*names]})
    for place in (resolve(root, name) for name in names):
        for below in storage.list_below(place):
            if below.rpartition("/")[2] == MANIFEST:
                storage.remove(join(place, below))
        storage.remove(place, recursive=True)
    forget_ended(root)
    storage.remove(join(root, REMOVING))


def drop(place: str) -> dict[str, Any]:
    """Unpublish and remove the data set or export at `place`.

    Raises InputError if there is none, or if it is still needed; ClaimedError if another process is writing it.
    """
    with claimed(place, "removed", say):
        listed = ListedExport.find(place) or ListedData.find(place)
        if listed is None:
            raise InputError(
                f"{place}: no data set or export here. extremis data list shows the data sets and exports in a folder."
            )
        if reason := why_needed(listed, type(listed).below(resolve(listed.url, ".."))):
            raise InputError(f"{place}: {reason}")
        _remove(place, listed.names)
    say(f"{place}: removed")
    return {listed.KIND: place, "digest": listed.table.digest}


def tidy(run: str, keep: int) -> None:
    """Remove what nobody needs of RUN if its recipe says `keep`; else say how much this is."""
    try:
        found = find_unneeded(run)
        if keep:
            remove(found)
        elif size := sum(each.size for each in found):
            say(f"{run}: nobody needs {say_bytes(size)} of it any more; to remove them: extremis clean {run}")
    except StorageError as error:  # the run itself is whole
        say(f"{run}: what nobody needs of it is not removed: {error}")
