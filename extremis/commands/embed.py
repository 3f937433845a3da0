"""`extremis embed`: embeddings of queries or labels."""

from os import fspath
from typing import Any, Literal

from extremis.command import Progress, command, options_of
from extremis.commands.shared import BeamOptions, Device, Place, StartTimeout
from extremis.console import say
from pipelines.options import EmbedOptions


@command(EmbedOptions)
def embed(
    data: Place,
    run: Place,
    out: Place,
    *,
    what: Literal["queries", "labels"] | None = None,
    split: str | None = None,
    step: int | None = None,
    dtype: Literal["float16", "float32"] | None = None,
    device: Device = "auto",
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
) -> dict[str, Any]:
    """Embed queries or labels with a checkpoint of RUN, aligned with their table, to OUT.

    Everything after -- goes to Beam.

    Example:
      extremis embed data/ runs/1 embeddings/test --split test
    """
    options, out = options_of(EmbedOptions, locals()), fspath(out)
    from pipelines import embed as embedding

    manifest = embedding.embed(fspath(data), fspath(run), out, options, beam_options, say, device)
    say(f"{out}: {manifest.rows:,} embeddings in {len(manifest.shards)} shards")
    say(f"next: extremis inspect {out}")
    return {"out": out, "digest": manifest.digest, "rows": manifest.rows}
