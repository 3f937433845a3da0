"""What nobody needs of a place: one rule for the end of a run, `refresh.keep`, `extremis clean` and `data drop`.

A run resumes from one of its newest checkpoints and then follows the recorded adoptions. It adopts ever newer tables,
and the miner compares with the table before. So a run needs its dumps from the epoch of the oldest such checkpoint on,
dumps that no table was mined from yet, and every table from the one on that the oldest of these epochs adopted. A
finished run resumes nowhere. Versions and exports are needed by others in their folder, and by who reads them.

A removal first writes the names of what it removes, then hides the tables, then removes them; the next one goes on.
"""

import math
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extremis.at_work import folders_of, outermost
from extremis.console import say
from extremis.result import Grid
from extremis.versioning import Listed, ListedData, ListedExport
from schemas import storage
from schemas.errors import ClaimedError, InputError, StorageError, TableError
from schemas.layout import MANIFEST, RUN_FILE, RunLayout, epoch_folder, parse_number
from schemas.manifest import open_manifest
from schemas.owners import CLAIM_FILE, HEARTBEAT, claimed, find_present, forget_ended
from schemas.sizes import say_bytes
from schemas.storage import Found, join, read_json, relative, resolve, write_json
from scoring.export_versions import REPLACED, find_current
from trainer.methods.sections import LEAD
from trainer.recipe_files import load_config

REMOVING = ".removing.json"  # names of what a removal, perhaps an interrupted one, removes
_PART = re.compile(r"((?:.*/)?)parts/([^/]+)/(?:labels|queries)/.+")
_STAGED = re.compile(r"((?:.*/)?)\.staging/.+")
Files = Mapping[str, Found]
Numbered = dict[str, dict[int, dict[str, Found]]]  # files of a run by kind and number


@dataclass(frozen=True)
class Unneeded:
    """What nobody needs: `names`, paths from `root`, in the order of removal. Who removes them claims `root`."""

    root: str
    kind: str
    names: Sequence[str]
    size: int

    def __str__(self) -> str:
        place = self.root if len(self.names) > 1 else resolve(self.root, self.names[0])
        return f"{place}: {self.kind}, {say_bytes(self.size)}"


def find_unneeded(place: str, keep: int | None = None, older_than: float = math.inf) -> list[Unneeded]:
    """Return what nobody needs of the runs, data sets and exports at or below `place`, in the order of removal.

    `keep`: newest tables of a run (None: its `refresh.keep`, or one), and newest versions of data. Staging, parts and
    versions must be `older_than` seconds, and exports no longer current for so long. Raises TableError, StorageError.
    """
    files, before = storage.list_below(place), time.time() - older_than
    runs = outermost(folders_of(files, RUN_FILE))
    found = list[Unneeded]()
    for run in runs:
        try:
            found += _of_run(join(place, run), _below(files, run), keep)
        except (TableError, InputError, FileNotFoundError) as error:  # a checkpoint may have just been replaced
            say(f"{join(place, run)}: nothing of this run is removed: {error}")
    outside = {name: files[name] for name in files if not name.startswith(tuple(runs))}
    found += _of_versions(place, outside, keep or 1, before)
    for folder, part in sorted({match.groups() for match in map(_PART.fullmatch, outside) if match}):
        if part not in _named_parts(join(place, folder)):
            found += _untouched(place, files, folder, f"parts/{part}", "parts", before)
    for folder in sorted({match[1] for match in map(_STAGED.fullmatch, files) if match}):
        found += _untouched(place, files, folder, ".staging", "staging", before)
    for folder in sorted(folders_of(outside, REMOVING)):
        url = join(place, folder)
        if folder + MANIFEST not in files and not find_present(url):
            names = read_json(join(url, REMOVING))["names"]
            left = [each for name in names for each in _below(files, folder + name).values()]
            found.append(Unneeded(url, "left by a removal", names, _size(left)))
    return found


def _below(files: Files, folder: str) -> dict[str, Found]:
    return {name.removeprefix(folder): files[name] for name in files if name.startswith(folder)}


def _size(files: Iterable[Found]) -> int:
    return sum(found.size for found in files)


def _untouched(place: str, files: Files, folder: str, name: str, kind: str, before: float) -> Iterator[Unneeded]:
    """Yield a folder of unfinished files, if nobody works there and none is newer than `before`."""
    root, own = join(place, folder), _below(files, f"{folder}{name}/").values()
    if max(found.written for found in own) < before and not find_present(root):
        yield Unneeded(root, kind, [name], _size(own))


def _of_run(url: str, files: Files, keep: int | None) -> Iterator[Unneeded]:
    run, recipe = RunLayout(url), load_config(RunLayout(url).config)["recipe"]
    numbered: Numbered = defaultdict(lambda: defaultdict(dict))
    for name, found in files.items():
        kind, _, path = name.partition("/")
        folder, _, rest = path.partition("/")
        if (number := parse_number(folder.removesuffix(".json"))) is not None:
            numbered[kind][number][rest] = found
    dumps, is_clustered = numbered["dumps"], bool(numbered["clusters"])
    tables = numbered["clusters" if is_clustered else "negatives"]
    first, oldest = math.inf, math.inf
    if run.finished.rpartition("/")[2] not in files:
        first, oldest = _needed_from(run, numbered, recipe["checkpoint"]["keep"], tables)
    claimed_now = {number for number, names in tables.items() if any(name.endswith(CLAIM_FILE) for name in names)}
    whole = sorted(number for number in tables.keys() - claimed_now if _published(tables[number]))
    kept = whole[-int(keep or recipe.get("refresh", {}).get("keep") or 1) :]
    for number in sorted({*tables, *(epoch + LEAD for epoch in dumps)}):
        root = run.clusters(number, "queries") if is_clustered else epoch_folder(run.negatives_root, number)
        own, epoch = _below(tables.get(number, {}), "queries/" if is_clustered else ""), number - LEAD
        if any(name.startswith(".claim") for name in own) and find_present(root):
            continue
        if epoch in dumps and epoch < first:
            yield Unneeded(root, "dumps", [relative(root, run.dump(epoch))], _size(dumps[epoch].values()))
        names = {name.partition("/")[0] for name in own if not name.startswith((".claim", REMOVING))}
        if names and number < oldest and number not in kept:
            ordered = sorted(names, key=lambda name: (name != MANIFEST, name))
            yield Unneeded(root, "tables", ordered, _size(own.values()))
    unfinished = {step: names for step, names in numbered["checkpoints"].items() if MANIFEST not in names}
    if unfinished and not find_present(url):
        size = sum(_size(names.values()) for names in unfinished.values())
        yield Unneeded(
            url, "unfinished checkpoints", [relative(url, run.checkpoint(step)) for step in unfinished], size
        )


def _needed_from(run: RunLayout, numbered: Numbered, keep: int, tables: Mapping[int, Files]) -> tuple[float, float]:
    """Return the epoch of the oldest dump, and the number of the oldest table, that an unfinished run needs."""
    dumps, finished = numbered["dumps"], [step for step, names in numbered["checkpoints"].items() if MANIFEST in names]
    if not finished:
        return -math.inf, -math.inf
    resumed = run.checkpoint(sorted(finished)[-keep:][0])
    made = {epoch: {"vectors", *_published(tables.get(epoch + LEAD, ()))} for epoch in dumps}
    unmined = (epoch for epoch in dumps if _published(dumps[epoch]) - made[epoch])
    first = min(open_manifest(resumed, "checkpoint").parameters["progress"]["epoch"], *unmined, math.inf)
    for epoch in sorted((epoch for epoch in numbered["adoptions"] if epoch <= first), reverse=True):
        if (adopted := read_json(run.adoption(epoch))["table_epoch"]) is not None:
            return first, adopted
    return first, -math.inf


def _published(names: Iterable[str]) -> set[str]:
    """Return the tables whose manifests are among `names`."""
    return {name.removesuffix(f"/{MANIFEST}") for name in names if name.endswith(f"/{MANIFEST}")}


def _of_versions(place: str, files: Files, keep: int, before: float) -> Iterator[Unneeded]:
    """Yield versions of data behind the newest `keep`, and exports behind the current one, that no other one needs."""
    roots = {resolve(join(place, root), "."): root for root in outermost(folders_of(files, MANIFEST))}
    for folder in sorted({resolve(url, "..") for url in roots}):
        listed: list[Listed] = [*ListedData.below(folder), *ListedExport.below(folder)]
        numbers = defaultdict[str, set[int]](set)
        for each in listed:
            if isinstance(each, ListedData):
                numbers[each.family].add(each.version.number)
        old = list[Listed]()
        for each in listed:
            is_data, root = isinstance(each, ListedData), roots.get(each.url)
            stamp = None if root is None else files.get(root + (MANIFEST if is_data else REPLACED))
            is_newest = isinstance(each, ListedData) and each.version.number in sorted(numbers[each.family])[-keep:]
            if stamp is not None and stamp.written < before and not is_newest and not find_present(each.url):
                old.append(each)
        while gone := next((each for each in reversed(old) if not why_needed(each, listed)), None):
            own = (_below(files, roots[gone.url] + name) for name in gone.names)
            yield Unneeded(gone.url, gone.KIND, gone.names, sum(_size(each.values()) for each in own))
            listed.remove(gone)
            old.remove(gone)


def why_needed(item: Listed, listed: Iterable[Listed]) -> str:
    """Say why a data set or an export cannot be removed from its folder, where also `listed` are; "" if it can."""
    folder = resolve(item.url, "..")
    if isinstance(item, ListedExport) and (current := find_current(folder)) and resolve(current, ".") == item.url:
        return f"this is the current export of {folder}. Make another export current first."
    if others := [each.table.url for each in listed if each.url != item.url and item.url in each.needs]:
        return f"{', '.join(others)} need files of this {item.KIND}. Drop these first, beginning with the newest."
    readers = (sign.owner.work for sign in find_present(item.url) if not sign.claims)
    return next((f"{work}. Wait until it has ended." for work in readers), "")


def _named_parts(url: str) -> set[str]:
    """Return the parts of the data set at `url` that it, or another one beside it, names."""
    url = resolve(url, ".")
    places = (place for each in ListedData.below(resolve(url, "..")) for place in each.parts.items())
    return {part for part, place in places if place == url}


def remove(found: Iterable[Unneeded]) -> list[Unneeded]:
    """Remove what was found, and return what was removed: all but what another process claims. Raises StorageError."""
    removed, claims = list[Unneeded](), set[str]()
    for each in found:
        if each.root in claims:  # a table stays while its dump stays
            continue
        try:
            with claimed(each.root, "removed", say):
                _remove(each.root, each.names)
            if not storage.list_names(each.root):
                storage.remove(each.root, recursive=True)  # an empty folder
            removed.append(each)
        except ClaimedError as error:
            claims.add(each.root)
            say(f"kept: {error}")
    return removed


def _remove(root: str, names: Sequence[str]) -> None:
    """Remove `names`, paths from `root`, which this process has claimed."""
    if names[0] == MANIFEST:  # without one, who looks finds what is left
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


def clean(place: str, keep: int | None, older_than: float, dry_run: bool) -> tuple[list[Unneeded], list[Grid]]:
    """Remove what nobody needs at or below `place`; with `dry_run` only say so. Return it, and a table by kind."""
    found = find_unneeded(place, keep, older_than)
    if not dry_run:
        found = remove(found)
        for folder in folders_of(storage.list_below(place), HEARTBEAT):
            forget_ended(join(place, folder))
    for each in found:
        say(str(each))
    if not found:
        say(f"{place}: somebody needs, or may need, all of it")
    counts, sizes = Counter(each.kind for each in found), Counter[str]()
    for each in found:
        sizes[each.kind] += each.size
    rows = [[kind, f"{counts[kind]:,}", say_bytes(size)] for kind, size in sizes.most_common()]
    title = f"{'not needed' if dry_run else 'removed'} at {place}"
    return found, [Grid(title, ["kind", "number", "bytes"], rows)] if rows else []


def say_unneeded(run: str) -> None:
    """Say how many bytes of a run nobody needs, and how to remove them."""
    try:
        size = sum(each.size for each in find_unneeded(run))
    except StorageError:  # the run itself is whole
        return
    if size:
        say(f"{run}: nobody needs {say_bytes(size)} of it any more; to remove them: extremis clean {run}")
