"""Read recipes from TOML files, override keys with `--set a.b=c`, check keys, describe errors, and save recipes."""

import difflib
import importlib.metadata
import importlib.resources
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

import tomli_w
from pydantic import ValidationError

from schemas import code_version, commit
from schemas.errors import ClaimedError, InputError, option
from schemas.options import Options
from trainer.methods.keys import explain, keys_at, merge, methods_of
from trainer.methods.kinds import LossSection
from trainer.methods.recipe import Recipe
from trainer.methods.settling import NOMINAL, settle
from trainer.modules import open_named

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_CHARACTERS, MAX_DEPTH = 1 << 20, 32  # limits of a TOML file
AUTO_RECIPE = "auto"  # instead of a recipe: `extremis run` chooses a recipe
_SEAL_MARK = b"# CRC-32 of all above: "  # start of the last line of a config

# Waits for each table of negatives, so that the training data does not depend on timing.
WAIT_FOR_TABLES = "refresh.stale=wait"


def load_recipe(source: str, overrides: Iterable[str] = ()) -> Recipe:
    """Read and validate the recipe `source` with `overrides`; what it leaves to the data is settled for usual data.

    Loads no PyTorch. Raises the errors of `read_recipe`, and InputError for an unknown key (with the nearest known
    key), for a key that belongs to a different method or kind, and for a value out of range.
    """
    return validate(settle(read_recipe(source, overrides), NOMINAL)[0], source)


def read_recipe(source: str, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """Read the recipe `source` (a name under recipes/ or a URL of a TOML file) with `section.key=value` overrides.

    With `extends = "astra"`, or `extends = "base.toml"` for a file in the same folder, a recipe states only the keys
    that differ. What it extends must be whole. If the recipe or an override changes the method or the kind of a
    section, keys that only the old one has fall away. Raises InputError if there is no such recipe, or it is no TOML.
    """
    body = _read_body(source)
    if (base := body.pop("extends", None)) is not None:
        base = str(base)
        if base.endswith(".toml") and not base.startswith("~"):
            from schemas.storage import resolve

            base = resolve(source[: source.rfind("/") + 1], base)
        whole = _read_body(base)
        if "extends" in whole:
            raise InputError(
                f"recipe {source}: extends {base}, which extends {whole['extends']}; expected a recipe that extends "
                f"none. Extend {whole['extends']}, and repeat the keys of {base} here."
            )
        body = merge({**whole, "name": ""}, body)
    changes: dict[str, Any] = {}
    for override in overrides:
        _override(changes, override)
    _open_modules(changes, source)
    body["name"] = body.get("name") or source.rsplit("/", 1)[-1].removesuffix(".toml")
    return merge(body, changes)


def applicable_overrides(source: str, overrides: Iterable[str]) -> list[str]:
    """Return the `overrides` that apply to the recipe `source`: keys that it can have, or that no recipe can have.

    When several recipes are compared, each recipe uses only the keys of its own method. Raises InputError.
    """
    overrides, applicable = list(overrides), list[str]()
    body = read_recipe(source, [each for each in overrides if each.startswith("method=")])
    for override in overrides:
        *sections, key = override.partition("=")[0].strip().split(".")
        if key in keys_at(methods_of(body), sections, body) or key not in keys_at(methods_of(None), sections):
            applicable.append(override)
    return applicable


def validate(body: Mapping[str, Any], source: str) -> Recipe:
    """Check `body` and return it as a Recipe. Raises an InputError that lists every error."""
    try:
        return Recipe.model_validate(body)
    except ValidationError as error:
        faults = "; ".join(explain(fault, body) for fault in error.errors())
        raise InputError(f"recipe {source}: {faults}.") from None


def dump_config(recipe: Recipe, **facts: Mapping[str, Any]) -> bytes:
    """Return TOML with the resolved recipe, the package versions, further tables `facts`, and a checksum."""
    body = {"recipe": recipe.model_dump(mode="json"), "versions": _versions(), **facts}
    text = tomli_w.dumps(body).encode()
    return text + _SEAL_MARK + b"%08x\n" % crc32(text)


def _versions() -> dict[str, str]:
    versions = {"extremis": code_version(), "commit": commit(), "python": sys.version.split()[0]}
    for name in ("torch", "numpy", "pyarrow", "transformers", "faiss-cpu", "apache-beam"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def changed_versions(config: Mapping[str, Any]) -> str:
    """Describe how Extremis, its commit and PyTorch differ from those in a run's `config`; "" if they do not."""
    then, now = config.get("versions", {}), _versions()
    names = [name for name in ("extremis", "commit", "torch") if then.get(name, now.get(name)) != now.get(name)]
    before, after = (", ".join(f"{name} {versions.get(name)}" for name in names) for versions in (then, now))
    return f"started with {before}, resumed with {after}" if names else ""


def load_config(url: str) -> dict[str, Any]:
    """Read a run's config.toml: `recipe`, `versions`, `data`. Raises InputError if the run does not exist."""
    from schemas import storage
    from schemas.owners import describe_work

    try:
        data = storage.read_matching(lambda: storage.read_bytes(url), _matches_seal)
    except FileNotFoundError:
        if work := describe_work(url.rpartition("/")[0]):
            raise ClaimedError(f"{url}: not written yet; the run is {work}. Wait for its first checkpoint.") from None
        raise InputError(f"{url}: no run here. Start a run with `extremis run` or `extremis train`.") from None
    if not _matches_seal(data):
        raise InputError(
            f"{url}: damaged, or changed by hand: the checksum at the end of the file is missing or does not match. "
            "Restore the file; to change settings, start a new run."
        )
    return _parse(data.decode(errors="replace"), url)


def _matches_seal(data: bytes) -> bool:
    text, mark, checksum = data.rpartition(_SEAL_MARK)
    return bool(mark) and checksum.strip() == b"%08x" % crc32(text)


def recipe_names() -> list[str]:
    """List the names of the recipes that Extremis includes."""
    folder = importlib.resources.files("recipes")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _read_body(source: str) -> dict[str, Any]:
    """Read the TOML of a recipe, or of the recipe in a run's config, without rows chosen for its data."""
    if source in recipe_names():
        text = importlib.resources.files("recipes").joinpath(f"{source}.toml").read_text()
    elif source == AUTO_RECIPE:
        raise InputError("auto is not a recipe, but chooses a recipe for your data. Run `extremis run auto DATA RUN`.")
    elif not source.endswith(".toml"):
        known = [AUTO_RECIPE, *recipe_names()]
        near = difflib.get_close_matches(source, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"unknown recipe {source!r}: expected one of {', '.join(known)}, or a path that ends in .toml.{hint}"
        )
    else:
        from schemas import storage  # a named recipe needs no Arrow or fsspec, so a typo is reported quickly

        try:
            text = storage.read_bytes(source).decode()
        except FileNotFoundError:
            raise InputError(f"recipe {source}: file not found. Check the path.") from None
        except UnicodeDecodeError as error:
            raise InputError(f"recipe {source}: not UTF-8 text ({error}).") from None
    body = _parse(text, source)
    if "versions" in body and isinstance(body.get("recipe"), dict):
        body = body["recipe"]
        scored = body.get("validation")
        if isinstance(scored, dict) and (scored.get("parts") or not scored.get("split")):
            body["validation"] = {name: scored[name] for name in scored.keys() - {"split", "parts"}}
    _open_modules(body, source)
    return body


def _open_modules(body: Mapping[str, Any], source: str) -> None:
    """Open the method and the loss that a recipe names as "module:name", beside its file or on Python's path."""
    loss = body.get("loss")
    names = {"method": body.get("method"), "loss.kind": loss.get("kind") if isinstance(loss, dict) else None}
    bases: dict[str, type[Options]] = {"method": Recipe, "loss.kind": LossSection}
    for key, name in names.items():
        if isinstance(name, str) and ":" in name:
            stated = f"recipe {source}: {key} = {name!r}"
            named = open_named(name, os.path.dirname(os.path.expanduser(source)), stated).object
            options = getattr(named, "section", named)
            if not (isinstance(options, type) and issubclass(options, bases[key])):
                raise InputError(f"{stated} is {named!r}, expected a {bases[key].__name__}.")


def _parse(text: str, source: str) -> dict[str, Any]:
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{source}: {len(text):,} characters; expected at most {MAX_CHARACTERS:,}. Is it a recipe?")
    try:
        body = tomllib.loads(text)
    except RecursionError:
        raise InputError(f"{source}: nested deeper than {MAX_DEPTH} levels. Is it a recipe?") from None
    except ValueError as error:  # also for a number with thousands of digits
        raise InputError(f"{source}: not TOML: {error}. Fix the file.") from None
    _check_depth(body, source)
    return body


def _check_depth(value: Any, source: str, left: int = MAX_DEPTH) -> None:
    """Raise InputError if tables and lists are nested more deeply than MAX_DEPTH."""
    if not left:
        raise InputError(f"{source}: nested deeper than {MAX_DEPTH} levels. Is it a recipe?")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(inner, source, left - 1)


def _override(body: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"{option('set')} {override!r}: expected section.key=value, for example train.epochs=10.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value  # a bare word is a string
    _check_depth(parsed, f"{option('set')} {path}")
    if len(keys) > MAX_DEPTH:
        raise InputError(f"{option('set')}: a key with {len(keys):,} parts; expected section.key=value.")
    for key in keys[:-1]:
        body = body.setdefault(key, {})
        if not isinstance(body, dict):
            raise InputError(f"{option('set')} {override!r}: {key!r} is a value, not a section.")
    body[keys[-1]] = parsed
