"""`extremis data`: lists, shows and drops versions of data, and exports."""

from os import fspath
from typing import Any, Literal

from extremis.command import Progress, command
from extremis.commands.shared import Place
from extremis.console import say, table


@command()
def data(action: Literal["list", "show", "drop"], place: Place, *, progress: Progress = True) -> dict[str, Any]:
    """List data versions and exports in a folder, show the parts of a version, or drop a version or an export.

    list shows the part that each version adds, total rows and labels, and missing files. For exports, list also shows
    which export is current. show lists the parts of a data version. drop removes a data set or an export, unless
    another data set or export in the same folder needs its files, or the export is current.

    Examples:
      extremis data list data/
      extremis data show data/2026-11-20/
      extremis data drop data/2026-11-01/
      extremis data list exports/
    """
    place = fspath(place)
    if action == "list":
        return _list(place)
    if action == "show":
        return _show(place)
    from extremis.versioning import drop

    return drop(place)


def _list(root: str) -> dict[str, Any]:
    from extremis.versioning import ListedData, ListedExport
    from schemas.storage import relative
    from scoring.export_versions import find_current

    listed = sorted(ListedData.below(root), key=lambda each: (each.version.number, each.table.url))
    versions, exports = (
        [each.to_json(root) for each in listed],
        [each.to_json(root) for each in ListedExport.below(root)],
    )
    url = find_current(root)
    current = None if url is None else relative(root, url)
    rows = []
    for each in versions:
        counts = [f"{count:,}" for count in (each["rows"].get("train", 0), each["labels"], each["retired"])]
        needs = "files are missing: see extremis data show" if each["fault"] else ", ".join(each["needs"]) or "nothing"
        rows.append([each["data"], str(each["version"]), each["part"], *counts, needs])
    if not versions and not exports:
        say(f"{root}: no data sets or exports here")
    if versions:
        table(f"versions under {root}", ["data", "version", "part", "train", "labels", "retired", "needs"], rows)
    rows = []
    for each in exports:
        name = f"{each['export']}{' (current)' if each['export'] == current else ''}"
        needs = "files are missing: see fault in --json" if each["fault"] else ", ".join(each["needs"]) or "nothing"
        rows.append([name, each["part"], f"{each['labels']:,}", f"{each['bytes']:,}", needs])
    if exports:
        table(f"exports under {root}", ["export", "part", "labels", "own bytes", "needs"], rows)
    return {"versions": versions, "exports": exports, "current": current}


def _show(url: str) -> dict[str, Any]:
    from extremis.versioning import ListedData
    from schemas.errors import InputError
    from schemas.storage import join, resolve
    from schemas.table import Table

    listed = ListedData.find(url)
    if listed is None:
        raise InputError(f"{url}: no data set here. extremis data list shows the data sets in a folder.")
    places = {**listed.needs, listed.version.part: resolve(url, ".")}
    rows: dict[str, dict[str, int]] = {part: {} for part in places}
    for name in listed.table.parents:
        if name == "labels" or name.startswith("queries/"):
            opened = Table.open(join(url, name))
            counts = {part.name: part.rows for part in opened.parts} or {listed.version.part: opened.rows}
            for part, count in counts.items():
                rows[part][name.removeprefix("queries/")] = count
    names = sorted({name for counts in rows.values() for name in counts})
    lines = [[part, places[part], *(f"{counts.get(name, 0):,}" for name in names)] for part, counts in rows.items()]
    table(f"parts of {url}", ["part", "data", *names], lines)
    if listed.fault:
        say(listed.fault)
    return {**listed.to_json(url), "parts": [{"part": p, "data": places[p], "rows": rows[p]} for p in places]}
