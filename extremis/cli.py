"""`extremis`: one command a step of the loop. Thin: parse, call, report; heavy imports wait until they are needed."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import click

from extremis.console import metrics_table, print_json, say, table
from extremis.miner import end_with_trainer
from schemas.errors import ExtremisError, InputError
from schemas.manifest import code_version

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object last.")
beam_tail = click.argument("beam_options", nargs=-1, type=click.UNPROCESSED)


def training_options(command: Callable[..., None]) -> Callable[..., None]:
    """What `train` and `run` take alike."""
    for option in reversed(
        (
            click.argument("recipe"),
            click.argument("data"),
            click.argument("run"),
            click.option(
                "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the recipe, e.g. train.epochs=5."
            ),
            click.option(
                "--resume", is_flag=True, help="Go on from the run's newest checkpoint; start where there is none."
            ),
            click.option(
                "--metrics-port", type=click.IntRange(0, 65535), help="Serve figures for Prometheus. 0: any free port."
            ),
            click.option("--metrics-host", default="127.0.0.1", show_default=True, help="Who may fetch them."),
            json_option,
        )
    ):
        command = option(command)
    return command


class Count(click.ParamType):
    """A whole number, which may be written as 370e6."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> int:
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if number < 1 or number != int(number) or number > 1e15:
            self.fail(f"{value!r} is no whole number of at least 1, such as 370e6.", param, context)
        return int(number)


class Depths(click.ParamType):
    """Where rankings are cut: whole numbers with commas between, such as 20,100."""

    name = "depths"
    most = 1000

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in value.split(",")]
        if not all(part.isdecimal() and 1 <= int(part) <= self.most for part in parts):
            self.fail(f"{value!r}: expected numbers from 1 to {self.most} with commas between.", param, context)
        return tuple(map(int, parts))


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(code_version(), prog_name="extremis")
def cli() -> None:
    """Extreme classification that streams: shard, train, mine, join, evaluate.

    DATA and RUN are directories or object-store prefixes (s3://, gs://, ...).

    \b
    Example, the whole loop:
      extremis shard raw/ data/
      extremis run astra data/ runs/1
      extremis evaluate data/ runs/1
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; user errors become one message and an exit status, never a traceback.

    `arguments` are those of this process where they are not given. Raises SystemExit unless all went well.
    """
    try:
        cli.main(arguments, standalone_mode=False)
    except ExtremisError as error:
        say(f"error: {error}")
        sys.exit(error.exit_status)
    except click.exceptions.Abort:
        say("interrupted")
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


FORMS = ("xc", "xc-sparse", "xc-single", "xc-text", "jsonl", "parquet", "beir")  # docs/formats.md


@cli.command()
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
    options = ShardOptions(**chosen, propensity_a=a, propensity_b=b)
    manifest = shard_data(source, data, options, beam_options, say, overwrite=overwrite)
    if as_json:
        print_json({"data": data, "digest": manifest.digest, "tables": manifest.parents, **manifest.parameters})


@cli.command()
@training_options
def train(
    recipe: str,
    data: str,
    run: str,
    overrides: tuple[str, ...],
    resume: bool,
    metrics_port: int | None,
    metrics_host: str,
    as_json: bool,
) -> None:
    """Train RECIPE on DATA into RUN, using the tables that a miner elsewhere publishes.

    RECIPE is a name (see `extremis recipes`) or a TOML file.

    \b
    Examples:
      extremis train astra data/ runs/1 --set train.epochs=30
      extremis train astra data/ runs/1 --resume
      torchrun --nproc-per-node 2 -m extremis train astra data/ runs/1
    """
    _train(recipe, data, run, overrides, resume, (metrics_host, metrics_port), as_json, None)


@cli.command()
@training_options
@beam_tail
def run(
    recipe: str,
    data: str,
    run: str,
    overrides: tuple[str, ...],
    resume: bool,
    metrics_port: int | None,
    metrics_host: str,
    as_json: bool,
    beam_options: tuple[str, ...],
) -> None:
    """Train RECIPE on DATA into RUN, with a miner process beside the trainer.

    The trainer does not wait for the miner: a table that is late is used from a later epoch.

    \b
    Example:
      extremis run astra data/ runs/1
    """
    _train(recipe, data, run, overrides, resume, (metrics_host, metrics_port), as_json, beam_options)


def _train(
    recipe: str,
    data: str,
    run: str,
    overrides: tuple[str, ...],
    resume: bool,
    metrics: tuple[str, int | None],
    as_json: bool,
    beam_options: tuple[str, ...] | None,
) -> None:
    from extremis.ranks import joined
    from extremis.training import train as train_run
    from trainer.config import load_recipe

    with joined() as group:
        outcome = train_run(data, run, load_recipe(recipe, overrides), resume, beam_options, group, metrics)
    if as_json and group.first:
        print_json({"run": run, **outcome})


@cli.command()
@click.argument("data")
@click.argument("run")
@click.option("--epoch", type=click.IntRange(0), help="The dump's epoch. Default: the newest complete dump.")
@click.option("--watch", is_flag=True, help="Mine every dump as it is completed, until the run is finished.")
@click.option(
    "--by",
    type=click.Choice(["classifier", "labels"]),
    help="Score by classifier vectors or by label embeddings. Default: what the trainer asked for.",
)
@click.option("--queries", metavar="URL", help="Embeddings by `extremis embed` instead of the dump's.")
@click.option("--vectors", metavar="URL", help="Vectors (`extremis embed --what labels`) instead of the dump's.")
@click.option("--for-epoch", type=click.IntRange(0), help="First epoch that trains on the table. Default: the dump's.")
@click.option("--out", metavar="URL", help="Publish under URL instead of the run's negatives.")
@click.option("--width", type=click.IntRange(1), help="K, hard negatives a query. Default: what the trainer asked for.")
@click.option("--ranges", type=click.IntRange(1), help="Keep K from each of so many equal label ranges (one a rank).")
@click.option("--skip-top", type=click.IntRange(0), help="Leave out so many of the best-ranked negatives.")
@click.option("--window", type=click.IntRange(1), help="Negatives come from ranks [skip-top, window).")
@click.option("--margin", type=float, help="Keep scores below the weakest positive's minus this.")
@click.option("--relative-margin", type=float, help="The same, as a share of that positive's score.")
@click.option("--index", help="exact, auto, or a Faiss factory string. Default: what the trainer asked for.")
@click.option("--target-recall", type=float, help="What nprobe, ef-search and refine are tuned to. Default: 0.95.")
@click.option("--nprobe", type=click.IntRange(1), help="Inverted lists searched a query. Default: tuned.")
@click.option("--ef-search", type=click.IntRange(1), help="Breadth of an HNSW search. Default: tuned.")
@click.option("--refine", type=click.IntRange(1), help="Score so many times K candidates exactly. Default: tuned.")
@click.option("--memory", metavar="SIZE", help="What one worker process may use, e.g. 8GiB. Default: 4GiB.")
@click.option("--block-rows", type=click.IntRange(1), help="Vectors in one index at a time. Default: from --memory.")
@click.option("--query-batch", type=click.IntRange(1), help="Queries searched at a time. Default: from --memory.")
@click.option(
    "--tasks-per-block", type=click.IntRange(1), help="Work items a block; each builds its index. Default: 1."
)
@click.option("--threads", type=click.IntRange(1), help="Faiss threads a worker. Default: all cores.")
@click.option("--audit-queries", type=click.IntRange(0), help="Rows also searched exactly. Default: 200 to 1000.")
@click.option("--seed", type=click.IntRange(0), help="Of index training and of the audited rows. Default: 0.")
@click.option("--keep-index", metavar="URL", help="Keep every block's Faiss index under URL, for serving.")
@click.option("--overwrite", is_flag=True, default=None, help="Replace a table made with other options.")
@json_option
@beam_tail
def mine(
    data: str,
    run: str,
    epoch: int | None,
    watch: bool,
    as_json: bool,
    beam_options: tuple[str, ...],
    **chosen: Any,
) -> None:
    """Make hard-negative tables from the dumps of RUN. Everything after -- goes to Beam.

    \b
    Examples:
      extremis mine data/ runs/1                       the newest dump
      extremis mine data/ runs/1 --watch               beside a trainer, wherever it runs
      extremis mine data/ runs/1 --memory 8GiB --index IVF4096,PQ32x4fs
      extremis mine data/ runs/1 --by labels --out negatives/theta
      extremis mine data/ runs/1 --skip-top 5 --relative-margin 0.05 --overwrite
    """
    from pipelines.mine import MineOptions
    from pipelines.mine import mine as mine_dump
    from pipelines.mine import watch as watch_run

    options = MineOptions.of(**{name: value for name, value in chosen.items() if value is not None})
    if watch:
        _require_watching(chosen, epoch, "mines")
        _watch(watch_run, data, run, options, beam_options, as_json)
        return
    tables = mine_dump(data, run, epoch, options, beam_options, say)
    for name, manifest in tables.items():
        recall = manifest.quality.get("recall_at_k")
        say(f"{name}: {manifest.rows:,} rows, recall " + ("not measured" if recall is None else f"{recall:.4f}"))
        if recall is not None and recall < options.target_recall:
            say(f"{name}: below --target-recall {options.target_recall}: raise --nprobe or --refine, or leave both out")
    if as_json:
        facts = {
            n: {"digest": m.digest, "rows": m.rows, "counters": m.counters, "quality": m.quality}
            for n, m in tables.items()
        }
        print_json({"run": run, "tables": facts})


@cli.command()
@click.argument("data")
@click.argument("run")
@click.argument("out")
@click.option("--what", type=click.Choice(["queries", "labels"]), default="queries", show_default=True)
@click.option("--split", default="test", show_default=True, help="Which queries.")
@click.option("--step", type=click.IntRange(0), help="The checkpoint's step. Default: the newest.")
@click.option("--dtype", type=click.Choice(["float16", "float32"]), default="float16", show_default=True)
@json_option
@beam_tail
def embed(
    data: str,
    run: str,
    out: str,
    what: str,
    split: str,
    step: int | None,
    dtype: str,
    as_json: bool,
    beam_options: tuple[str, ...],
) -> None:
    """Embed queries or labels with a checkpoint of RUN, aligned with their table, to OUT.

    \b
    Example:
      extremis embed data/ runs/1 embeddings/test --split test
    """
    from pipelines.embed import embed as embed_table

    manifest = embed_table(data, run, out, what=what, split=split, step=step, dtype=dtype, beam_options=beam_options)
    say(f"{out}: {manifest.rows:,} embeddings in {len(manifest.shards)} shards")
    if as_json:
        print_json({"out": out, "digest": manifest.digest, "rows": manifest.rows})


@cli.command()
@click.argument("data")
@click.argument("run")
@click.option("--split", default="test", show_default=True)
@click.option("--step", type=click.IntRange(0), help="The checkpoint's step. Default: the newest.")
@click.option("--limit", type=click.IntRange(1), help="Only the first queries.")
@click.option("--no-filter", is_flag=True, help="Leave the filter's pairs among the predictions.")
@click.option("--k", "ks", type=Depths(), default=(), metavar="K,...", help="Also at these k, e.g. 100; 1000 at most.")
@click.option("--zero-shot", is_flag=True, help="Also report labels without a training point apart.")
@click.option("--seen-only", is_flag=True, help="Rank only labels with a training point. Default: all labels.")
@click.option(
    "--scores",
    "by",
    type=click.Choice(["classifier", "labels", "sum", "fused"]),
    default="classifier",
    show_default=True,
    help="Rank by the run's vectors, by its embeddings of the labels' texts, by both added, or fused (extremis fuse).",
)
@json_option
def evaluate(
    data: str,
    run: str,
    split: str,
    step: int | None,
    limit: int | None,
    no_filter: bool,
    ks: tuple[int, ...],
    zero_shot: bool,
    seen_only: bool,
    by: Any,
    as_json: bool,
) -> None:
    """Score a checkpoint of RUN on a split of DATA: P, nDCG, R, PSP and PSnDCG at 1, 3, 5, 10.

    \b
    Examples:
      extremis evaluate data/ runs/1 --split test --json
      extremis evaluate data/ runs/1 --k 20,100 --zero-shot
      torchrun --nproc-per-node 2 -m extremis evaluate data/ runs/1
    """
    from extremis.evaluation import evaluate as evaluate_run
    from extremis.ranks import joined

    with joined() as group:
        report = evaluate_run(
            data,
            run,
            split,
            step=step,
            limit=limit,
            filter=not no_filter,
            group=group,
            ks=ks,
            seen_only=seen_only,
            zero_shot=zero_shot,
            by=by,
        )
    if not group.first:
        return
    metrics_table(f"{split}: {report['queries']:,} queries, {report['filter_pairs']:,} filter pairs", report)
    if zero_shot:
        _show_zero_shot(report["zero_shot"])
    if "PSP@1" not in report["metrics"]:
        say("no PSP: this data set does not state its propensity constants (extremis shard --propensity A,B)")
    if as_json:
        print_json({"data": data, "run": run, "split": split, **report})


def _show_zero_shot(found: dict[str, Any]) -> None:
    """Tables of `ZeroShot.report`."""
    what = f"{found['labels']:,} zero-shot labels, {found['queries']:,} queries that have one"
    if not found["queries"]:
        say(f"no query of the split has one of the {found['labels']:,} labels without a training point")
        return
    metrics_table(f"{what}, ranked among themselves", found["alone"])
    metrics_table(f"{what}, ranked among all labels", found["among_all"])


@cli.command()
@click.argument("data")
@click.argument("run")
@click.option("--split", default="val", show_default=True, help="Queries that the run was not trained on.")
@click.option("--step", type=click.IntRange(0), help="The checkpoint's step. Default: the newest.")
@click.option("--shortlist", type=click.IntRange(1), default=100, show_default=True, help="Best labels of a query.")
@click.option("--queries", type=click.IntRange(1), default=10_000, show_default=True, help="The first of the split.")
@json_option
def fuse(data: str, run: str, split: str, step: int | None, shortlist: int, queries: int, as_json: bool) -> None:
    """Learn to fuse the scores of RUN's classifier with those of the labels' texts (NGAME's score fusion).

    A regression tree of depth 7 on both scores and the label's frequency, kept in RUN/fusion. Needs the extra fusion.

    \b
    Examples:
      extremis fuse data/ runs/1
      extremis evaluate data/ runs/1 --scores fused
      extremis export data/ runs/1 exported/ --scores fused
    """
    from trainer.fusion.fit import fit_fusion

    manifest = fit_fusion(data, run, split, step, shortlist, queries)
    facts = manifest.parameters
    pairs = f"{facts['pairs']:,} pairs, {facts['positive_pairs']:,} of them right"
    say(f"fitted on {facts['queries']:,} queries of {split}: {pairs}")
    if as_json:
        print_json({"data": data, "run": run, "digest": manifest.digest, **facts})


@cli.command()
@click.argument("data")
@click.argument("run")
@click.argument("out")
@click.option("--step", type=click.IntRange(0), help="The checkpoint's step. Default: the newest.")
@click.option("--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True)
@click.option(
    "--index",
    default="auto",
    show_default=True,
    help="none, auto (none up to 131,072 labels, else inverted lists), or a Faiss factory string such as HNSW32.",
)
@click.option("--target-recall", type=float, default=0.98, show_default=True, help="What the index is tuned to.")
@click.option("--precision", default="0.5,0.7,0.9", show_default=True, help="Precisions that get a threshold.")
@click.option("--threshold-split", help="The split they are measured on, or none. Default: val where DATA has it.")
@click.option(
    "--scores",
    type=click.Choice(["classifier", "sum", "fused"]),
    default="classifier",
    show_default=True,
    help="sum: with the embeddings of the labels' texts added to the vectors; fused: beside them, with the run's tree.",
)
@click.option("--overwrite", is_flag=True, help="Replace an export made from something else.")
@json_option
def export(
    data: str, run: str, out: str, precision: str, threshold_split: str | None, as_json: bool, **chosen: Any
) -> None:
    """Export a checkpoint of RUN to OUT: encoder, vectors, labels, thresholds, and an index where L is large.

    A transformer becomes a directory that sentence-transformers and transformers open. See docs/export.md.

    \b
    Example:
      extremis export data/ runs/1 exported/
    """
    from trainer.export.export import ExportOptions
    from trainer.export.export import export as export_run

    precisions = parse_numbers("--precision", precision)
    manifest = export_run(data, run, out, ExportOptions(precisions=precisions, split=threshold_split, **chosen), say)
    facts = manifest.parameters
    say(f"{out}: step {facts['step']:,}, {manifest.rows:,} labels of {facts['dimension']} dimensions")
    if as_json:
        made = {name: facts[name] for name in ("step", "dimension", "bias", "index", "thresholds")}
        print_json({"out": out, "digest": manifest.digest, "labels": manifest.rows, **made})


@cli.command()
@click.argument("exported", metavar="EXPORT")
@click.argument("places", metavar="[INPUT] OUT", nargs=-1, required=True)
@click.option("--data", help="Instead of INPUT: predict for a split of the DATA that the run was made from.")
@click.option("--split", default="test", show_default=True, help="Which, with --data.")
@click.option("--k", type=click.IntRange(1), default=10, show_default=True, help="Labels a query.")
@click.option("--form", type=click.Choice(["text", "jsonl", "parquet"]), help="What INPUT holds. Default: by its name.")
@click.option(
    "--to", type=click.Choice(["jsonl", "parquet", "trec", "npz"]), help="What OUT will hold. Default: by its name."
)
@click.option(
    "--fields", metavar="NAME=NAME,...", default="", help="What fields are called in INPUT: key=id,text=query."
)
@click.option("--text", type=click.Choice(["title+content", "title"]), default="title+content", show_default=True)
@click.option("--batch", type=click.IntRange(1), default=256, show_default=True, help="Queries at a time.")
@click.option("--threshold", type=float, help="Only labels that score as much.")
@click.option("--precision", type=float, help="The same, by the export's threshold for this precision.")
@click.option("--exact", is_flag=True, help="Score every label, whatever index there is.")
@click.option("--no-filter", is_flag=True, help="With --data: leave the filter's pairs among the predictions.")
@click.option("--threads", type=click.IntRange(1), help="Default: all cores.")
@json_option
def predict(
    exported: str,
    places: tuple[str, ...],
    data: str | None,
    split: str,
    k: int,
    form: str | None,
    to: str | None,
    fields: str,
    text: str,
    batch: int,
    threshold: float | None,
    precision: float | None,
    exact: bool,
    no_filter: bool,
    threads: int | None,
    as_json: bool,
) -> None:
    """Predict labels with what `extremis export` made: for texts of INPUT, or with --data for a split, to OUT.

    INPUT is a file, a folder or a pattern of text lines (.txt), JSON lines (.jsonl: key, text) or Parquet, at any URL.
    OUT ends in .jsonl, .parquet, .trec (a run for trec_eval) or .npz (scipy.sparse.load_npz).

    \b
    Examples:
      extremis predict exported/ queries.jsonl predictions.jsonl --k 5
      extremis predict exported/ "s3://bucket/new/*.parquet" predictions.parquet --precision 0.9
      extremis predict exported/ --data data/ --split test predictions.npz --k 100
    """
    from extremis.predicting.inputs import Texts
    from extremis.predicting.predict import open_exported, predict_split, predict_texts
    from pipelines.sharding.formats.fields import parse_fields

    if len(places) != (1 if data else 2):
        expected = "OUT alone, with --data" if data else "INPUT and OUT"
        raise InputError(f"expected {expected} after EXPORT, got {' '.join(places)}.")
    if threshold is not None and precision is not None:
        raise InputError("--threshold and --precision both say which scores are enough. Give one of them.")
    opened = open_exported(exported, exact, threads)
    enough = opened.threshold(precision) if precision is not None else threshold
    if data is not None:
        report = predict_split(opened, data, split, places[0], k=k, to=to, threshold=enough, filter=not no_filter)
    else:
        texts = Texts(places[0], form, parse_fields(fields), text == "title")
        report = predict_texts(opened, texts, places[1], k=k, to=to, batch=batch, threshold=enough)
    say(
        f"{report['out']}: {report['predictions']:,} labels for {report['queries']:,} queries, "
        f"{1000 * report['seconds'] / max(1, report['queries']):.2f} ms a query"
    )
    if as_json:
        print_json(report)


@cli.command()
@click.argument("url")
@click.option("--verify", is_flag=True, help="Read every byte and compare checksums.")
@click.option("--rows", type=click.IntRange(0), default=3, show_default=True, help="Sample rows to print.")
@click.option("--key", help="Only the query of this key, with its labels in words.")
@click.option("--run", metavar="RUN", help="With the hard negatives of this run's newest table.")
@click.option("--split", help="Which queries. Default: train for samples, all of them for a key.")
@json_option
def inspect(
    url: str, verify: bool, rows: int, key: str | None, run: str | None, split: str | None, as_json: bool
) -> None:
    """Say what is at URL: a table, a DATA, a RUN: kinds, rows, shards, parents, sizes, checks, a few rows in words.

    --key and --run take DATA for URL.

    \b
    Examples:
      extremis inspect data/
      extremis inspect runs/1 --verify
      extremis inspect runs/1/negatives/epoch-0005/queries
      extremis inspect data/ --run runs/1 --key N00012
    """
    from extremis.inspect import inspect_url

    inspect_url(url, check=verify, rows=rows, key=key, split=split, run=run, as_json=as_json)


@cli.command()
@click.argument("urls", metavar="[DATA] RUN [RUN...]", nargs=-1, required=True)
@click.option("--out", metavar="URL", help="Where to. Default: report.html in the first RUN.")
@click.option(
    "--queries", type=click.IntRange(0, 1000), default=300, show_default=True, help="In the searchable sample."
)
@click.option(
    "--predictions/--no-predictions", default=True, show_default=True, help="Load each run's newest checkpoint."
)
@json_option
def report(urls: tuple[str, ...], out: str | None, queries: int, predictions: bool, as_json: bool) -> None:
    """One HTML page about runs, to look at and to search: opens from a disk, needs no network.

    Data, training, negative tables, metrics (of `extremis evaluate`), and queries with their positives, predictions and
    hard negatives as text. Several runs of the same DATA are compared. Without DATA, the queries are left out.

    \b
    Examples:
      extremis report data/ runs/1
      extremis report data/ runs/1 runs/2 --out compared.html
    """
    from extremis.report.build import Options, build

    made = build(urls, out, Options(queries, predictions), say)
    say(f"{made['out']}: {made['bytes']:,} bytes in {made['seconds']} s")
    if as_json:
        print_json(made)


@cli.command()
@click.option("--queries", type=Count(), help="N. Default: as many as DATA has.")
@click.option("--labels", type=Count(), help="L. Default: as many as DATA has.")
@click.option("--data", help="A sharded sample of the data: its averages stand for all rows.")
@click.option("--tokens", type=float, default=32, show_default=True, help="Tokens a query, on average.")
@click.option("--label-tokens", type=float, default=8, show_default=True)
@click.option("--labels-per-query", type=float, default=5, show_default=True)
@click.option("--key-bytes", type=float, default=12, show_default=True, help="Characters of a key.")
@click.option("--text-bytes", type=float, default=40, show_default=True, help="Characters of a label's text.")
@click.option("--vocabulary", type=click.IntRange(2), default=30_000, show_default=True, help="Tokens there are.")
@click.option("--recipe", default="astra", show_default=True)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the recipe.")
@click.option("--dimension", type=click.IntRange(1), help="D. Default: the recipe's.")
@click.option("--width", type=click.IntRange(1), help="K of the negative tables. Default: the recipe's.")
@click.option("--epochs", type=click.IntRange(1), help="Default: the recipe's.")
@click.option("--ranks", type=click.IntRange(1), default=1, show_default=True, help="Trainer processes.")
@click.option("--workers", type=click.IntRange(1), default=1, show_default=True, help="Pipeline workers.")
@click.option("--memory", default="8GiB", show_default=True, help="What each process may use.")
@click.option(
    "--calibrate/--no-calibrate", default=True, show_default=True, help="Measure this machine, for the times."
)
@json_option
def plan(
    queries: int | None,
    labels: int | None,
    data: str | None,
    recipe: str,
    overrides: tuple[str, ...],
    dimension: int | None,
    width: int | None,
    epochs: int | None,
    memory: str,
    calibrate: bool,
    as_json: bool,
    **averages: Any,
) -> None:
    """Say what a run will take before it is started: bytes of every table, memory and time of every step.

    \b
    Examples:
      extremis plan --queries 370e6 --labels 120e6 --tokens 10 --dimension 64 --memory 64GiB
      extremis plan --data data/ --queries 370e6 --labels 120e6 --no-calibrate --json
    """
    from extremis.plan import plan as make_plan
    from extremis.plan import show, workload
    from trainer.config import load_recipe

    wishes = {"encoder.dimension": dimension, "negatives.width": width, "train.epochs": epochs}
    chosen = (*overrides, *(f"{key}={value}" for key, value in wishes.items() if value is not None))
    planned = workload(data, queries, labels, load_recipe(recipe, chosen), memory, averages)
    report = make_plan(planned, data, calibrate)
    show(report)
    if as_json:
        print_json(report)


@cli.command()
@click.argument("data")
@click.argument("run")
@click.option("--epoch", type=click.IntRange(0), help="The dump's epoch. Default: the newest.")
@click.option("--watch", is_flag=True, help="Cluster every dump as it is completed, until the run is finished.")
@click.option("--size", type=click.IntRange(2), help="C, queries of a cluster. Default: what the trainer asked for.")
@click.option(
    "--smallest",
    type=click.IntRange(1),
    help="Halves can be dealt down to so many. Default: what the trainer asked for.",
)
@click.option("--queries", metavar="URL", help="Embeddings by `extremis embed` instead of the dump's.")
@click.option("--for-epoch", type=click.IntRange(0), help="First epoch that trains on the table. Default: the dump's.")
@click.option("--out", metavar="URL", help="Publish at URL instead of in the run's clusters.")
@click.option("--memory", metavar="SIZE", help="What one worker process may use, e.g. 8GiB. Default: 4GiB.")
@click.option("--part-rows", type=click.IntRange(1), help="Queries clustered in one piece. Default: from --memory.")
@click.option("--seed", type=click.IntRange(0), help="Of first lines and of the order of clusters. Default: 0.")
@click.option("--overwrite", is_flag=True, default=None, help="Replace a table made with other options.")
@json_option
@beam_tail
def cluster(
    data: str,
    run: str,
    epoch: int | None,
    watch: bool,
    as_json: bool,
    beam_options: tuple[str, ...],
    **chosen: Any,
) -> None:
    """Publish queries in the order of balanced clusters of their embeddings, in which a stream deals whole clusters.

    For recipes with order.cluster above 1, such as `ngame`. Everything after -- goes to Beam.

    \b
    Examples:
      extremis cluster data/ runs/1                    the newest dump
      extremis cluster data/ runs/1 --watch            beside a trainer, wherever it runs
      extremis cluster data/ runs/2 --queries embeddings/ --size 64 --for-epoch 0
      extremis cluster data/ runs/1 --memory 8GiB -- --direct_num_workers=8 --direct_running_mode=multi_processing
    """
    from pipelines.cluster import ClusterOptions
    from pipelines.cluster import cluster as cluster_dump
    from pipelines.cluster import watch as watch_run

    options = ClusterOptions.of(**{name: value for name, value in chosen.items() if value is not None})
    if watch:
        _require_watching(chosen, epoch, "clusters")
        _watch(watch_run, data, run, options, beam_options, as_json)
        return
    manifest = cluster_dump(data, run, epoch, options, beam_options, say)
    if as_json:
        facts = {"digest": manifest.digest, "rows": manifest.rows, "counters": manifest.counters}
        print_json({**facts, "clusters": manifest.parameters["clusters"]})


def _require_watching(chosen: dict[str, Any], epoch: int | None, verb: str) -> None:
    """Raises InputError where options name one dump or place, with --watch."""
    fixed = [f"--{name.replace('_', '-')}" for name in ("queries", "out", "for_epoch", "overwrite") if chosen[name]]
    if fixed or epoch is not None:
        raise InputError(f"--watch {verb} each dump into its place; {' '.join(fixed) or '--epoch'} names one.")


def _watch(
    watch_run: Callable[..., int], data: str, run: str, options: Any, beam: Sequence[str], as_json: bool
) -> None:
    end_with_trainer()
    made = watch_run(data, run, options, beam, progress=say)
    if as_json:
        print_json({"run": run, "tables": made})


@cli.command()
@json_option
def recipes(as_json: bool) -> None:
    """List the recipes that ship with Extremis.

    \b
    Example:
      extremis recipes
    """
    from trainer.config import load_recipe, recipe_names

    found = {name: load_recipe(name) for name in recipe_names()}
    rows = [
        [name, r.head.kind, r.loss.kind, str(r.negatives.hard), _random_of(r), str(r.train.epochs)]
        for name, r in found.items()
    ]
    table("recipes", ["name", "head", "loss", "hard", "random", "epochs"], rows)
    if as_json:
        print_json({name: recipe.model_dump(mode="json") for name, recipe in found.items()})


@cli.command()
@click.argument("data")
@click.argument("out")
@click.option(
    "--table",
    "number",
    type=click.Choice(["5", "6", "7", "8", "dexml-3", "dexml-4", "mips-1", "mips-2", "lns-4"]),
    default="5",
    show_default=True,
    help="ASTRA's: 5 strategies, 6 hard and random negatives, 7 first epoch with a table, 8 epochs between tables. "
    "DEXML's: dexml-3 mined negatives a query, dexml-4 losses. Figures of MIPS-s: mips-1 the hardest negatives from "
    "scratch, mips-2 how many of them from an index how old. Of LNS: lns-4 ways to choose a softmax's negatives.",
)
@click.option("--recipes", "names", help="These instead, with commas between. Default: the strategies of Table 5.")
@click.option("--only", help="These lines of the comparison alone, by name, with commas between.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change every recipe.")
@click.option("--split", default="test", show_default=True)
@click.option("--retry", is_flag=True, help="Go on with what failed before.")
@json_option
def ablate(
    data: str,
    out: str,
    number: str,
    names: str | None,
    only: str | None,
    overrides: tuple[str, ...],
    split: str,
    retry: bool,
    as_json: bool,
) -> None:
    """Train several recipes on DATA under OUT and compare them: tables and figures of the papers as a command.

    A recipe that is finished already is not trained again, and one that was cut off goes on. OUT gets ablation.json,
    ablation.md and, with the extra report, ablation.html: metrics against time where recipes have a validation split.

    \b
    Examples:
      extremis ablate data/ runs/ablation --set train.epochs=20
      extremis ablate data/ runs/timed --set train.minutes=10 --set train.epochs=40
      extremis ablate data/ runs/ablation --table 8
      extremis ablate data/ runs/losses --table dexml-4 --only softmax,decoupled-softmax
      extremis ablate data/ runs/ablation --recipes astra,renee,lns,mips-s --set validation.split=val
    """
    from extremis.ablation import ablate as ablate_variants
    from extremis.comparisons import COMPARISONS, SHOWN, chosen, strategies

    if names is None:
        comparison = COMPARISONS[number]
        variants, shown = comparison.variants(data, overrides), comparison.shown
    else:
        variants, shown = strategies(parse_names("--recipes", names), overrides), SHOWN
    if only is not None:
        variants = chosen(variants, parse_names("--only", only))
    report = ablate_variants(data, out, variants, split, retry, shown)
    if as_json:
        print_json(report)


@cli.command()
@click.argument("folder", metavar="[DIR]", default="demo")
@click.option("--recipe", default="astra", show_default=True)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change the recipe.")
@json_option
def demo(folder: str, recipe: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """The whole loop on the Tate collection: shard, train, mine beside it, join, evaluate. Writes DIR (default: demo).

    \b
    Example:
      extremis demo demo/
    """
    from extremis.demo import demo as run_demo

    report = run_demo(folder, recipe, overrides)
    if as_json:
        print_json(report)


def parse_propensity(text: str | None) -> tuple[float | None, float | None]:
    """(A, B) of `A,B`. Raises InputError."""
    if text is None:
        return None, None
    try:
        a, b = (float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--propensity {text!r}: expected two numbers A,B, for example 0.55,1.5.") from None
    return a, b


def parse_names(option: str, text: str) -> list[str]:
    """The names of `astra,renee`. Raises InputError where there is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"{option} {text!r}: expected names with commas between, for example astra,renee.")
    return names


def parse_numbers(option: str, text: str) -> tuple[float, ...]:
    """The numbers of `0.5,0.9`. Raises InputError."""
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"{option} {text!r}: expected numbers with commas between, for example 0.5,0.9.") from None


def _random_of(recipe: Any) -> str:
    return "all labels" if recipe.negatives.pool == "all" else f"{recipe.negatives.random} {recipe.negatives.pool}"
