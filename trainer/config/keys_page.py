"""Page of all keys of a recipe, docs/keys.md: `python -m trainer.config.keys_page > docs/keys.md` writes it."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from schemas.options import Options
from trainer.config import Recipe
from trainer.methods.kinds import KindSection

_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_HEAD = """# Keys of a recipe

Every key, by section: meaning, type, default and range, written by `python -m trainer.config.keys_page` from options.
`extremis run astra data/ runs/1 --set train.epochs=5` sets one; `extremis recipes show astra` prints what a recipe
states. Numbers that a recipe leaves to the data are `"auto"` ([recipes](recipes.md#settings-that-come-from-the-data)).
"""


def page() -> str:
    """Return the page in Markdown."""
    return "\n".join([_HEAD, *_sections()]).rstrip("\n") + "\n"


def _sections() -> Iterator[str]:
    for name, field in Recipe.model_fields.items():
        section = field.annotation
        if not (isinstance(section, type) and issubclass(section, Options)):
            continue
        kinds = section.KINDS if issubclass(section, KindSection) else {}
        yield from _table(name, f"## `[{name}]`", section, set())
        for kind in kinds:
            own = section.class_of(kind).section  # type: ignore[attr-defined]
            extra = {*own.model_fields} - {*section.model_fields}
            if extra:
                yield from _table(name, f'### `{name}.kind = "{kind}"`', own, {*section.model_fields})


def _table(name: str, title: str, section: type[Options], shown: set[str]) -> Iterator[str]:
    yield from (title, "", "| key | meaning | type | default | range |", "|---|---|---|---|---|")
    yield from _rows(name, section, shown)
    yield ""


def _rows(name: str, section: type[Options], shown: set[str]) -> Iterator[str]:
    for key, field in section.model_fields.items():
        if key in shown:
            continue
        if key == "kind" and issubclass(section, KindSection):
            kinds = [f'"{kind}"' for kind in section.KINDS]
            yield f"| `{name}.kind` | class that the section configures | {', '.join(kinds)} | `{kinds[0]}` |  |"
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
