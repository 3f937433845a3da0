"""Methods and scores from outside, which a person names as "module:name".

A module is imported only because a person names it: in a recipe's file, in an option, or in a list of what is allowed.
A name in a stored file is looked up among the names that were opened so, and never imports anything.
"""

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from schemas.errors import InputError, option


@dataclass(frozen=True)
class Named:
    """An object that was named "module:name", the file of its module, and the SHA-256 of the module's files."""

    object: Any
    file: Path
    sha256: str


_named: dict[str, Named] = {}  # what persons have named in this process


def open_named(name: str, folder: str = "", where: str = "") -> Named:
    """Import the object `name`, "module:name": the module is sought in `folder` (default: here), then on Python's path.

    `where`: what names it, for messages. A module is a file, or a folder with `__init__.py`. Raises InputError if there
    is no such module or object, if its import fails, or if another module of this name was opened before.
    """
    where = where or repr(name)
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in module.split(".")) or not attribute.isidentifier():
        raise InputError(f"{where}: expected module:name, such as mine:Mine for the class Mine in mine.py.")
    stem = Path(folder, *module.split("."))
    beside = next((file for file in (stem.with_suffix(".py"), stem / "__init__.py") if file.is_file()), None)
    file = (beside or _on_path(module, where, folder)).resolve()
    files = sorted(file.parent.rglob("*.py")) if file.name == "__init__.py" else [file]
    sha256 = hashlib.sha256(b"".join(each.read_bytes() for each in files)).hexdigest()
    known = _named.get(name)
    if known is not None and known.file != file and known.sha256 != sha256:
        raise InputError(
            f"{where} is in {file}, but in this process it was {known.file}. Rename one of the two modules, or start "
            "another process."
        )
    if known is None or (beside and known.sha256 != sha256):  # a notebook may have changed its file
        try:
            own_name = f"{module.replace('.', '_')}_{sha256[:12]}"
            found = _import_file(file, own_name) if beside else importlib.import_module(module)
        except Exception as error:
            raise InputError(f"{where}: importing {file} failed: {type(error).__name__}: {error}. Fix it.") from error
        if not hasattr(found, attribute):
            near = difflib.get_close_matches(attribute, vars(found), n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InputError(f"{where}: {file} has no {attribute!r}.{hint}")
        known = _named[name] = Named(getattr(found, attribute), file, sha256)
    return known


def opened(name: str) -> Any:
    """Return the object that a person has named `name`, in this process or in EXTREMIS_ALLOW; None if nobody has."""
    if name not in _named and name in os.environ.get("EXTREMIS_ALLOW", "").split(","):
        open_named(name, where=f"EXTREMIS_ALLOW={name}")
    return _named[name].object if name in _named else None


def find_named(name: str, place: str) -> Any:
    """Return the object `name` that the file at `place` names. Raises InputError if no person names it too."""
    if (found := opened(name)) is None:
        raise InputError(
            f"{place} needs code from outside, {name!r}, and a stored file may not choose what is imported. If you "
            f"trust this code, name it with {option('allow', name)}, or for any command in the environment: "
            f"EXTREMIS_ALLOW={name}."
        )
    return found


def digests(*names: str) -> dict[str, str]:
    """Return the SHA-256 of the module of each of `names` that is from outside."""
    return {name: _named[name].sha256 for name in names if name in _named}


def name_of(kind: type) -> str:
    """Return the name under which a person has named a class."""
    return next(name for name, named in _named.items() if named.object is kind)


def _on_path(module: str, where: str, folder: str) -> Path:
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:  # of a package above it
        spec = None
    if spec is None or not spec.origin or not spec.has_location:
        raise InputError(
            f"{where}: no module {module!r} in {os.path.abspath(folder)} or on Python's path. Put {module}.py there, "
            "or add its folder to PYTHONPATH."
        )
    return Path(spec.origin)


def _import_file(file: Path, name: str) -> ModuleType:
    """Import a file under a `name` of its own, so that it replaces no module of the same name on Python's path."""
    if name not in sys.modules:
        folders = [str(file.parent)] if file.name == "__init__.py" else None
        spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
