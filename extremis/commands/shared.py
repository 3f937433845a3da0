"""Types of parameters that several commands share, with help texts."""

import json
import re
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Annotated, Any, Literal

from extremis.command import Option, comma_list


def _device(text: str) -> str:
    from schemas.options import DEVICES

    if not re.match(DEVICES, text):
        raise ValueError("auto, cpu, cuda, or a GPU's number, such as cuda:1")
    return text


def _step(text: str) -> int | str:
    if text != "newest" and not text.isdigit():
        raise ValueError("a number, or newest")
    return text if text == "newest" else int(text)


def _recipe_names() -> list[str]:
    from trainer.config.load import AUTO_RECIPE, recipe_names

    return [AUTO_RECIPE, *recipe_names()]


DEVICE = Option(metavar="auto|cpu|cuda|cuda:N", parse=_device)

Place = str | PathLike[str]  # a file, a directory, or an object-store prefix
Url = Annotated[Place, Option(metavar="URL")]
Recipe = Annotated[Place, Option("A recipe's name or TOML file.", names=_recipe_names)]
Positive = Annotated[int, Option(ge=1)]
NotNegative = Annotated[int, Option(ge=0)]
_STEP = "Step of the checkpoint. Default: the step of the newest fusion, else the best on validation, else the newest."
Step = Annotated[int | str, Option(_STEP, metavar="N|newest", parse=_step)]
Device = Annotated[str, DEVICE, Option("Device to use. Default: auto, which takes a GPU if the machine has one.")]
Size = Annotated[str, Option(metavar="SIZE")]  # "8GiB"
Fields = Annotated[Mapping[str, str] | str, Option(metavar="NAME=NAME,...")]  # {"key": "id"}, or "key=id"
Text = Literal["title+content", "title"]
# {"train.epochs": 5}, or ["train.epochs=5"]
Settings = Annotated[
    Mapping[str, Any] | Sequence[str],
    Option("Change the recipe, e.g. train.epochs=5.", metavar="KEY=VALUE", repeated=True),
]
StartTimeout = Annotated[
    float,
    Option(
        "Seconds to wait for an answer from the Flink or Spark workers before the job starts. Default: 60. 0: do "
        "not wait.",
        ge=0,
    ),
]
BeamOptions = Annotated[Sequence[str], Option("Options for Beam, which follow -- on the command line.")]
Names = Annotated[
    Sequence[str],
    Option(metavar="NAME,...", parse=comma_list(str, "comma-separated names, for example astra,renee")),
]


def with_settings(changes: Sequence[str], **settings: Any) -> tuple[str, ...]:
    """Return the changes to a recipe, including the changes that other options make; None: option not given."""
    stated = {key.replace("__", "."): value for key, value in settings.items() if value is not None}
    return (*changes, *(f"{key}={json.dumps(value)}" for key, value in stated.items()))
