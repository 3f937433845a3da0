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
    from extremis.commands.ablate import ablate
    from extremis.commands.cluster import cluster
    from extremis.commands.data import data
    from extremis.commands.demo import demo
    from extremis.commands.embed import embed
    from extremis.commands.evaluate import evaluate
    from extremis.commands.export import export
    from extremis.commands.fuse import fuse
    from extremis.commands.inspect import inspect
    from extremis.commands.mine import mine
    from extremis.commands.plan import plan
    from extremis.commands.predict import predict
    from extremis.commands.recipes import recipes
    from extremis.commands.report import report
    from extremis.commands.run import run
    from extremis.commands.shard import shard
    from extremis.commands.train import train
    from extremis.console import Event
    from extremis.model import Label, Labels, Model, Prediction, Predictions, load
    from extremis.result import Result
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

# Commands, and the step of the loop that each is for.
COMMANDS = {
    "shard": "Data",
    "data": "Data",
    "run": "Train",
    "train": "Train",
    "mine": "Train",
    "cluster": "Train",
    "recipes": "Train",
    "plan": "Train",
    "evaluate": "Look",
    "report": "Look",
    "inspect": "Look",
    "ablate": "Look",
    "fuse": "Look",
    "export": "Use",
    "predict": "Use",
    "embed": "Use",
    "demo": "Try",
}

_PLACES = {
    **dict.fromkeys(("Label", "Labels", "Model", "Prediction", "Predictions", "load"), "extremis.model"),
    **dict.fromkeys(("ExtremisError", "InputError", "StorageError", "TableError"), "schemas.errors"),
    "Event": "extremis.console",
    "Result": "extremis.result",
}  # a command's module has its name


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public are {', '.join(__all__)}")
    if name == "version":
        value: Any = importlib.import_module("schemas.manifest").code_version
    else:
        value = getattr(importlib.import_module(_PLACES.get(name, f"extremis.commands.{name}")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
