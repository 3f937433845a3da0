"""`extremis tuples`: writes mined negatives as training texts for other libraries."""

from os import fspath
from typing import Any, Literal

from extremis.command import Progress, build_options, command
from extremis.commands.shared import NotNegative, Place, Positive
from extremis.console import Bar, say
from scoring.options import TupleOptions


@command(TupleOptions)
def tuples(
    table: Place,
    out: Place,
    *,
    data: Place | None = None,
    form: Literal["triplets", "tuples", "pairs", "lists", "tevatron", "flagembedding"] | None = None,
    negatives: int | None = None,
    keys: bool = False,
    each_positive: bool = False,
    scores: Literal["search", "teacher"] | None = None,
    shuffle: bool = False,
    seed: int | None = None,
    epoch: NotNegative = 0,
    shards: Positive | None = None,
    overwrite: bool = False,
    progress: Progress = True,
) -> dict[str, Any]:
    """Write a table of negatives to OUT as training examples for other libraries.

    TABLE is a table of negatives, the output folder of `extremis mine` on arrays, or a RUN (its newest table). OUT ends
    in .jsonl, .jsonl.gz, .jsonl.bz2 or .jsonl.zst, or is a folder for Parquet shards. Rows without positives, or with
    too few negatives, are left out.

    triplets: anchor, positive, negative. tuples: anchor, positive, negative_1, negative_2, ... pairs: anchor, other,
    label. lists: anchor, documents, labels. tevatron and flagembedding: the formats that these libraries read.

    Options:
        data: DATA that the table was mined from. Default: the data set in the output folder of `extremis mine` on
            arrays.
        shuffle: Shuffle with --seed and --epoch. Default: keep the order of the table.
        epoch: Number of the epoch, which determines the order and the choice of positives.
        shards: Number of shards in a folder. Default: computed from the number of examples.
        overwrite: Replace existing examples at OUT.

    Examples:
      extremis tuples mined/ triplets.jsonl.gz --form triplets
      extremis tuples runs/1 tuples/ --data data/ --negatives 7 --shuffle
      extremis tuples mined/ train.jsonl --form flagembedding --scores search
    """
    options, out = build_options(TupleOptions, locals()), fspath(out)
    from scoring.tuples import TupleStream, is_file, write_tuples

    is_file(out)
    stream = TupleStream(table, data, **options.model_dump())
    stream.set_epoch(epoch)
    examples, left_out = stream.counted
    with Bar("tuples", examples) as bar:
        written = 0

        def show(number: int) -> None:
            nonlocal written
            written += number
            bar.update(written)

        manifest = write_tuples(stream, out, shuffle, shards, overwrite, show)
    left = f"; {left_out:,} rows were left out" if left_out else ""
    say(f"{out}: {examples:,} examples ({options.form}){left}")
    facts = {"out": out, "form": options.form, "examples": examples, "rows_left_out": left_out}
    return facts | ({} if manifest is None else {"digest": manifest.digest, "shards": len(manifest.shards)})
