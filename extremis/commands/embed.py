"""`extremis embed`."""

from typing import Any

import click

from extremis.commands.options import beam_tail, device_option, output_options, step_option
from extremis.console import say


@click.command()
@click.argument("data")
@click.argument("run")
@click.argument("out")
@click.option("--what", type=click.Choice(["queries", "labels"]), default="queries")
@click.option("--split", default="test", help="Split of the queries.")
@step_option
@click.option("--dtype", type=click.Choice(["float16", "float32"]), default="float16")
@device_option
@output_options
@beam_tail
def embed(data: str, run: str, out: str, beam_options: tuple[str, ...], device: str, **options: Any) -> dict[str, Any]:
    """Embed queries or labels with a checkpoint of RUN, aligned with their table, to OUT.

    Everything after -- goes to Beam.

    \b
    Example:
      extremis embed data/ runs/1 embeddings/test --split test
    """
    from pipelines import embed as embedding
    from schemas.options import check

    manifest = embedding.embed(data, run, out, check(embedding.EmbedOptions, options), beam_options, say, device)
    say(f"{out}: {manifest.rows:,} embeddings in {len(manifest.shards)} shards")
    say(f"next: extremis inspect {out}")
    return {"out": out, "digest": manifest.digest, "rows": manifest.rows}
