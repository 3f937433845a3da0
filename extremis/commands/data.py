"""`extremis data`: versions of data, and exports."""

from os import fspath
from typing import Any, Literal

from extremis.command import Progress, command
from extremis.commands.shared import Place
from extremis.console import say, table


@command()
def data(action: Literal["list", "show", "drop"], place: Place, *, progress: Progress = True) -> dict[str, Any]:
    """List the versions of data, and exports, in the folders of a prefix; show one, or drop one that no other needs.

    list says for each what it adds, how many rows and labels it has with all that it needs, and what is gone; of
    exports, which is current. show lists the parts of a version of data. drop removes a data set or an export; one that
    another in the same folder needs, or that is current, is refused.

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
    from extremis.versioning import list_data, list_exports, name_current

    facts = [each.facts(root) for each in list_data(root)]
    rows = [
        [
            each["data"],
            str(each["version"]),
            each["part"],
            f"{each['rows'].get('train', 0):,}",
            f"{each['labels']:,}",
            f"{each['retired']:,}",
            "what is gone: see show" if each["fault"] else ", ".join(each["needs"]) or "nothing",
        ]
        for each in facts
    ]
    exports = [each.facts(root) for each in list_exports(root)]
    if facts or not exports:
        table(f"versions under {root}", ["data", "version", "part", "train", "labels", "retired", "needs"], rows)
    current = name_current(root)
    if exports:
        _print_exports(root, exports, current)
    return {"versions": facts, "exports": exports, "current": current}


def _print_exports(root: str, exports: list[dict[str, Any]], current: str | None) -> None:
    rows = [
        [
            f"{each['export']}{' (current)' if each['export'] == current else ''}",
            each["part"],
            f"{each['labels']:,}",
            f"{each['bytes']:,}",
            "what is gone: see fault in --json" if each["fault"] else ", ".join(each["needs"]) or "nothing",
        ]
        for each in exports
    ]
    table(f"exports under {root}", ["export", "part", "labels", "own bytes", "needs"], rows)


def _show(url: str) -> dict[str, Any]:
    from extremis.versioning import find_data
    from schemas.errors import InputError
    from schemas.storage import join, resolve
    from schemas.table import Table

    listed = find_data(url)
    if listed is None:
        raise InputError(f"{url}: no data set here. extremis data list names those of a prefix.")
    places = {**listed.needs, listed.version.part: resolve(url, ".")}
    rows: dict[str, dict[str, int]] = {part: {} for part in places}
    for name in listed.table.parents:
        if name == "labels" or name.startswith("queries/"):
            opened = Table.open(join(url, name))
            for part in opened.parts:
                rows[part.name][name.removeprefix("queries/")] = part.rows
            if not opened.parts:
                rows[listed.version.part][name.removeprefix("queries/")] = opened.rows
    names = sorted({name for counts in rows.values() for name in counts})
    lines = [[part, places[part], *(f"{counts.get(name, 0):,}" for name in names)] for part, counts in rows.items()]
    table(f"parts of {url}", ["part", "data", *names], lines)
    if listed.fault:
        say(listed.fault)
    return {**listed.facts(url), "parts": [{"part": p, "data": places[p], "rows": rows[p]} for p in places]}
