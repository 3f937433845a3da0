"""Extreme classification: predict labels out of millions, from Python (docs/python.md) or from the command line.

    extremis.shard("raw/", "data/")
    extremis.run("auto", "data/", "runs/1", minutes=10)
    extremis.export("data/", "runs/1", "exported/")
    extremis.load("exported/").predict(["a ship in a storm"], k=5)

The import loads only this file and a check of the installation. The rest is loaded when a name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from extremis.installation import require_own_packages

require_own_packages()

if TYPE_CHECKING:  # for type checkers; the code below loads the same names on first use
    from extremis.commands.ablate import ablate as ablate
    from extremis.commands.cluster import cluster as cluster
    from extremis.commands.data import data as data
    from extremis.commands.demo import demo as demo
    from extremis.commands.embed import embed as embed
    from extremis.commands.evaluate import evaluate as evaluate
    from extremis.commands.export import export as export
    from extremis.commands.fuse import fuse as fuse
    from extremis.commands.inspect import inspect as inspect
    from extremis.commands.merge import merge as merge
    from extremis.commands.mine import mine as mine
    from extremis.commands.plan import plan as plan
    from extremis.commands.predict import predict as predict
    from extremis.commands.recipes import recipes as recipes
    from extremis.commands.report import report as report
    from extremis.commands.run import run as run
    from extremis.commands.shard import shard as shard
    from extremis.commands.teach import teach as teach
    from extremis.commands.train import train as train
    from extremis.commands.tuples import tuples as tuples
    from extremis.console import Event as Event
    from extremis.loading import Model as Model
    from extremis.loading import load as load
    from extremis.result import Result as Result
    from schemas.errors import ExtremisError as ExtremisError
    from schemas.errors import InputError as InputError
    from schemas.errors import StorageError as StorageError
    from schemas.errors import TableError as TableError
    from schemas.manifest import code_version
    from scoring.predict import Label as Label
    from scoring.predict import Labels as Labels
    from scoring.predict import Prediction as Prediction
    from scoring.predict import Predictions as Predictions
    from scoring.tuples import TupleStream as TupleStream

    version = code_version

# Commands, each with its step of the loop.
COMMANDS = {
    "shard": "Data",
    "data": "Data",
    "run": "Train",
    "train": "Train",
    "mine": "Train",
    "merge": "Train",
    "teach": "Train",
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
    "tuples": "Use",
    "embed": "Use",
    "demo": "Try",
}

_PLACES = {
    **dict.fromkeys(("Label", "Labels", "Prediction", "Predictions"), "scoring.predict"),
    **dict.fromkeys(("Model", "load"), "extremis.loading"),
    **dict.fromkeys(("ExtremisError", "InputError", "StorageError", "TableError"), "schemas.errors"),
    "Event": "extremis.console",
    "Result": "extremis.result",
    "TupleStream": "scoring.tuples",
    "version": "schemas.manifest",
}  # the module of a command has the command's name
__all__ = sorted([*COMMANDS, *_PLACES])


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    module = importlib.import_module(_PLACES.get(name, f"extremis.commands.{name}"))
    value = getattr(module, "code_version" if name == "version" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
