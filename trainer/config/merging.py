"""Process a recipe's options before validation: merge recipes, remove options of other kinds, describe errors."""

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schemas.options import Options, as_input_error
from trainer.methods.kinds import KindSection, OneOfKinds
from trainer.methods.recipe import Recipe
from trainer.methods.rules import AUTO, FromData, options_from_data

Body = Mapping[str, Any]  # options of a recipe or of one of its sections, from TOML
Classes = Callable[[], list[type[Options]]]  # called only when needed, because the class of an encoder loads a module


def merge(bodies: Sequence[Body]) -> dict[str, Any]:
    """Merge a chain of recipes in which each recipe extends the recipe before.

    If a recipe changes the method or the kind of a section, options that only the previous kind has are dropped. For
    encoders and losses, whose modules are not loaded here, these are the options that not all kinds have.
    """
    return _merge_section(Recipe, bodies, kept_from=0, others=list)


def flatten(options: Body, prefix: str = "") -> dict[str, Any]:
    """Return `options` as a flat dict from dotted keys to values."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def section_of(options: type[Options], name: str) -> type[Options] | None:
    """Return the class of the section `name`, or None if there is no such section."""
    kind = options.model_fields[name].annotation if name in options.model_fields else None
    return kind if isinstance(kind, type) and issubclass(kind, Options) else None


def _merge_section(section: type[Options], bodies: Sequence[Body], kept_from: int, others: Classes) -> dict[str, Any]:
    """Merge the section of all `bodies`; the last body that names a kind determines the kind.

    An option is foreign if only the classes of other kinds, of this section or among `others`, have the option. Foreign
    options are dropped, except in bodies[kept_from:], where validation reports foreign options as mistakes. If a body
    changes the kind, `kept_from` is raised to the index of the body.
    """
    if not issubclass(section, OneOfKinds):
        return _merge_options(section, bodies, kept_from, others)
    kind, key = section.kind_in({}), section.KIND_KEY.rpartition(".")[2]
    if issubclass(section, KindSection):  # all methods have the same encoders and losses, and not all load everywhere
        kinds = [kind := body.get(key, kind) for body in bodies]
        pairs = zip(kinds, bodies, strict=True)
        return _merged(
            [{k: v for k, v in body.items() if of == kind or k in section.model_fields} for of, body in pairs]
        )
    for number, body in enumerate(bodies):
        if body.get(key, kind) != kind:
            kind, kept_from = body[key], max(kept_from, number)
    if not (isinstance(kind, str) and kind in section.KINDS):  # the kind depends on the data, or is invalid
        return _merged(bodies)

    def of_other_kinds() -> list[type[Options]]:
        return [*others(), *(section.options_of(each) for each in section.KINDS if each != kind)]

    return _merge_options(section.options_of(kind), bodies, kept_from, of_other_kinds)


def _merge_options(options: type[Options], bodies: Sequence[Body], kept_from: int, others: Classes) -> dict[str, Any]:
    """Merge the options in `bodies` for the class `options`, section by section, without foreign options."""
    merged = _merged(bodies)
    kept = {key for body in bodies[kept_from:] for key in body}
    for key, value in list(merged.items()):
        section = section_of(options, key)
        if section is not None and isinstance(value, dict):
            stated = [body[key] if isinstance(body.get(key), Mapping) else {} for body in bodies]
            classes = functools.partial(_sections_of, others, key)
            merged[key] = _merge_section(section, stated, kept_from, classes)
        elif not (key in kept or _takes(options, key, value)) and any(_takes(each, key, value) for each in others()):
            del merged[key]
    return merged


def _takes(options: type[Options], key: str, value: Any) -> bool:
    """Return whether `options` has `key` and, if `value` is in AUTO, can compute `key` from the data."""
    if key not in options.model_fields:
        return False
    is_word = options.model_fields[key].annotation is str
    return is_word or value not in AUTO or key in dict(options_from_data(options))


def _sections_of(others: Classes, key: str) -> list[type[Options]]:
    found = (section_of(other, key) for other in others())
    return [each for section in found if section is not None for each in _variants(section)]


def _variants(section: type[Options]) -> list[type[Options]]:
    """Return the classes of a section's kinds; for encoders and losses, which all methods share, the base class."""
    if issubclass(section, OneOfKinds) and not issubclass(section, KindSection):
        return [section.options_of(kind) for kind in section.KINDS]
    return [section]


def _merged(bodies: Sequence[Body]) -> dict[str, Any]:
    """Return the options of all `bodies` in new tables; later bodies override earlier bodies."""
    merged: dict[str, Any] = {}
    for body in bodies:
        for key, value in body.items():
            if isinstance(value, dict):
                value = _merged([*([merged[key]] if isinstance(merged.get(key), dict) else []), value])
            merged[key] = value
    return merged


def applies(body: Body, dotted: str) -> bool:
    """Return whether an option applies to the recipe `body`; True for unknown options, which validation rejects."""
    section, *path = dotted.split(".")
    if not path or any(_has(options, path) for options in _classes_of(section, body)):
        return True
    return not any(_has(Recipe.options_of(method), [section, *path]) for method in Recipe.KINDS)


def options_left_to_data(body: Body) -> dict[str, FromData]:
    """Return the rules, by dotted key, for the options in a recipe's `body` that are computed from the data."""
    return {
        f"{name}.{key}": mark
        for name, values in body.items()
        if isinstance(values, Mapping)
        for options in _classes_of(name, body)
        for key, mark in options_from_data(options)
        if key in values and values[key] in AUTO
    }


def _classes_of(name: str, body: Body) -> list[type[Options]]:
    """Return the class of a section's options, or the classes of all kinds if the kind depends on the data."""
    try:
        section = section_of(Recipe.options_of(Recipe.kind_in(body)), name)
        if section is None or not issubclass(section, OneOfKinds):
            return [] if section is None else [section]
        kind = section.kind_in(body.get(name) or {})
        return [section.options_of(each) for each in (section.KINDS if kind in AUTO else [kind])]
    except (TypeError, ValueError):  # validation reports the fault
        return []


def without_auto(body: Body) -> dict[str, Any]:
    """Copy a recipe's `body`; options that are computed from the data are removed, or get placeholder values.

    If a kind depends on the data, the copy retains the options of the default kind.
    """
    left, stated = options_left_to_data(body), dict(body)
    for dotted, mark in left.items():
        name, _, key = dotted.partition(".")
        stated[name] = {each: value for each, value in stated[name].items() if each != key}
        if mark.placeholder is not None:
            stated[name][key] = mark.placeholder
    return _without_kinds_of_data(stated, left)


def with_values(body: Body, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set `values`, by dotted key, in a recipe's `body`, and remove options of kinds that `values` do not choose."""
    filled = {name: dict(options) if isinstance(options, dict) else options for name, options in body.items()}
    for dotted, value in values.items():
        section, _, option = dotted.partition(".")
        filled.setdefault(section, {})[option] = value
    return _without_kinds_of_data(filled, values)


def _without_kinds_of_data(body: dict[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Remove options of other kinds from each section whose kind is set by `keys`."""
    for name in {key.partition(".")[0] for key in keys}:
        section = section_of(Recipe.options_of(Recipe.kind_in(body)), name)
        if section is not None and issubclass(section, OneOfKinds) and section.KIND_KEY in keys:
            body[name] = _merge_section(section, [body[name]], kept_from=1, others=list)
    return body


def explain(fault: Any, body: Body) -> str:
    """Describe a pydantic error in a recipe's `body` and suggest a fix: the nearest key, or the kind with this key."""
    if fault["type"] != "extra_forbidden":
        error = as_input_error(fault)
        facts = f"{error.parameter}: expected {error.expected}, got {error.got}"
        text = facts if error.expected else str(error).removesuffix(".")
        return f"{text}; this key cannot be 'auto'" if fault["input"] in AUTO else text
    *path, key = (str(part) for part in fault["loc"])
    where = ".".join([*path, key])
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
            return (
                f"{where} works only with {kinds.KIND_KEY} = {' or '.join(map(repr, having))}, not with {kind!r}: "
                "leave this key out"
            )
    near = difflib.get_close_matches(key, options.model_fields, n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else f", known: {', '.join(options.model_fields)}"
    return f"unknown key {where!r}{hint}"


def _has(options: type[Options], path: Sequence[str]) -> bool:
    if len(path) == 1:
        return path[0] in options.model_fields
    section = section_of(options, path[0])
    return section is not None and any(_has(each, path[1:]) for each in _variants(section))
