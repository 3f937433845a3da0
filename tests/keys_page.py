"""Generates docs/keys.md, the page of all recipe keys: `python -m tests.keys_page > docs/keys.md`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from schemas.options import Options
from trainer.methods.keys import METHODS, classes_at
from trainer.methods.kinds import options_of
from trainer.methods.recipe import Recipe
from trainer.methods.sections import Classifier

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_HEAD = """# Keys of a recipe

For anyone who changes a recipe: the meaning, type, default and range of every key, written by
`python -m tests.keys_page`. The sections that all methods share come first, then those of each method: a recipe with
`method = "astra"` contains the shared keys and the keys of `astra`. `--set train.epochs=5` sets a key;
`extremis recipes show astra` prints those of a recipe. A key may be `"auto"`
([recipes](recipes.md#settings-that-come-from-the-data)).
"""


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([_HEAD, *_sections()]).rstrip("\n") + "\n"


def _sections() -> Iterator[str]:
    shared = {name: section for name in Recipe.model_fields if (section := _section_of(Recipe, name))}
    del shared["negatives"]
    shown: dict[str, str] = {}  # the place of each row: a second place names it
    for name, section in shared.items():
        yield from _section(Recipe, name, f"## `[{name}]`", section, "", shown)
    title = "## `[classifier]`, for methods that learn a vector for each label"
    yield from _section(Recipe, "classifier", title, Classifier, "", shown)
    for method in METHODS:
        yield from (f'## `method = "{method}"`', "")
        options = options_of(METHODS, method, "method")
        for name in options.model_fields:
            own = _section_of(options, name)
            if own is not None and own not in (*shared.values(), Classifier):
                title = f"### `[{name}]` of `{method}`"
                yield from _section(options, name, title, own, f"`{method}`", shown, shared.get(name))


def _section_of(method: type[Recipe], name: str) -> type[Options] | None:
    """Return the class with the keys of a section that all of its kinds have; None for no section."""
    kinds = classes_at([method], name)
    return (
        next((each for each in kinds[0].__mro__ if all(issubclass(kind, each) for kind in kinds)), None)
        if kinds
        else None
    )


def _section(
    method: type[Recipe],
    name: str,
    title: str,
    section: type[Options],
    place: str,
    shown: dict[str, str],
    known: type[Options] | None = None,
) -> Iterator[str]:
    """Yield a table of a section's keys, except the keys of `known`, and then a table for each kind of the section."""
    key, table = method.choices.get(name, ("", {}))
    yield from _table(title, place, shown, _rows(name, section, {*known.model_fields} if known else set(), [*table]))
    for kind in table:
        own = options_of(table, kind, key)
        if {*own.model_fields} - {*section.model_fields}:
            which = f'`{name}.{key} = "{kind}"`'
            rows = _rows(name, own, {*section.model_fields})
            yield from _table(f"### {which}", f"{place}, {which}".lstrip(", "), shown, rows)


def _table(title: str, place: str, shown: dict[str, str], rows: Iterable[str]) -> Iterator[str]:
    """Yield the rows that no earlier table has, and the places of the others."""
    places = {row: shown.setdefault(row, place) for row in rows}
    if places:
        yield from (title, "")
    if own := [row for row in places if places[row] == place]:
        yield from ("| key | meaning | type | default | range |", "|---|---|---|---|---|", *own, "")
    for other in dict.fromkeys(places.values()):
        if other != place:
            keys = [row.split(" | ")[0].removeprefix("| ") for row in places if places[row] == other]
            yield from (f"As for {other}: {', '.join(keys)}.", "")


def _rows(name: str, section: type[Options], shown: set[str], kinds: Sequence[str] = ()) -> Iterator[str]:
    for key, field in section.model_fields.items():
        if key in shown:
            continue
        if key == "kind":
            named = [f'"{kind}"' for kind in kinds]
            yield f"| `{name}.kind` | class that the section configures | {', '.join(named)} | `{named[0]}` |  |"
            continue
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Options):
            yield from _rows(f"{name}.{key}", inner, set())
            continue
        cells = [f"`{name}.{key}`", field.description or "", _kind(inner), f"`{_default(field)}`", _range(field)]
        yield f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _kind(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in get_args(annotation))
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    parts = [_kind(part) for part in get_args(annotation) if part is not type(None)]
    if get_origin(annotation) in (dict, tuple, list):
        return f"{get_origin(annotation).__name__} of {', '.join(dict.fromkeys(parts))}"
    return " or ".join(parts) if parts else getattr(annotation, "__name__", str(annotation))


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True) if not field.is_required() else "required"
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def _range(field: FieldInfo) -> str:
    bounds = ((mark, getattr(rule, name, None)) for rule in field.metadata for name, mark in _BOUNDS.items())
    return ", ".join(f"{mark} {value}" for mark, value in bounds if value is not None)


if __name__ == "__main__":
    print(page(), end="")
