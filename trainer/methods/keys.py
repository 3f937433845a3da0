"""Which class reads which key of a recipe: the table of methods, changes, one section alone, unknown keys."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from schemas.options import Options, as_input_error
from trainer.methods.kinds import Entry, options_of
from trainer.modules import opened

AUTO = ("auto", "prior")  # values in a recipe that mean a setting from the data
METHODS = {  # the default first; imported late, because serving an export does not need the methods
    "astra": "trainer.methods.astra:Astra",
    "renee": "trainer.methods.astra:Renee",
    "lns": "trainer.methods.lns:Lns",
    "dexml": "trainer.methods.dexml:Dexml",
    "ngame": "trainer.methods.ngame:Ngame",
    "ngame-m2": "trainer.methods.ngame:NgameM2",
}
Body = Mapping[str, Any]  # options of a recipe or of one of its sections, from TOML


def flatten(options: Body, prefix: str = "") -> dict[str, Any]:
    """Return `options` as a flat dict from dotted keys to values."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def methods_of(body: Any) -> list[Any]:
    """Return the class of the method of a recipe's `body`; none for an unknown method. All without a body."""
    return _kinds(METHODS, "method", body)


def classes_at(parents: Sequence[type[Options]], section: str, values: Any = None) -> list[type[Options]]:
    """Return the classes that may read a section of `parents`: none for an unknown section or kind.

    There may be several if `values`, those of the section, leave the kind to the data, or if there are no values.
    """
    classes = list[type[Options]]()
    for parent in parents:
        if choice := getattr(parent, "choices", {}).get(section):
            classes += _kinds(choice[1], choice[0], values)
        elif section in parent.model_fields:
            options = parent.model_fields[section].annotation
            classes += [options] if isinstance(options, type) and issubclass(options, Options) else []
    return classes


def _kinds(table: Mapping[str, Entry], key: str, values: Any) -> list[Any]:
    kind = values.get(key, next(iter(table))) if isinstance(values, Mapping) else AUTO[0]
    kinds = table if kind in AUTO else [kind] if isinstance(kind, str) and (kind in table or opened(kind)) else []
    return [options_of(table, each, key) for each in kinds]


def keys_at(parents: Sequence[type[Options]], sections: Sequence[str], values: Any = None) -> list[str]:
    """Return the keys that nested `sections` of `parents` may have; `values` of the parents may choose kinds."""
    for section in sections:
        values = values.get(section, {}) if isinstance(values, Mapping) else None
        parents = classes_at(parents, section, values)
    return [key for parent in parents for key in parent.model_fields]


def merge(base: Body, changes: Body) -> dict[str, Any]:
    """Return `base` with `changes`, section by section.

    If `changes` choose another method or kind, keys fall away that `base` has for its own, and that the other lacks.
    Keys that `base` itself cannot have stay, so that validation refuses them.
    """
    return _merge(base, changes, methods_of(base), methods_of({**base, **changes}))


def _merge(base: Body, changes: Body, old: Sequence[type[Options]], new: Sequence[type[Options]]) -> dict[str, Any]:
    merged, had, has = dict[str, Any](), keys_at(old, ()), keys_at(new, ())
    for key in {**base, **changes}:
        before, after = base.get(key), changes.get(key, {})
        if key not in base or not isinstance(before, Mapping) or not isinstance(after, Mapping):
            value = changes.get(key, before)
        else:
            both = {**before, **after}
            value = _merge(before, after, classes_at(old, key, before), classes_at(new, key, both))
        fell = key not in changes and key in had and key not in has
        if not fell or (isinstance(before, Mapping) and value):
            merged[key] = value
    return merged


def explain(fault: Mapping[str, Any], body: Body) -> str:
    """Describe a pydantic error in a recipe's `body` and suggest a fix: the nearest key, or the kind with this key."""
    if fault["type"] != "extra_forbidden":
        error = as_input_error(fault)
        facts = f"{error.parameter}: expected {error.expected}, got {error.got}"
        text = facts if error.expected else str(error).removesuffix(".")
        return f"{text}; this key cannot be 'auto'" if fault["input"] in AUTO else text
    *sections, key = (str(part) for part in fault["loc"])
    where, known = ".".join([*sections, key]), keys_at(methods_of(body), sections, body)
    # What chooses the known keys: the kind of the section, then the method. The keys that each value would give.
    choices = [("method", {name: keys_at([options_of(METHODS, name, "method")], sections) for name in METHODS})]
    for method in methods_of(body) if sections else ():
        for name, table in [method.choices[sections[0]]] if sections[0] in method.choices else ():
            kinds = {kind: keys_at([options_of(table, kind, name)], sections[1:]) for kind in table}
            choices.insert(0, (f"{sections[0]}.{name}", kinds))
    for setting, keys in choices:
        if having := [repr(value) for value, names in keys.items() if key in names]:
            stated = flatten(body).get(setting, next(iter(keys)))
            return f"{where} works only with {setting} = {' or '.join(having)}, not with {stated!r}: leave this key out"
    if near := difflib.get_close_matches(key, known, n=1, cutoff=0.5):
        return f"unknown key {where!r}, did you mean {near[0]!r}?"
    others = {
        name: f"{setting} = {value!r}"
        for setting, keys in reversed(choices)
        for value, names in reversed(keys.items())
        for name in names
    }
    if near := difflib.get_close_matches(key, others, n=1, cutoff=0.7):
        return f"unknown key {where!r}, did you mean {near[0]!r} of {others[near[0]]}?"
    return f"unknown key {where!r}, known: {', '.join(known)}"
