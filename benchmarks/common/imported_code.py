"""Digests of the code that a measurement's processes imported: while none has changed, the measurement is current."""

import ast
import functools
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
NOTING = ROOT / "benchmarks" / "common" / "noting"
# Modules that tell what happens, and change no figure.
REPORTING = {
    "schemas/__init__.py",  # the version
    *(f"schemas/{name}.py" for name in ("errors", "logs", "waits")),
    *(f"extremis/{name}.py" for name in ("alive", "at_work", "console", "metrics", "result", "summary")),
    "pipelines/progress.py",
    "trainer/tracking.py",
    "scoring/card.py",
    *("papers/claims.py", "papers/results.py"),  # a result states what it is made from
}
# Calls that show texts to a user: a change of these texts does not change measurements.
MESSAGE_FUNCTIONS = {
    *("say", "_say", "print", "echo", "secho", "warn", "warning", "info", "show_activity", "waiting", "Wait"),
}
SKIPPED = {"ctx", "kind", "type_comment", "type_ignores", "type_params", "returns"}  # the first five: by Python version


def noting(notes: Path) -> dict[str, str]:
    """Return an environment for processes of this checkout, which append the modules that they import to `notes`."""
    places = os.pathsep.join(filter(None, [str(NOTING), str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "NOTED_IMPORTS": str(notes), "PYTHONPATH": places}


def code_of(notes: Path) -> dict[str, str]:
    """Return digests of the noted modules by their paths, without REPORTING; for `recipes`, also of each recipe."""
    names = {*notes.read_text().split()} if notes.exists() else set[str]()
    found = {f"{name.replace('.', '/')}{end}" for name in names for end in (".py", "/__init__.py")}
    if "recipes" in names:
        found |= {str(path.relative_to(ROOT)) for path in (ROOT / "recipes").glob("*.toml")}
    return {path: digest(ROOT / path) for path in sorted(found - REPORTING) if (ROOT / path).is_file()}


def changed(code: Mapping[str, str]) -> list[str]:
    """Return the paths of code that has changed since its digests were made, without REPORTING."""
    kept = {path: ROOT / path for path in code if path not in REPORTING}
    return [path for path, place in kept.items() if not place.is_file() or digest(place) != code[path]]


def to_json(body: Mapping[str, Any]) -> str:
    """Return a report with the digests of its code on one line."""
    text = json.dumps({name: value for name, value in body.items() if name != "code"}, indent=1, ensure_ascii=False)
    return text.removesuffix("\n}") + f',\n "code": {json.dumps(body["code"])}\n}}\n'


def digest(path: Path) -> str:
    """Return the digest of the `syntax_tree` of a module, or of the content of a TOML file."""
    return _digest(path.read_text(), path.suffix == ".py")


@functools.cache
def _digest(text: str, python: bool) -> str:
    content = syntax_tree(text) if python else tomllib.loads(text)
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:8]


def syntax_tree(source: str) -> Any:
    """Return the syntax tree of a module as lists of texts, without what does not change what it computes.

    That is docstrings, messages, positions, and annotations of parameters and of what a function returns.
    """
    return _tree_of(ast.parse(source), False)


def _tree_of(node: Any, message: bool) -> Any:
    if isinstance(node, list):
        return [_tree_of(each, message) for each in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    message = message or isinstance(node, ast.Raise) or (isinstance(node, ast.keyword) and node.arg == "help")
    if isinstance(node, ast.Call):
        message = message or getattr(node.func, "attr", getattr(node.func, "id", "")) in MESSAGE_FUNCTIONS
    text = isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    if text and message:
        return "message"
    fields = {name: value for name, value in ast.iter_fields(node) if name not in SKIPPED}
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        fields["body"] = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    if isinstance(node, ast.JoinedStr):  # Python 3.12 has empty texts in f-strings
        fields["values"] = [part for part in node.values if getattr(part, "value", None) != ""]
    if isinstance(node, ast.Assert):
        fields["msg"] = None
    if isinstance(node, ast.arg):
        fields["annotation"] = None
    return [type(node).__name__, *([name, _tree_of(value, message)] for name, value in fields.items())]
