"""Comparison of two checkouts' outputs of a step: files by bytes, files with times or versions value by value."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomllib

# Values that depend on a clock or the machine, or that name the code and not its results.
VOLATILE = (
    *("seconds", "rows_per_second", "peak_bytes", "estimated_bytes"),
    *("code_version", "commit", "seal", "versions", "kernels"),
)
SKIPPED = ("spent.json", "profile.json", ".claim.json", "failed", "run.log")
PARSED = (".json", ".toml", ".out")
PAPER_RECIPES = re.compile(r'[^\s"]*/papers/\w+/([\w-]+)\.toml')  # a recipe that one side may ship under a name


@dataclass
class Comparison:
    """Counts of compared items, and a line per difference; options of only one side are kept separately."""

    files: int = 0
    values: int = 0
    differences: list[str] = field(default_factory=list)
    one_sided: set[str] = field(default_factory=set)


def compare_step(other: Path, this: Path, name: str) -> Comparison:
    """Compare the folders of step `name` in both outputs."""
    result = Comparison()
    there, here = (_files(folder / name) for folder in (other, this))
    for path in sorted(there.keys() ^ here.keys()):
        result.differences.append(f"{name}/{path}: only {'there' if path in there else 'here'}")
    for path in sorted(there.keys() & here.keys()):
        _compare_files(there[path], here[path], f"{name}/{path}", result)
    return result


def _files(folder: Path) -> dict[str, Path]:
    """Return the files to compare, by path in `folder`; a leading `_` is ignored, because older checkouts have none."""
    files = (path for path in folder.rglob("*") if path.is_file())
    compared = [path for path in files if path.name not in SKIPPED and path.suffix != ".err"]
    return {str(path.relative_to(folder).parent / path.name.removeprefix("_")): path for path in compared}


def _compare_files(other: Path, this: Path, name: str, result: Comparison) -> None:
    result.files += 1
    if this.suffix not in PARSED and this.name != "metrics.jsonl" and this.suffix != ".npz":
        result.values += 1
        if _digest(other) != _digest(this):
            result.differences.append(f"{name}: bytes differ")
        return
    before, after = _values(other), _values(this)
    for key in sorted(before.keys() ^ after.keys()):
        line = f"{key} only {'there' if key in before else 'here'}"
        if this.suffix == ".toml" or ".recipe." in key:  # an option that one side lacks
            result.one_sided.add(f"{this.name}: {line}")
        else:
            result.differences.append(f"{name}: {line}")
    for key in before.keys() & after.keys():
        result.values += 1
        if before[key] != after[key]:
            result.differences.append(f"{name}: {key}: {before[key]} there, {after[key]} here")


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _values(path: Path) -> dict[str, str]:
    """Return the file's values as text, by position in the file, without values that depend on a clock."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as arrays:
            return {name: hashlib.sha256(arrays[name].tobytes()).hexdigest() for name in arrays.files}
    text = PAPER_RECIPES.sub(r"\1", path.read_text())
    if path.suffix == ".toml":
        return _flatten(tomllib.loads(text))
    if path.suffix == ".json":
        body = json.loads(text)
        if isinstance(body, dict) and body.get("kind") == "export":
            del body["digest"]  # also covers the recipe's options, which are compared one by one
        if path.name == "commands.json":
            body.pop("crc32", None)  # covers the commands, also a recipe's path
        return _flatten(body)
    if path.suffix == ".out":  # standard output: compare the object on the last line
        body = json.loads(text.splitlines()[-1]) if text else {}
        return _flatten({key: body[key] for key in body if key != "digest"})  # it is also in the manifest
    return _flatten(dict(enumerate(map(json.loads, text.splitlines()))))


def _flatten(value: Any, place: str = "") -> dict[str, str]:
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items() if not str(key).startswith(VOLATILE)]
    elif isinstance(value, list):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return {place: json.dumps(value)}
    values = {place: str(len(items))} if not items else {}
    for key, item in items:
        values.update(_flatten(item, f"{place}.{key}" if place else key))
    return values
