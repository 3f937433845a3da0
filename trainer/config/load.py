"""Recipes as TOML files: read, changed by `--set a.b=c`, checked with an explanation of faults, saved with a run."""

import difflib
import functools
import importlib.metadata
import importlib.resources
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin
from zlib import crc32

import tomli_w
from pydantic import ValidationError

from schemas.errors import InputError
from schemas.options import Options, fault_text
from trainer.config.kinds import KindSection
from trainer.config.recipe import Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Options that were removed, by dotted key, with the value that had no effect: configs of earlier runs have it.
REMOVED: dict[str, Any] = {
    "classifier.decay": "touched",
    "negatives.cache": 0,
    "negatives.cache_steps": 32,
}
MAX_CHARACTERS, MAX_DEPTH = 1 << 20, 32  # of a TOML file
_SEAL_MARK = b"# CRC-32 of all above: "  # the last line of a config
_SEAL = _SEAL_MARK + b"%08x\n"
# Values that leave an option to the data (trainer.settings).
AUTO = ("auto", "prior")


def load_recipe(source: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read the recipe `source` with `overrides`, as `read_recipe`; what it leaves to the data has defaults.

    Raises InputError: as `read_recipe`; an unknown key (names the nearest known one), a key of another kind, a value
    out of range.
    """
    return validate(without_auto(read_recipe(source, overrides)), source)


def check_keys(source: str, overrides: Iterable[str] = ()) -> None:
    """Check what can be known of a recipe without loading what it configures: its name, sections, and plain options.

    Sections of several kinds, and what depends on several options, are checked by `load_recipe`. Raises InputError.
    """
    body = stated_options(source, overrides)
    plain = {name: values for name, values in body.items() if name not in _kind_sections()}
    for name, values in without_auto(plain).items():
        field = Recipe.model_fields.get(name)
        if field is None:
            raise InputError(f"recipe {source}: {_explain({'type': 'extra_forbidden', 'loc': (name,)}, body)}.")
        if isinstance(field.annotation, type) and issubclass(field.annotation, Options):
            try:
                field.annotation.model_validate(values)
            except ValidationError as error:
                faults = [{**fault, "loc": (name, *fault["loc"])} for fault in error.errors()]
                raise InputError(f"recipe {source}: {'; '.join(_explain(fault, body) for fault in faults)}.") from None


def auto_keys(body: Mapping[str, Any]) -> list[str]:
    """List the options that a recipe's `body` leaves to the data, by dotted key."""
    kinds, keys = _kind_sections(), []
    for name, options in body.items():
        if name not in Recipe.model_fields or name == "method" or not isinstance(options, dict):
            continue
        try:
            section = kinds[name].section_of(options) if name in kinds else Recipe.model_fields[name].annotation
        except ValueError:  # told by validation
            continue
        assert section is not None
        derived = {key for key, option in section.model_fields.items() if _may_be_derived(option.annotation)}
        keys += [f"{name}.{key}" for key in derived & options.keys() if options[key] in AUTO]
    return sorted(keys)


def _may_be_derived(annotation: Any) -> bool:
    """Tell whether an option is a number, or one of several words that "auto" is not among."""
    return annotation in (int, float) or (get_origin(annotation) is Literal and AUTO[0] not in get_args(annotation))


def without_auto(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a recipe's `body` without the options that it leaves to the data.

    k_h is 1 in place of "auto": that there are hard negatives is what other options depend on.
    """
    left = set(auto_keys(body))
    stated = {
        name: {key: value for key, value in options.items() if f"{name}.{key}" not in left}
        if isinstance(options, dict)
        else options
        for name, options in body.items()
    }
    if "negatives.hard" in left and body["negatives"].get("pool") != "all":
        stated["negatives"]["hard"] = 1
    return stated


def read_recipe(source: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read the recipe `source` (a name under recipes/ or a URL of a TOML file) with `section.key=value` overrides.

    A recipe may say `extends = "astra"`, or `"base.toml"` in its own folder, and state only what differs. Where it, or
    an override, changes the kind of a section, options that lower layers set for other kinds are left out.
    Raises InputError: no such recipe, not TOML.
    """
    layers = _read_layers(source)
    body: dict[str, Any] = functools.reduce(_lay_over, layers, {})
    top: dict[str, Any] = {}
    for override in overrides:
        _override(body, override)
        _override(top, override)
    for name, section in _kind_sections().items():
        if isinstance(body.get(name), dict):
            keys = _keys_before_kind([layer.get(name) for layer in [*layers, top]], section.kind_in({}))
            body[name] = section.without_foreign(body[name], keys)
    return body


def stated_options(source: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Return what the recipe `source`, those that it extends, and `overrides` say, without defaults. Raises InputError.

    Nothing that implements an option is imported: a bare installation has not all of it.
    """
    body: dict[str, Any] = functools.reduce(_lay_over, _read_layers(source), {})
    for override in overrides:
        _override(body, override)
    return body


def restore_recipe(body: Mapping[str, Any], source: str) -> Recipe:
    """Read the recipe of a run or an export, also one of an earlier version of Extremis.

    Options of other kinds, and removed options without effect, are left out. Raises InputError.
    """
    restored = dict(body)
    for name, values in body.items():
        if isinstance(values, dict):
            restored[name] = {key: value for key, value in values.items() if REMOVED.get(f"{name}.{key}", ...) != value}
    for name, section in _kind_sections().items():
        if isinstance(restored.get(name), dict):
            restored[name] = section.without_foreign(restored[name], restored[name])
    return validate(restored, source)


def validate(body: Mapping[str, Any], source: str) -> Recipe:
    """Check `body` and return it as a Recipe. Raises InputError with one line a fault."""
    try:
        return Recipe.model_validate(body)
    except ValidationError as error:
        faults = "; ".join(_explain(fault, body) for fault in error.errors())
        raise InputError(f"recipe {source}: {faults}.") from None


def dump_config(recipe: Recipe, **facts: Mapping[str, Any]) -> bytes:
    """Return the resolved recipe, the versions it ran with, and further tables of `facts`, as TOML with a checksum."""
    from schemas.manifest import code_version

    versions = {"extremis": code_version(), "python": sys.version.split()[0]}
    for name in ("torch", "numpy", "pyarrow", "transformers", "faiss-cpu", "apache-beam"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    body = {"recipe": recipe.model_dump(mode="json"), "versions": versions, **facts}
    text = tomli_w.dumps(body).encode()
    return text + _SEAL % crc32(text)


def load_config(url: str) -> dict[str, Any]:
    """Read a run's config.toml: `recipe`, `versions`, `data`. Raises InputError where there is no run."""
    from schemas import storage

    try:
        data = storage.read_matching(lambda: storage.read_bytes(url), _matches_seal)
    except FileNotFoundError:
        raise InputError(f"{url}: no run here. Start one with `extremis run` or `extremis train`.") from None
    if not _matches_seal(data):
        raise InputError(
            f"{url}: damaged, or changed by hand: it does not match the checksum at its end. Restore it; a run with "
            "other settings is a new run."
        )
    return _parse(data.decode(errors="replace"), url)


def _matches_seal(data: bytes) -> bool:
    """Tell whether a config matches the checksum at its end; those of earlier versions have none."""
    text, mark, checksum = data.rpartition(_SEAL_MARK)
    return not mark or checksum.strip() == b"%08x" % crc32(text)


def recipe_names() -> list[str]:
    """List the names of the recipes that ship with Extremis."""
    folder = importlib.resources.files("recipes")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _read_layers(source: str) -> list[dict[str, Any]]:
    """Read the recipe's TOML and, before it, those that it `extends`: by name, or by a path from its own folder."""
    layers: dict[str, dict[str, Any]] = {}
    base: Any = source
    while base is not None:
        source = str(base)
        if source in layers:
            raise InputError(f"recipe {source}: extends itself, by {[*layers][-1]}. Fix one of them.")
        layers[source] = _parse(_read_text(source), source)
        base = layers[source].pop("extends", None)
        if str(base).endswith(".toml") and not str(base).startswith("~"):
            from schemas.storage import resolve

            base = resolve(source[: source.rfind("/") + 1], base)
    return [*layers.values()][::-1]


def _lay_over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """Return both merged, in tables of their own."""
    merged = dict(base)
    for key, value in top.items():
        under = merged.get(key)
        merged[key] = _lay_over(under if isinstance(under, dict) else {}, value) if isinstance(value, dict) else value
    return merged


def _kind_sections() -> dict[str, type[KindSection]]:
    """Return the sections that have kinds, by name."""
    types = {name: field.annotation for name, field in Recipe.model_fields.items()}
    return {name: kind for name, kind in types.items() if isinstance(kind, type) and issubclass(kind, KindSection)}


def _keys_before_kind(layers: Sequence[Any], default: str) -> set[str]:
    """Return the keys of a section that only layers before its last change of kind have."""
    kind, first = default, 0
    sections = [layer if isinstance(layer, dict) else {} for layer in layers]
    for number, section in enumerate(sections):
        if section.get("kind", kind) != kind:
            kind, first = section["kind"], number
    return set().union(*sections[:first]) - set().union(*sections[first:])


def _read_text(source: str) -> str:
    if source in recipe_names():
        return importlib.resources.files("recipes").joinpath(f"{source}.toml").read_text()
    if not source.endswith(".toml"):
        near = difflib.get_close_matches(source, recipe_names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"no recipe {source!r}: expected one of {', '.join(recipe_names())}, or a path that ends in .toml.{hint}"
        )
    from schemas import storage  # a named recipe does without Arrow and fsspec, so a typo in it is told at once

    try:
        return storage.read_bytes(source).decode()
    except FileNotFoundError:
        raise InputError(f"recipe {source}: no such file. Check the path.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"recipe {source}: not UTF-8 text ({error}).") from None


def _parse(text: str, source: str) -> dict[str, Any]:
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{source}: {len(text):,} characters; at most {MAX_CHARACTERS:,} are read. Is it a recipe?")
    try:
        body = tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{source}: nested deeper than {MAX_DEPTH} levels. Is it a recipe?") from None
    except ValueError as error:  # also a number of thousands of digits
        raise InputError(f"{source}: not TOML: {error}. Fix it.") from None
    _check_depth(body, source)
    return body


def _check_depth(value: Any, source: str) -> None:
    """Raise InputError where tables and lists are nested deeper than MAX_DEPTH."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise InputError(f"{source}: nested deeper than {MAX_DEPTH} levels. Is it a recipe?")


def _override(body: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {override!r}: expected section.key=value, for example train.epochs=10.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value  # a bare word is a string
    _check_depth(parsed, f"--set {path}")
    if len(keys) > MAX_DEPTH:
        raise InputError(f"--set: a key of {len(keys):,} parts; expected section.key=value, as in train.epochs=10.")
    for key in keys[:-1]:
        body = body.setdefault(key, {})
        if not isinstance(body, dict):
            raise InputError(f"--set {override!r}: {key!r} is a value, not a section.")
    body[keys[-1]] = parsed


def _explain(fault: Any, body: Mapping[str, Any]) -> str:
    if fault["type"] != "extra_forbidden":
        return fault_text(fault)
    *path, key = (str(part) for part in fault["loc"])
    where = ".".join([*path, key])
    if where in REMOVED:
        return f"{where} = {fault['input']!r}: this option was removed, leave it out"
    section: type[Options] = Recipe
    for part in path:
        section = section.model_fields[part].annotation  # type: ignore[assignment]
        body = body[part]
        if issubclass(section, KindSection):
            kinds, kind, section = section.kinds_with(key), section.kind_in(body), section.section_of(body)
            if kinds:
                names = " or ".join(map(repr, kinds))
                return f"{where} is of {part}.kind = {names}, and this is {kind!r}: leave it out"
    options = list(section.model_fields)
    near = difflib.get_close_matches(key, options, n=1, cutoff=0.5)
    hint = f", did you mean {near[0]!r}?" if near else f", known: {', '.join(options)}"
    return f"unknown key {where!r}{hint}"
