"""Files of examples: JSON lines, compressed according to the file name, or a table of Parquet shards."""

from collections.abc import Callable

import orjson
import pyarrow as pa

from schemas import storage
from schemas.errors import InputError
from schemas.manifest import Manifest, columns_of
from schemas.owners.build import building, clean_up
from schemas.owners.outputs import require_output_file, require_output_folder
from schemas.reuse import Request, find_reusable
from schemas.shard_files.parquet import writing_shard
from trainer.tuples.stream import TupleStream

KIND, _DOING = "tuples", "handed over"
_ENDS = {".jsonl": None, ".json": None, ".jsonl.gz": "gzip", ".jsonl.bz2": "bz2", ".jsonl.zst": "zstd"}
_SHARD = 1_000_000  # maximum number of examples in a shard, if the number of shards is not stated
_REMEDY = "Give --overwrite to replace it, or another OUT."


def is_file(out: str) -> bool:
    """Return whether `out` is a file of JSON lines. Raises InputError for an unsupported type of file."""
    if out.endswith((".parquet", ".csv", ".tsv", ".arrow", ".npz", ".gz", ".zst")) and not out.endswith((*_ENDS,)):
        raise InputError(f"{out}: expected a file that ends in {', '.join(_ENDS)}, or a folder for Parquet shards.")
    return out.endswith((*_ENDS,))


def write_tuples(
    stream: TupleStream,
    out: str,
    shuffle: bool = False,
    shards: int | None = None,
    overwrite: bool = False,
    on_examples: Callable[[int], None] = lambda examples: None,
) -> Manifest | None:
    """Write the stream's current epoch to `out`, a file of JSON lines or a table; return the manifest of a table.

    Examples are in the order of the table's rows, or shuffled. Files and tables are published when complete; if a table
    of the same input exists, its manifest is returned. `on_examples(number)` is called with the number of examples
    written. Raises InputError if OUT has other contents; StorageError.
    """
    tables = stream.tables
    reads = [tables.place, tables.data]
    if is_file(out):
        if shards is not None:
            raise InputError("--shards works only with a folder, but OUT is a file of JSON lines. Leave --shards out.")
        require_output_file(out, reads, _REMEDY, overwrite)
        end = next(end for end in _ENDS if out.endswith(end))
        with storage.writing(out) as path, pa.output_stream(path, compression=_ENDS[end]) as file:
            for examples in stream.blocks(shuffle):
                file.write(b"".join(orjson.dumps(example) + b"\n" for example in examples.to_pylist()))
                on_examples(examples.num_rows)
        return None
    require_output_folder(out, _DOING, reads)
    rows, left_out = stream.counted
    count = min(rows, shards or -(-rows // _SHARD))
    order = {"shuffle": shuffle, "epoch": stream.state_dict()["epoch"], "shards": count}
    request = Request(KIND, tables.digests, {**stream.options.model_dump(), **order})
    finished = find_reusable(out, request, _REMEDY, overwrite=overwrite)
    if finished is not None:
        clean_up(out, _DOING)
        return finished
    group = 1024 if rows < 1_000_000 else 8192
    with building(out, _DOING) as build:
        entries, schema, blocks = [], stream.schema, stream.blocks(shuffle)
        rest = schema.empty_table()
        for shard in range(count):
            left = rows * (shard + 1) // count - rows * shard // count
            with writing_shard(build.url, shard, count, schema, group) as file:
                while left:
                    rest = rest if rest.num_rows else next(blocks)
                    examples, rest = rest.slice(0, left), rest.slice(left)
                    file.write(examples)
                    on_examples(examples.num_rows)
                    left -= examples.num_rows
            entries.append(file.entry)
        return build.publish(
            Manifest(
                kind=KIND,
                columns=columns_of(schema),
                shards=tuple(entries),
                rows=rows,
                row_group_rows=group,
                parents=tables.digests,
                parameters=dict(request.parameters),
                counters={"examples": rows, "rows_left_out": left_out},
            )
        )
