"""`extremis export`."""

from typing import Any

import click

from extremis.commands.options import comma_list, device_option, output_options, step_option
from extremis.console import say


@click.command()
@click.argument("data")
@click.argument("run")
@click.argument("out")
@step_option
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32")
@click.option(
    "--index",
    default="auto",
    help="none, auto (none up to 131,072 labels, else inverted lists), or a Faiss factory string such as HNSW32.",
)
@click.option("--target-recall", type=float, default=0.98, help="Recall that the index is tuned to.")
@click.option(
    "--precision",
    "precisions",
    type=comma_list(float, "numbers with commas between, for example 0.5,0.9"),
    default="0.5,0.7,0.9",
    metavar="SHARE,...",
    help="Precisions to make thresholds for.",
)
@click.option("--threshold-split", "split", help="Split that measures them, or none. Default: val where DATA has it.")
@click.option(
    "--scores",
    type=click.Choice(["classifier", "sum", "fused"]),
    default="classifier",
    help="sum: embeddings of the labels' texts added to the vectors; fused: as `extremis fuse` learned to.",
)
@click.option("--onto", metavar="EXPORT", help="Earlier export, whose files are named where they stay; or its folder.")
@click.option("--current", is_flag=True, help="Make OUT the current one: `predict` and `load` open it by its folder.")
@click.option("--overwrite", is_flag=True, help="Replace an export made from something else.")
@device_option
@output_options
def export(data: str, run: str, out: str, current: bool, **options: Any) -> dict[str, Any]:
    """Export a checkpoint of RUN to OUT: encoder, vectors, labels, thresholds, and an index where L is large.

    A transformer becomes a directory that sentence-transformers and transformers open. With --onto, OUT holds what has
    changed since an earlier export, and names the rest. See docs/export.md.

    \b
    Examples:
      extremis export data/ runs/1 exported/
      extremis export data/2 runs/2 exports/2 --onto exports/1 --current
    """
    from schemas.versions.current import own_name, switch

    if current:
        own_name(out)
    from trainer.export import export as exporting

    manifest = exporting.export(data, run, out, exporting.ExportOptions(**options), say)
    facts = manifest.parameters
    say(f"{out}: step {facts['step']:,}, {manifest.rows:,} labels of {facts['dimension']} dimensions")
    if current:
        say(f"{switch(out)}: names {out} now")
    say(f'next: echo "some text" | extremis predict {out} - -')
    shown = {name: facts[name] for name in ("step", "dimension", "bias", "index", "thresholds")}
    return {"out": out, "digest": manifest.digest, "labels": manifest.rows, **shown}
