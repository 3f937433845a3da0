"""Options of a recipe as tables: laid over each other, without those of other kinds, and their faults told."""

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schemas.options import Options, fault_text
from trainer.methods.earlier import REMOVED, renew
from trainer.methods.kinds import KindSection, OneOfKinds
from trainer.methods.recipe import Recipe
from trainer.methods.rules import AUTO, FromData, options_from_data

Table = Mapping[str, Any]
Classes = Callable[[], list[type[Options]]]


def lay(layers: Sequence[Table], light: bool = False) -> dict[str, Any]:
    """Lay options over each other, the last on top, under the keys of today.

    Where a layer changes the method or another kind, options that layers below set for other kinds alone are left out.
    `light`: encoders and losses are not looked at, so that what implements them is not loaded.
    """
    renewed, method = [], Recipe.kind_in({})
    for layer in layers:
        renewed.append(renew(layer, method))
        method = Recipe.kind_in({"method": method, **renewed[-1]})
    return _lay_section(Recipe, renewed, list, 0, light)


def without_foreign(body: Table, kind_section: type[OneOfKinds] = Recipe) -> dict[str, Any]:
    """Return the options `body` of a section with kinds, without those of other kinds alone."""
    return _lay_section(kind_section, [body], list, 1, False)


def flatten(options: Table, prefix: str = "") -> dict[str, Any]:
    """Return the values of `options` by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def section_of(options: type[Options], name: str) -> type[Options] | None:
    """Return the class of the section `name`; None where there is no such section."""
    kind = options.model_fields[name].annotation if name in options.model_fields else None
    return kind if isinstance(kind, type) and issubclass(kind, Options) else None


def _lay_section(
    section: type[Options], layers: Sequence[Table], others: Classes, first: int, light: bool
) -> dict[str, Any]:
    """Lay the tables of a section over each other.

    Options that `layers[first:]` do not state are left out where `section` lacks them and one of the `others` has them.
    """
    if not issubclass(section, OneOfKinds):
        return _lay_options(section, layers, others, first, light)
    kind, tag = section.kind_in({}), section.PLACE.rpartition(".")[2]
    for number, layer in enumerate(layers):
        if layer.get(tag, kind) != kind:
            kind, first = layer[tag], max(first, number)
    try:
        if kind in AUTO or (light and issubclass(section, KindSection)):
            return functools.reduce(_lay_over, layers, {})
        options = section.options_of(kind)
    except ValueError:  # told by validation
        return functools.reduce(_lay_over, layers, {})

    def with_kinds() -> list[type[Options]]:
        return [*others(), *(section.options_of(each) for each in section.KINDS if each != kind)]

    return _lay_options(options, layers, with_kinds, first, light)


def _lay_options(
    options: type[Options], layers: Sequence[Table], others: Classes, first: int, light: bool
) -> dict[str, Any]:
    body: dict[str, Any] = functools.reduce(_lay_over, layers, {})
    stated = {key for layer in layers[first:] for key in layer}
    for key, value in list(body.items()):
        section = section_of(options, key)
        if section is not None and isinstance(value, dict):
            tables = [layer[key] if isinstance(layer.get(key), Mapping) else {} for layer in layers]
            body[key] = _lay_section(section, tables, functools.partial(_sections_of, others, key), first, light)
        elif (
            key not in stated and not _takes(options, key, value) and any(_takes(each, key, value) for each in others())
        ):
            del body[key]
    return body


def _takes(options: type[Options], key: str, value: Any) -> bool:
    """Tell whether `options` have `key`, and may leave it to the data where `value` says so."""
    if key not in options.model_fields:
        return False
    is_word = options.model_fields[key].annotation is str
    return is_word or value not in AUTO or key in dict(options_from_data(options))


def _sections_of(others: Classes, key: str) -> list[type[Options]]:
    found = (section_of(other, key) for other in others())
    return [each for section in found if section is not None for each in _variants(section)]


def _variants(section: type[Options]) -> list[type[Options]]:
    """Return the classes of a section's kinds; encoders and losses, which every method has, by what they share."""
    if issubclass(section, OneOfKinds) and not issubclass(section, KindSection):
        return [section.options_of(kind) for kind in section.KINDS]
    return [section]


def _lay_over(base: Table, top: Table) -> dict[str, Any]:
    """Return both merged, in tables of their own."""
    merged = dict(base)
    for key, value in top.items():
        under = merged.get(key)
        merged[key] = _lay_over(under if isinstance(under, dict) else {}, value) if isinstance(value, dict) else value
    return merged


def applies(body: Table, dotted: str) -> bool:
    """Tell whether an option is of the recipe `body`; True for one that no method has, which validation refuses."""
    section, *path = dotted.split(".")
    if not path or any(_has(options, path) for options in _classes_of(section, body)):
        return True
    return not any(_has(Recipe.options_of(method), [section, *path]) for method in Recipe.KINDS)


def left_to_data(body: Table) -> dict[str, FromData]:
    """Return the rules of the options that a recipe's `body` leaves to the data, by dotted key."""
    return {
        f"{name}.{key}": mark
        for name, values in body.items()
        if isinstance(values, Mapping)
        for options in _classes_of(name, body)
        for key, mark in options_from_data(options)
        if key in values and values[key] in AUTO
    }


def _classes_of(name: str, body: Table) -> list[type[Options]]:
    """Return the class of a section's options; those of all kinds where the data decide the kind."""
    try:
        section = section_of(Recipe.options_of(Recipe.kind_in(body)), name)
        if section is None or not issubclass(section, OneOfKinds):
            return [] if section is None else [section]
        kind = section.kind_in(body.get(name) or {})
        return [section.options_of(each) for each in (section.KINDS if kind in AUTO else [kind])]
    except (TypeError, ValueError):  # told by validation
        return []


def without_auto(body: Table) -> dict[str, Any]:
    """Return a copy of a recipe's `body` without the options that it leaves to the data, or with what stands for them.

    Of a kind that the data decide, the options of the default are left.
    """
    left, stated = left_to_data(body), dict(body)
    for dotted, mark in left.items():
        name, _, key = dotted.partition(".")
        stated[name] = {each: value for each, value in stated[name].items() if each != key}
        if mark.meanwhile is not None:
            stated[name][key] = mark.meanwhile
    return _without_kinds_of_data(stated, left)


def with_values(body: Table, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's `body` with `values` by dotted key, without options of other kinds than are among them."""
    filled = {name: dict(options) if isinstance(options, dict) else options for name, options in body.items()}
    for dotted, value in values.items():
        section, _, option = dotted.partition(".")
        filled.setdefault(section, {})[option] = value
    return _without_kinds_of_data(filled, values)


def _without_kinds_of_data(body: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out of the sections whose kind is among `keys` the options of other kinds."""
    for name in {key.partition(".")[0] for key in keys}:
        section = section_of(Recipe.options_of(Recipe.kind_in(body)), name)
        if section is not None and issubclass(section, OneOfKinds) and section.PLACE in keys:
            body[name] = without_foreign(body[name], section)
    return body


def explain(fault: Any, body: Table) -> str:
    """Say one of pydantic's faults in a recipe's `body`, with a remedy: the nearest key, or the kind that has it."""
    if fault["type"] != "extra_forbidden":
        text = fault_text(fault)
        return f"{text}; the data cannot decide it" if fault["input"] in AUTO else text
    *path, key = (str(part) for part in fault["loc"])
    where = ".".join([*path, key])
    if where in REMOVED:
        return f"{where} = {fault['input']!r}: this option was removed, leave it out"
    options: type[Options] = Recipe
    levels = list[tuple[type[OneOfKinds], Any, list[str]]]()
    for depth in range(len(path) + 1):
        if issubclass(options, OneOfKinds):
            levels.append((options, options.kind_in(body), [*path[depth:], key]))
            options = options.options_of(options.kind_in(body))
        if depth < len(path):
            options, body = section_of(options, path[depth]) or Options, body[path[depth]]
    for kinds, kind, rest in reversed(levels):
        having = [each for each in kinds.KINDS if _has(kinds.options_of(each), rest)]
        if having:
            return f"{where} is of {kinds.PLACE} = {' or '.join(map(repr, having))}, and this is {kind!r}: leave it out"
    near = difflib.get_close_matches(key, options.model_fields, n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else f", known: {', '.join(options.model_fields)}"
    return f"unknown key {where!r}{hint}"


def _has(options: type[Options], path: Sequence[str]) -> bool:
    """Tell whether an option is at `path` below `options`."""
    if len(path) == 1:
        return path[0] in options.model_fields
    section = section_of(options, path[0])
    return section is not None and any(_has(each, path[1:]) for each in _variants(section))
