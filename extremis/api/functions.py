"""One function a command, of its name and with its options; `help` of each lists them."""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click
from typing_extensions import Unpack

from extremis.api import options
from extremis.api.call import call, option_names
from extremis.api.objects import as_source
from extremis.api.options import Url
from extremis.api.result import Result
from extremis.cli import cli

Function = TypeVar("Function", bound=Callable[..., Result])


def _documented(function: Function) -> Function:
    """Add the options of the command of this name, with their meaning and defaults, to the docstring."""
    lines = [
        f"    {_described(name, option)}" for name, option in option_names(cli.commands[function.__name__]).items()
    ]
    progress = "    progress: True as on the command line, False for none, or a function that gets every event"
    function.__doc__ = "\n".join([f"{function.__doc__}\n\n    Options:\n", *lines, progress])
    return function


def _described(name: str, option: click.Option) -> str:
    default = "" if option.default in (None, False, ()) or callable(option.default) else f" (default: {option.default})"
    stated = default if "UNSET" not in default.upper() else ""
    return f"{name}: {(option.help or '').rstrip('.')}{stated}"


@_documented
def shard(input: Any, data: Url, **settings: Unpack[options.Shard]) -> Result:
    """Tokenize and shard raw data: `input` to `data`. Raises ExtremisError.

    input: a file, a directory or a URL; or objects: rows as dictionaries or as pairs of text and label, an Arrow table,
    a pandas frame, a Hugging Face data set, or a dictionary of these by split ("train", "test", "labels").
    """
    with as_source(input) as source:
        return call("shard", [source, data], settings, settings.pop("beam_options", ()))


@_documented
def data(action: Literal["list", "show", "drop"], place: Url, **settings: Unpack[options.Common]) -> Result:
    """List the versions of data, and exports, under `place`; show or drop the one at `place`. Raises ExtremisError."""
    return call("data", [action, place], settings)


@_documented
def run(recipe: Url, data: Url, run: Url, **settings: Unpack[options.Run]) -> Result:
    """Train `recipe` on `data` into `run`, with a miner beside; "auto" chooses a recipe. Raises ExtremisError."""
    return call("run", [recipe, data, run], settings, settings.pop("beam_options", ()))


@_documented
def train(recipe: Url, data: Url, run: Url, **settings: Unpack[options.Train]) -> Result:
    """Train `recipe` on `data` into `run`, with tables of a miner elsewhere. Raises ExtremisError."""
    return call("train", [recipe, data, run], settings)


@_documented
def mine(data: Url, run: Url, **settings: Unpack[options.Mine]) -> Result:
    """Make hard-negative tables from the dumps of `run`. Raises ExtremisError."""
    return call("mine", [data, run], settings, settings.pop("beam_options", ()))


@_documented
def cluster(data: Url, run: Url, **settings: Unpack[options.Cluster]) -> Result:
    """Publish queries in the order of balanced clusters of their embeddings. Raises ExtremisError."""
    return call("cluster", [data, run], settings, settings.pop("beam_options", ()))


@_documented
def embed(data: Url, run: Url, out: Url, **settings: Unpack[options.Embed]) -> Result:
    """Embed queries or labels with a checkpoint of `run`, aligned with their table, to `out`. Raises ExtremisError."""
    return call("embed", [data, run, out], settings, settings.pop("beam_options", ()))


@_documented
def evaluate(data: Url, run: Url, **settings: Unpack[options.Evaluate]) -> Result:
    """Score a checkpoint of `run` on a split of `data`: `metrics`, and their 95 % `intervals`. Raises ExtremisError."""
    return call("evaluate", [data, run], settings)


@_documented
def fuse(data: Url, run: Url, **settings: Unpack[options.Fuse]) -> Result:
    """Learn to add other scores to those of the vectors of `run`. Raises ExtremisError."""
    return call("fuse", [data, run], settings)


@_documented
def export(data: Url, run: Url, out: Url, **settings: Unpack[options.Export]) -> Result:
    """Export a checkpoint of `run` to `out`, for `extremis.load` and `extremis.predict`. Raises ExtremisError."""
    return call("export", [data, run, out], settings)


@_documented
def predict(export: Url, *places: Url, **settings: Unpack[options.Predict]) -> Result:
    """Predict with `export` for the texts of a file: `places` are the input and out, or out alone with `data`.

    For texts at hand there is `extremis.load(export).predict(texts)`. Raises ExtremisError.
    """
    return call("predict", [export, *places], settings)


@_documented
def inspect(url: Url, **settings: Unpack[options.Inspect]) -> Result:
    """Describe the table, DATA or RUN at `url`. Raises ExtremisError."""
    return call("inspect", [url], settings)


@_documented
def report(*urls: Url, **settings: Unpack[options.Report]) -> Result:
    """Write one HTML page about runs: `urls` are a DATA, if it is to be in it, and runs. Raises ExtremisError."""
    return call("report", [*urls], settings)


@_documented
def plan(**settings: Unpack[options.Plan]) -> Result:
    """Estimate bytes, memory and hours of a run before it is started. Raises ExtremisError."""
    return call("plan", [], settings)


@_documented
def recipes(
    action: Literal["list", "show", "copy", "validate"] = "list",
    recipe: Url | None = None,
    out: Url | None = None,
    **settings: Unpack[options.Recipes],
) -> Result:
    """List the recipes that ship with Extremis, and what each states; or show, copy or validate one."""
    return call("recipes", [action, *(place for place in (recipe, out) if place is not None)], settings)


@_documented
def ablate(data: Url, out: Url, **settings: Unpack[options.Ablate]) -> Result:
    """Train several recipes on `data` under `out` and compare them. Raises ExtremisError."""
    return call("ablate", [data, out], settings)


@_documented
def demo(folder: Url = "demo", **settings: Unpack[options.Demo]) -> Result:
    """Run the whole loop on the Tate collection into `folder`. Raises ExtremisError."""
    return call("demo", [folder], settings)
