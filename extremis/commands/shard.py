"""`extremis shard`: turns raw data, or data in Python, into tables."""

import contextlib
import re
import tempfile
from collections.abc import Iterator, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from extremis.command import Option, Progress, build_options, comma_list, command
from extremis.commands.shared import BeamOptions, Fields, Place, StartTimeout, Text
from extremis.console import say
from extremis.objects import items_of, require_texts
from pipelines.options import Again, ShardOptions
from schemas.errors import ExtremisError, InputError
from schemas.shard_files.sinks import SINKS

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS = "rows as dictionaries (text, label or labels) or as pairs of text and label, a data frame or a table"
_ROW = r"\b(\w+)(?:/data)?-\d+-of-\d+\.arrow, line ([\d,]+)"  # of a file that `input_url` writes
_SPLITS = ("train", "val", "validation", "dev", "test", "labels")


def _forms() -> list[str]:
    from pipelines.formats import FORMATS

    return [form.name for form in FORMATS]


_pair = comma_list(float, "two numbers A,B, for example 0.55,1.5", count=2)


@command(ShardOptions)
def shard(
    input: Any,
    data: Place,
    *,
    tokenizer: Place | None = None,
    max_tokens: int | None = None,
    text: Text | None = None,
    propensity: Annotated[tuple[float, float] | None, Option(metavar="A,B", parse=_pair)] = None,
    shards: int | None = None,
    shard_bytes: int | None = None,
    row_group_rows: int | None = None,
    validation: float | None = None,
    test: float | None = None,
    embed: Annotated[Place | None, Option(metavar="MODEL")] = None,
    keep_text: bool = False,
    max_reject_share: float | None = None,
    tokenizer_texts: int | None = None,
    format: Annotated[str | None, Option(metavar="FORM", names=_forms)] = None,
    fields: Fields | None = None,
    sink: Annotated[str | None, Option(names=lambda: SINKS)] = None,
    onto: Annotated[Place | None, Option(metavar="DATA1")] = None,
    part: Annotated[str | None, Option(metavar="NAME")] = None,
    again: Again | None = None,
    labels: Literal["all", "new"] | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
) -> dict[str, Any]:
    """Tokenize and shard raw data from INPUT to DATA.

    INPUT is a folder or URL with files in a format from docs/formats.md, or a pattern such as raw/*-2024.jsonl.
    In Python, INPUT may also be rows (dictionaries, or pairs of text and label), an Arrow table, a pandas data frame or
    a Hugging Face data set, or a dictionary with one of these for each split ("train", "test", "labels").
    Unusable rows go to DATA/rejects. Rows with an empty text are kept; rows without a text are rejected. Options after
    -- are passed to Beam. By default, shard uses all cores of this machine.

    Options:
        propensity: Propensity constants, e.g. 0.55,1.5. Default: none, so that there are no PSP metrics.
        overwrite: Replace any finished data set, and start from the beginning.

    Examples:
      extremis shard examples/tate/ data/ --propensity 0.55,1.5
      extremis shard queries/ data/ --format jsonl --fields key=id,text=query,labels=positives
      extremis shard raw/2026-11-20/ data/2026-11-20/ --onto data/2026-11-19/ --part 2026-11-20
      extremis shard raw/ data/ --embed sentence-transformers/all-MiniLM-L6-v2
      extremis shard s3://bucket/raw s3://bucket/data -- --runner=FlinkRunner --flink_master=host:8081
    """
    a, b = propensity or (None, None)
    options = build_options(ShardOptions, {**locals(), "propensity_a": a, "propensity_b": b})
    from extremis.inspecting.data_summary import summarize, summary_lines
    from pipelines import shard as sharding

    data = fspath(data)
    with input_url(input) as url:
        manifest = sharding.shard(url, data, options, beam_options, say, overwrite=overwrite)
    summary = summarize(data)
    for line in summary_lines(data, summary):
        say(line)
    say(f"next: extremis run auto {data} RUN")
    facts = {"data": data, "digest": manifest.digest, "tables": manifest.parents}
    return {**facts, **manifest.parameters, "summary": summary}


@contextlib.contextmanager
def input_url(data: Any, expected: str = _ROWS) -> Iterator[str]:
    """Yield a URL to read `data` from: a path or URL unchanged, else a folder that exists until the block ends.

    data: rows (dictionaries, or pairs of text and label), an Arrow table, a pandas data frame, a Hugging Face data set,
    or one of these per split: {"train": …, "test": …, "labels": …}. Raises InputError for anything but `expected`.
    """
    if isinstance(data, str | PathLike):
        yield str(data)
        return
    with tempfile.TemporaryDirectory(prefix="extremis-input-") as folder:
        if hasattr(data, "save_to_disk"):
            data.save_to_disk(folder)
        else:
            splits = data if isinstance(data, Mapping) else {"train": data}
            if not {*splits} <= {*_SPLITS, "texts"}:
                names = ", ".join(map(str, splits))
                raise InputError(f"input: expected splits among {', '.join(_SPLITS)}, got {names}.")
            for name, rows in splits.items():
                _write(Path(folder) / name, rows, expected)
        try:
            yield folder
        except ExtremisError as error:  # names what the caller has: rows, not files
            said = str(error).replace(f"{folder}/", "").replace(folder, "input")
            error.args = (re.sub(_ROW, lambda row: f"{row[1]}[{int(row[2].replace(',', '')) - 1}]", said),)
            raise


def _write(folder: Path, rows: Any, expected: str) -> None:
    if hasattr(rows, "save_to_disk") and not isinstance(rows, Mapping):
        rows.save_to_disk(str(folder))
        return
    import pyarrow as pa

    folder.mkdir()
    table = _table(rows, expected)
    with pa.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as writer:
        writer.write_table(table)


def _table(rows: Any, expected: str) -> "pa.Table":
    """Convert `rows` to a table. Raises InputError."""
    import pyarrow as pa

    listed = items_of(rows)
    try:
        if listed is None and hasattr(rows, "iloc"):
            return pa.Table.from_pandas(rows, preserve_index=False)
        if listed is None:
            return pa.table(None if isinstance(rows, Mapping) else rows)
        if not listed or any(isinstance(row, str) for row in listed):
            require_texts(listed, "input")
            return pa.table({"text": pa.array(listed, pa.string())})
        if all(isinstance(row, list | tuple) and len(row) == 2 for row in listed):
            texts, named = zip(*listed, strict=True)
            return pa.table({"text": list(texts), "label" if isinstance(named[0], str) else "labels": list(named)})
        names = dict.fromkeys(name for row in listed for name in row)  # Arrow would read the names of the first row
        return pa.table({name: [row.get(name) for row in listed] for name in names})
    except (pa.ArrowException, AttributeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200].rstrip(".")
        raise InputError(f"input: expected {expected}, got {type(rows).__name__} ({reason}).") from None
