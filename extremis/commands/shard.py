"""`extremis shard`."""

import contextlib
from typing import Any

import click

from extremis.commands.options import (
    NOT_NEGATIVE,
    POSITIVE,
    beam_tail,
    comma_list,
    fields_option,
    output_options,
    text_option,
)
from extremis.console import say
from schemas.shard_files.sinks import SINKS


class _FormOption(click.Option):
    """Option that names an input form. Its help lists the forms, which are imported for it alone."""

    def get_help_record(self, context: click.Context) -> tuple[str, str] | None:
        with contextlib.suppress(ImportError):  # an installation without pipelines
            from pipelines.formats import FORMATS

            self.help = f"Form of INPUT: {', '.join(form.name for form in FORMATS)}. Default: detected."
        return super().get_help_record(context)


@click.command()
@click.argument("source", metavar="INPUT")
@click.argument("data")
@click.option("--tokenizer", default="train:30000", help="train:SIZE, a directory, or a hub name.")
@click.option(
    "--max-tokens", type=POSITIVE, help="Tokens kept of a text. Default: 128, up to 512 where texts are longer."
)
@text_option
@click.option(
    "--propensity",
    type=comma_list(float, "two numbers A,B, for example 0.55,1.5", count=2),
    metavar="A,B",
    help="Propensity constants, e.g. 0.55,1.5. Default: unknown, and no PSP metrics.",
)
@click.option("--shards", type=POSITIVE, help="Shards of each split. Default: from --shard-bytes.")
@click.option("--shard-bytes", type=POSITIVE, default=128 << 20, help="Approximate bytes per shard.")
@click.option("--row-group-rows", type=POSITIVE, help="Rows per row group. Default: from the number of rows.")
@click.option(
    "--validation", "validation_share", type=float, default=0.0, help="Share of train to cut out as split val."
)
@click.option("--test", "test_share", type=float, default=0.0, help="Share of train to cut out as split test.")
@click.option("--keep-text", is_flag=True, help="Store the queries' text beside their tokens.")
@click.option(
    "--max-reject-share",
    type=float,
    default=0.001,
    help="Share of a table's rows, and of its label mentions, that may be rejected.",
)
@click.option(
    "--tokenizer-texts",
    type=POSITIVE,
    default=200_000,
    help="Number of texts that train:SIZE learns from, chosen by the hash of their keys.",
)
@click.option("--format", metavar="FORM", cls=_FormOption, help="Form of INPUT. Default: detected.")
@fields_option
@click.option(
    "--sink",
    type=click.Choice(list(SINKS)),
    default="parquet",
    help="Files of the queries. Parquet is small and fast; webdataset makes tars that the stock library reads.",
)
@click.option(
    "--exchange",
    type=click.Choice(["files", "shuffle"]),
    help="Channel for bulk data between stages. Default: files in DATA's staging; on Dataflow its shuffle.",
)
@click.option("--onto", metavar="DATA1", help="Add to DATA1: DATA holds what is new, and names the rest.")
@click.option("--part", metavar="NAME", help="Name of what is added, e.g. a date. Default: the version's number.")
@click.option(
    "--again",
    type=click.Choice(["replace", "keep"]),
    default="replace",
    help="With --onto, points whose key comes again: the older one is replaced, or kept beside it.",
)
@click.option(
    "--labels",
    type=click.Choice(["all", "new"]),
    help="With --onto, labels listed in INPUT: all there are (others retire), or new and changed ones alone. "
    "Default: all, unless more than half would retire.",
)
@click.option("--seed", type=NOT_NEGATIVE, default=0, help="Seed of the order of rows.")
@click.option("--overwrite", is_flag=True, help="Replace a finished data set made from something else.")
@output_options
@beam_tail
def shard(source: str, data: str, beam_options: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Tokenize and shard raw data: INPUT to DATA. Everything after -- goes to Beam.

    INPUT is a prefix with files of one of the forms of docs/formats.md, or a pattern such as raw/*-2024.jsonl.
    Rows that cannot be used go to DATA/rejects. Without Beam options all cores of this machine are used.

    \b
    Examples:
      extremis shard examples/tate/ data/ --propensity 0.55,1.5
      extremis shard queries/ data/ --format jsonl --fields key=id,text=query,labels=positives
      extremis shard raw/2026-11-20/ data/2026-11-20/ --onto data/2026-11-19/ --part 2026-11-20
      extremis shard s3://bucket/raw s3://bucket/data -- --runner=FlinkRunner --flink_master=host:8081
    """
    from extremis.inspecting.data_summary import summarize, summary_lines
    from pipelines import shard as sharding
    from schemas.options import check

    (a, b), overwrite = options.pop("propensity") or (None, None), options.pop("overwrite")
    shard_options = check(sharding.ShardOptions, {**options, "propensity_a": a, "propensity_b": b})
    manifest = sharding.shard(source, data, shard_options, beam_options, say, overwrite=overwrite)
    summary = summarize(data)
    for line in summary_lines(summary):
        say(line)
    say(f"next: extremis run auto {data} RUN")
    facts = {"data": data, "digest": manifest.digest, "tables": manifest.parents}
    return {**facts, **manifest.parameters, "summary": summary}
