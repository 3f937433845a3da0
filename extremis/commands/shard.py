"""`extremis shard`."""

from typing import Any

import click

from extremis.commands.options import beam_tail, json_option, parse_propensity
from extremis.console import print_json, say
from schemas.options import check

FORMS = ("xc", "xc-sparse", "xc-single", "xc-text", "jsonl", "parquet", "beir")  # docs/formats.md


@click.command()
@click.argument("source", metavar="INPUT")
@click.argument("data")
@click.option("--tokenizer", default="train:30000", show_default=True, help="train:SIZE, a directory, or a hub name.")
@click.option("--max-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--text", type=click.Choice(["title+content", "title"]), default="title+content", show_default=True)
@click.option("--propensity", metavar="A,B", help="Propensity constants, e.g. 0.55,1.5. Unknown: no PSP metrics.")
@click.option("--shards", type=click.IntRange(1), help="Shards of each split. Default: from --shard-bytes.")
@click.option(
    "--shard-bytes", type=click.IntRange(1), default=128 << 20, show_default=True, help="About so many bytes a shard."
)
@click.option("--row-group-rows", type=click.IntRange(1), help="Rows of a row group. Default: from the rows.")
@click.option(
    "--validation", "validation_share", type=float, default=0.0, help="Share of train to cut out as split val."
)
@click.option("--keep-text", is_flag=True, help="Store the queries' text beside their tokens.")
@click.option(
    "--max-reject-share",
    type=float,
    default=0.001,
    show_default=True,
    help="Share of a table's rows, and of its label mentions, that may be rejected.",
)
@click.option(
    "--tokenizer-texts",
    type=click.IntRange(1),
    default=1_000_000,
    show_default=True,
    help="Texts that train:SIZE learns from, chosen by the hash of their keys.",
)
@click.option("--format", metavar="FORM", help=f"The input form: {', '.join(FORMS)}. Default: found out.")
@click.option(
    "--fields", metavar="NAME=NAME,...", help="What fields are called in jsonl and parquet: key=id,text=query."
)
@click.option(
    "--sink",
    type=click.Choice(["parquet", "webdataset"]),
    default="parquet",
    show_default=True,
    help="The queries' files. Parquet is small and fast; webdataset makes tars that the stock library reads.",
)
@click.option(
    "--exchange",
    type=click.Choice(["files", "shuffle"]),
    help="How bulk data goes between stages. Default: files in DATA's staging, or the shuffle of a cluster's runner.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Salts the hash that shuffles rows.")
@click.option("--overwrite", is_flag=True, help="Replace a finished data set made from something else.")
@json_option
@beam_tail
def shard(
    source: str,
    data: str,
    propensity: str | None,
    overwrite: bool,
    as_json: bool,
    beam_options: tuple[str, ...],
    **chosen: Any,
) -> None:
    """Tokenize and shard raw data: INPUT to DATA. Everything after -- goes to Beam.

    INPUT is a prefix with files of one of the forms of docs/formats.md, or a pattern such as raw/*-2024.jsonl.
    Rows that cannot be used go to DATA/rejects. Without Beam options all cores of this machine are used.

    \b
    Examples:
      extremis shard examples/tate/ data/ --propensity 0.55,1.5
      extremis shard queries/ data/ --format jsonl --fields key=id,text=query,labels=positives
      extremis shard s3://bucket/raw s3://bucket/data -- --runner=FlinkRunner --flink_master=host:8081
    """
    from pipelines.shard import ShardOptions
    from pipelines.shard import shard as shard_data

    a, b = parse_propensity(propensity)
    options = check(ShardOptions, {**chosen, "propensity_a": a, "propensity_b": b})
    manifest = shard_data(source, data, options, beam_options, say, overwrite=overwrite)
    if as_json:
        print_json({"data": data, "digest": manifest.digest, "tables": manifest.parents, **manifest.parameters})
