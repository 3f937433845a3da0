"""`extremis merge`: merges several tables of hard negatives."""

from collections.abc import Sequence
from os import fspath
from typing import Annotated, Any, Literal

from extremis.command import Option, Progress, build_options, comma_list, command
from extremis.commands.shared import BeamOptions, Place, StartTimeout
from extremis.console import say
from pipelines.options import MergeOptions

_TABLES = comma_list(str, "comma-separated tables")


@command(MergeOptions)
def merge(
    data: Place,
    table: Place,
    out: Place,
    *,
    others: Annotated[Sequence[str], Option(metavar="TABLE,...", parse=_TABLES)] = (),
    by: Literal["turns", "score"] | None = None,
    width: int | None = None,
    equal_texts: Literal["off", "equal", "near"] | None = None,
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
) -> dict[str, Any]:
    """Merge hard-negative tables with the same rows into one table, without repeated labels and without positives.

    Options after -- are passed to Beam.

    Options:
        others: Tables to merge with TABLE, for example a table that was mined with BM25 or with a different model.

    Example:
      extremis merge data/ negatives/ours/queries negatives/both --others negatives/bm25
    """
    options, out = build_options(MergeOptions, locals()), fspath(out)
    from pipelines.mining import derived as merging

    tables = [fspath(each) for each in (table, *others)]
    manifest = merging.merge(fspath(data), tables, out, options, beam_options, say)
    say(f"{out}: {manifest.rows:,} rows of {manifest.parameters['width']} negatives from {len(tables)} tables")
    say(f"next: extremis inspect {out}")
    return {"out": out, "digest": manifest.digest, "rows": manifest.rows, "counters": manifest.counters}
