"""The command that makes a data set, from what its manifest records."""

import shlex
from typing import Any

from pipelines.options import ShardOptions
from schemas.manifest import Manifest
from schemas.version import Version

_OF_A_VERSION = ("shards", "shard_bytes", "max_reject_share", "format", "fields", "sink")  # others are those before
_PROPENSITY = ("propensity_a", "propensity_b")  # one flag
_DIRECTORY = "directory:"  # before the digest of a tokenizer that was read from one


def sharding_command(url: str, data: Manifest) -> str:
    """Return the `extremis shard` command that makes DATA at `url`.

    No manifest keeps where its input was: INPUT stands for that place, DATA1 for that of the version before, and
    TOKENIZER for a tokenizer's directory.
    """
    options, version = data.parameters["options"], Version.of(data)
    words = ["extremis", "shard", "INPUT", shlex.quote(url)]
    if version.onto is not None:
        options = {name: options[name] for name in _OF_A_VERSION}
        options |= {name: version.choices.get(name) for name in ("again", "labels")}
        words += ["--onto", "DATA1", "--part", shlex.quote(version.part)]
    a, b = (options.get(name) for name in _PROPENSITY)
    if a is not None:
        words += ["--propensity", f"{a},{b}"]
    for name, option in ShardOptions.model_fields.items():
        value = options.get(name)
        if name not in _PROPENSITY and value not in (None, option.default):
            words += ["--" + (option.alias or name).replace("_", "-"), *_typed(value)]
    return " ".join(words)


def _typed(value: Any) -> list[str]:
    """Return what is typed behind an option; nothing where the option says it all."""
    if value is True:
        return []
    return ["TOKENIZER" if str(value).startswith(_DIRECTORY) else shlex.quote(str(value))]
