"""`extremis shard`: turns raw data, or data in Python, into tables."""

from os import fspath
from typing import Annotated, Any, Literal

from extremis.command import Option, Progress, build_options, comma_list, command
from extremis.commands.shared import BeamOptions, Fields, Place, StartTimeout, Text
from extremis.console import say
from pipelines.options import Again, SameKey, ShardOptions
from schemas.options import SINKS
from scoring.containers import input_url


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
    same_key: SameKey | None = None,
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

    INPUT is a folder or URL with files in a format from docs/formats.md, or a pattern such as raw/*-2024.jsonl: * and ?
    are wildcards unless a file or folder has exactly this name.
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
    from extremis.summary import summarize, summary_lines
    from pipelines import shard as sharding

    data = fspath(data)
    with input_url(input) as url:
        manifest = sharding.shard(url, data, options, beam_options, say, overwrite=overwrite)
    summary = summarize(data)
    for line in summary_lines(data, summary):
        say(line)
    say(f"next: extremis run auto {data} {'RUN' if onto is None else 'RUN2 --from RUN1'}")
    facts = {"data": data, "digest": manifest.digest, "tables": manifest.parents}
    return {**facts, **manifest.parameters, "summary": summary}
