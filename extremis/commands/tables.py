"""`extremis mine`, `cluster` and `embed`: tables made of a run."""

from collections.abc import Callable, Sequence
from typing import Any

import click

from extremis.commands.options import beam_tail, json_option
from extremis.console import print_json, say
from extremis.training.miner import end_with_trainer
from schemas.errors import InputError
from schemas.options import check


@click.command()
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

    options = check(MineOptions, {name: value for name, value in chosen.items() if value is not None})
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


@click.command()
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

    options = check(ClusterOptions, {name: value for name, value in chosen.items() if value is not None})
    if watch:
        _require_watching(chosen, epoch, "clusters")
        _watch(watch_run, data, run, options, beam_options, as_json)
        return
    manifest = cluster_dump(data, run, epoch, options, beam_options, say)
    if as_json:
        facts = {"digest": manifest.digest, "rows": manifest.rows, "counters": manifest.counters}
        print_json({**facts, "clusters": manifest.parameters["clusters"]})


@click.command()
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
    from pipelines.embed import EmbedOptions
    from pipelines.embed import embed as embed_table

    options = check(EmbedOptions, {"what": what, "split": split, "step": step, "dtype": dtype})
    manifest = embed_table(data, run, out, options, beam_options)
    say(f"{out}: {manifest.rows:,} embeddings in {len(manifest.shards)} shards")
    if as_json:
        print_json({"out": out, "digest": manifest.digest, "rows": manifest.rows})


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
