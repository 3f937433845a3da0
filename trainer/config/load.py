"""Recipes as TOML files: found, changed by `--set a.b=c`, explained where they are wrong, saved with what they made."""

import difflib
import importlib.metadata
import importlib.resources
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from schemas import storage
from schemas.errors import InputError
from schemas.manifest import code_version
from schemas.options import fault_text
from trainer.config.recipe import Recipe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_recipe(source: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe `source` (a name under recipes/ or a URL of a TOML file) with `section.key=value` overrides.

    A recipe may say `extends = "astra"` and state only what differs.
    Raises InputError: no such recipe, not TOML, an unknown key (names the nearest known one), a value out of range.
    """
    body = _body_of(source)
    for override in overrides:
        _override(body, override)
    return validate(body, source)


def validate(body: Mapping[str, Any], source: str) -> Recipe:
    """`body` as a Recipe. Raises InputError with one line a fault."""
    try:
        return Recipe.model_validate(body)
    except ValidationError as error:
        faults = "; ".join(_explain(fault) for fault in error.errors())
        raise InputError(f"recipe {source}: {faults}.") from None


def dump_config(recipe: Recipe, **facts: Mapping[str, Any]) -> bytes:
    """The resolved recipe, the versions it ran with, and further tables of `facts`, as TOML."""
    versions = {"extremis": code_version(), "python": sys.version.split()[0]}
    for name in ("torch", "numpy", "pyarrow", "transformers", "faiss-cpu", "apache-beam"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    body = {"recipe": recipe.model_dump(mode="json"), "versions": versions, **facts}
    return tomli_w.dumps(body).encode()


def load_config(url: str) -> dict[str, Any]:
    """A run's config.toml: `recipe`, `versions`, `data`. Raises InputError when no run is there."""
    try:
        data = storage.read_bytes(url)
    except FileNotFoundError:
        raise InputError(f"{url}: no run here. Start one with `extremis run` or `extremis train`.") from None
    return _parse(data.decode(errors="replace"), url)


def recipe_names() -> list[str]:
    """Names of the recipes that ship with Extremis."""
    folder = importlib.resources.files("recipes")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _body_of(source: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The recipe's TOML laid over the recipe that it `extends`."""
    if source in seen:
        raise InputError(f"recipe {source}: extends itself ({' -> '.join([*seen, source])}).")
    body = _parse(_text_of(source), source)
    base = body.pop("extends", None)
    return body if base is None else _laid_over(_body_of(str(base), (*seen, source)), body)


def _laid_over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        under = merged.get(key)
        merged[key] = _laid_over(under, value) if isinstance(value, dict) and isinstance(under, dict) else value
    return merged


def _text_of(source: str) -> str:
    if source in recipe_names():
        return importlib.resources.files("recipes").joinpath(f"{source}.toml").read_text()
    if not source.endswith(".toml"):
        near = difflib.get_close_matches(source, recipe_names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"no recipe {source!r}: expected one of {', '.join(recipe_names())}, or a path that ends in .toml.{hint}"
        )
    try:
        return storage.read_bytes(source).decode()
    except FileNotFoundError:
        raise InputError(f"recipe {source}: no such file.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"recipe {source}: not UTF-8 text ({error}).") from None


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}.") from None


def _override(body: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {override!r}: expected section.key=value, for example train.epochs=10.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a bare word is a string
    for key in keys[:-1]:
        body = body.setdefault(key, {})
        if not isinstance(body, dict):
            raise InputError(f"--set {override!r}: {key!r} is a value, not a section.")
    body[keys[-1]] = parsed


def _explain(fault: Any) -> str:
    path = [str(part) for part in fault["loc"]]
    where = ".".join(path)
    if fault["type"] == "extra_forbidden":
        known = _keys_at(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f", did you mean {near[0]!r}?" if near else f", known: {', '.join(known)}"
        return f"unknown key {where!r}{hint}"
    return fault_text(fault)


def _keys_at(path: list[str]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in path:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
