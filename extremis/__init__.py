"""Extreme classification: data to labels out of millions, as functions (docs/python.md) and as a command line.

    extremis.shard("raw/", "data/")
    extremis.run("auto", "data/", "runs/1", minutes=10)
    extremis.export("data/", "runs/1", "exported/")
    extremis.load("exported/").predict(["a ship in a storm"], k=5)

Nothing but this file and a check of the installation is loaded before the first use of a name.
"""

import importlib
from typing import TYPE_CHECKING, Any

from extremis.installation import require_ours

require_ours()

if TYPE_CHECKING:
    from extremis.api.functions import (
        ablate,
        cluster,
        data,
        demo,
        embed,
        evaluate,
        export,
        fuse,
        inspect,
        mine,
        plan,
        predict,
        recipes,
        report,
        run,
        shard,
        train,
    )
    from extremis.api.model import Label, Labels, Model, Prediction, Predictions, load
    from extremis.api.result import Result
    from extremis.console import Event
    from schemas.errors import ExtremisError, InputError, StorageError, TableError
    from schemas.manifest import code_version as version

__all__ = [
    "Event",
    "ExtremisError",
    "InputError",
    "Label",
    "Labels",
    "Model",
    "Prediction",
    "Predictions",
    "Result",
    "StorageError",
    "TableError",
    "ablate",
    "cluster",
    "data",
    "demo",
    "embed",
    "evaluate",
    "export",
    "fuse",
    "inspect",
    "load",
    "mine",
    "plan",
    "predict",
    "recipes",
    "report",
    "run",
    "shard",
    "train",
    "version",
]

_MODEL = ("Label", "Labels", "Model", "Prediction", "Predictions", "load")
_ERRORS = ("ExtremisError", "InputError", "StorageError", "TableError")
_PLACES = {
    **dict.fromkeys(_MODEL, "extremis.api.model"),
    **dict.fromkeys(_ERRORS, "schemas.errors"),
    "Event": "extremis.console",
    "Result": "extremis.api.result",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public are {', '.join(__all__)}")
    if name == "version":
        value: Any = importlib.import_module("schemas.manifest").code_version
    else:
        value = getattr(importlib.import_module(_PLACES.get(name, "extremis.api.functions")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
