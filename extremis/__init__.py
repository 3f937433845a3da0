"""Extreme classification: predict labels out of millions, from Python (docs/python.md) or from the command line.

    extremis.shard("raw/", "data/")
    extremis.run("auto", "data/", "runs/1", minutes=10)
    extremis.export("data/", "runs/1", "exported/")
    extremis.load("exported/").predict(["a ship in a storm"], max_labels=5)

The import loads only this file and a check of the installation. The rest is loaded when a name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from extremis.installation import require_own_packages

require_own_packages()

if TYPE_CHECKING:  # for type checkers; the code below loads the same names on first use
    from extremis.classifier import Classifier as Classifier
    from extremis.console import Event as Event
    from extremis.result import Result as Result
    from extremis.training import TrainOptions as TrainOptions
    from extremis.training import clean as clean
    from extremis.training import cluster as cluster
    from extremis.training import data as data
    from extremis.training import merge as merge
    from extremis.training import mine as mine
    from extremis.training import plan as plan
    from extremis.training import recipes as recipes
    from extremis.training import run as run
    from extremis.training import shard as shard
    from extremis.training import status as status
    from extremis.training import teach as teach
    from extremis.training import train as train
    from extremis.using import ablate as ablate
    from extremis.using import crossval as crossval
    from extremis.using import demo as demo
    from extremis.using import embed as embed
    from extremis.using import evaluate as evaluate
    from extremis.using import explain as explain
    from extremis.using import export as export
    from extremis.using import fuse as fuse
    from extremis.using import inspect as inspect
    from extremis.using import load as load
    from extremis.using import predict as predict
    from extremis.using import report as report
    from extremis.using import serve as serve
    from extremis.using import tuples as tuples
    from pipelines.options import ArrayOptions as ArrayOptions
    from pipelines.options import ClusterOptions as ClusterOptions
    from pipelines.options import EmbedTextsOptions as EmbedTextsOptions
    from pipelines.options import MergeOptions as MergeOptions
    from pipelines.options import ShardOptions as ShardOptions
    from pipelines.options import TeachOptions as TeachOptions
    from schemas import code_version
    from schemas.errors import ExtremisError as ExtremisError
    from schemas.errors import InputError as InputError
    from schemas.errors import StorageError as StorageError
    from schemas.errors import TableError as TableError
    from scoring.decision import Decision as Decision
    from scoring.options import DecisionOptions as DecisionOptions
    from scoring.options import EvaluateOptions as EvaluateOptions
    from scoring.options import ExportOptions as ExportOptions
    from scoring.options import FitOptions as FitOptions
    from scoring.options import TupleOptions as TupleOptions
    from scoring.predict import Label as Label
    from scoring.predict import Labels as Labels
    from scoring.predict import Model as Model
    from scoring.predict import Prediction as Prediction
    from scoring.predict import Predictions as Predictions
    from scoring.tuples import TupleStream as TupleStream

    version = code_version

# Functions that are commands, each with its step of the loop and its module.
COMMANDS = {
    **dict.fromkeys(("shard", "data"), ("Data", "extremis.training")),
    **dict.fromkeys(
        ("run", "train", "mine", "merge", "teach", "cluster", "recipes", "plan"), ("Train", "extremis.training")
    ),
    "status": ("Look", "extremis.training"),
    "clean": ("Look", "extremis.training"),
    **dict.fromkeys(("evaluate", "report", "inspect", "ablate", "crossval", "fuse"), ("Look", "extremis.using")),
    **dict.fromkeys(("export", "predict", "explain", "serve", "tuples", "embed"), ("Use", "extremis.using")),
    "demo": ("Try", "extremis.using"),
}
_MODULES = {
    **{name: module for name, (_, module) in COMMANDS.items()},
    **dict.fromkeys(("Label", "Labels", "Model", "Prediction", "Predictions"), "scoring.predict"),
    **dict.fromkeys(("ExtremisError", "InputError", "StorageError", "TableError"), "schemas.errors"),
    **dict.fromkeys(
        ("ArrayOptions", "ClusterOptions", "EmbedTextsOptions", "MergeOptions", "ShardOptions", "TeachOptions"),
        "pipelines.options",
    ),
    "Classifier": "extremis.classifier",
    "Event": "extremis.console",
    "Result": "extremis.result",
    **dict.fromkeys(
        ("DecisionOptions", "EvaluateOptions", "ExportOptions", "FitOptions", "TupleOptions"), "scoring.options"
    ),
    "Decision": "scoring.decision",
    "TrainOptions": "extremis.training",
    "TupleStream": "scoring.tuples",
    "load": "extremis.using",
    "version": "schemas",
}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULES[name]), "code_version" if name == "version" else name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
