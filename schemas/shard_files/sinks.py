"""Kinds of shard files: the modules that write and open them, by the names that --sink takes."""

# A module has EXTENSION, write_shard and open_shard; open_shard returns an OpenShard.
SINKS = {
    "parquet": "schemas.shard_files.parquet",
    "webdataset": "schemas.shard_files.webdataset",
}
