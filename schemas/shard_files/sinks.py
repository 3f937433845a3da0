"""Kinds of shard files: the module of each kind, by its --sink name."""

from typing import Annotated

from pydantic import AfterValidator

# A module has EXTENSION, write_shard and open_shard; open_shard returns an OpenShard.
SINKS = {
    "parquet": "schemas.shard_files.parquet",
    "webdataset": "schemas.shard_files.webdataset",
}


def _require_sink(name: str) -> str:
    if name not in SINKS:
        raise ValueError(f"sink = {name!r}: expected one of {', '.join(map(repr, SINKS))}")
    return name


Sink = Annotated[str, AfterValidator(_require_sink)]
