"""`extremis vectors` writes an export to one Parquet file of keys and vectors, for vector databases."""

from dataclasses import dataclass
from os import fspath

from extremis.console import say
from extremis.function import Place, Progress, function
from extremis.result import Result

_ROWS = 1 << 16  # in memory at once


@dataclass(frozen=True, repr=False, kw_only=True)
class VectorsResult(Result):
    out: str
    labels: int


@function
def vectors(export: Place, out: Place, *, progress: Progress = True) -> VectorsResult:
    """Write the key and the vector of each label of EXPORT to OUT, a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from schemas import storage
    from scoring.exported import Exported

    exported = Exported.open(fspath(export), exact=True)
    keys, rows = exported.label_table(("key",))["key"].combine_chunks(), exported.serving.vectors
    schema = pa.schema({"key": keys.type, "vector": pa.list_(pa.float32(), rows.shape[1])})
    with storage.writing(fspath(out)) as path, pq.ParquetWriter(path, schema) as file:
        for start in range(0, len(rows), _ROWS):
            values = pa.array(rows[start : start + _ROWS].astype("float32").ravel())
            block = pa.FixedSizeListArray.from_arrays(values, rows.shape[1])
            file.write_table(pa.table([keys[start : start + _ROWS], block], schema=schema))
    say(f"{fspath(out)}: {len(rows):,} vectors")
    return VectorsResult(out=fspath(out), labels=len(rows))
