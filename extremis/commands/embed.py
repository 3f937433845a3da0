"""`extremis embed`: embeds texts with any model, or queries or labels with a run."""

from os import fspath
from typing import Any, Literal

from extremis.command import Progress, build_options, command, format_argument
from extremis.commands.shared import BeamOptions, Device, Fields, NotNegative, Place, StartTimeout
from extremis.console import say
from pipelines.options import EmbedOptions, EmbedTextsOptions
from schemas.errors import InputError

_RUN_OPTIONS, _TEXT_OPTIONS = ("step",), ("prompt", "fields", "compute", "threads")


@command(EmbedTextsOptions)
def embed(
    model: Place,
    input: Any,
    out: Place,
    *,
    what: Literal["queries", "labels", "documents"] | None = None,
    prompt: str | None = None,
    fields: Fields | None = None,
    split: str | None = None,
    step: NotNegative | None = None,
    dtype: Literal["float16", "float32"] | None = None,
    compute: Literal["auto", "float32", "bfloat16"] | None = None,
    threads: int | None = None,
    device: Device = "auto",
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
) -> dict[str, Any]:
    """Embed texts with any text model (MODEL INPUT OUT), or queries or labels of DATA with a run (DATA RUN OUT).

    MODEL is the directory or hub name of a model for sentence-transformers, transformers or Model2Vec, in safetensors.
    INPUT is DATA, or any number of files with key and text (.txt lines, JSON lines, CSV, Parquet), or, in Python, rows.
    OUT contains query_id, key, text and vector in the order of INPUT. With DATA RUN OUT, OUT contains only query_id or
    label_id, and vector, in the order of the table of queries or labels. Options after -- are passed to Beam.

    Options:
        step: With DATA RUN OUT: step of the checkpoint. Default: the checkpoint that evaluate uses.

    Examples:
      extremis embed sentence-transformers/all-MiniLM-L6-v2 corpus.jsonl emb/corpus --what documents
      extremis embed models/potion/ "raw/*.csv" emb/queries --fields key=id,text=query --prompt "query: "
      extremis embed data/ runs/1 embeddings/test --split test
    """
    arguments = {**locals(), "fields": format_argument(fields) if fields else None}
    out = fspath(out)
    from schemas.layout import RunLayout
    from schemas.manifest import is_published
    from schemas.storage import exists

    is_run = is_published(fspath(model)) or (isinstance(input, str) and exists(RunLayout(input).config))
    for name in _TEXT_OPTIONS if is_run else _RUN_OPTIONS:
        field = EmbedTextsOptions.model_fields.get(name)
        if arguments[name] not in (None, field and field.default):
            form = "MODEL INPUT OUT" if is_run else "DATA RUN OUT"
            raise InputError(
                f"--{name} works only with `extremis embed {form}`. Leave --{name} out, or give these arguments."
            )
    from pipelines import embed as embedding

    if is_run:
        arguments["step"] = RunLayout(fspath(input)).scored_step(step)
        table_options = build_options(EmbedOptions, arguments)
        manifest = embedding.embed(fspath(model), fspath(input), out, table_options, beam_options, say, device)
    else:
        from scoring.containers import input_url

        with input_url(input) as url:
            options = build_options(EmbedTextsOptions, arguments)
            manifest = embedding.embed_texts(fspath(model), url, out, options, beam_options, say, device)
    say(f"{out}: {manifest.rows:,} embeddings in {len(manifest.shards)} shards")
    say(f"next: extremis inspect {out}")
    return {"out": out, "digest": manifest.digest, "rows": manifest.rows}
