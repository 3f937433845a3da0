"""`extremis cluster`."""

from typing import Any

import click

from extremis.commands.options import POSITIVE, dump_options, require_watchable, stated
from extremis.console import say, say_lines


@click.command()
@dump_options
@click.option("--size", type=click.IntRange(2), help="C, queries per cluster. Default: the trainer's.")
@click.option("--smallest", type=POSITIVE, help="Smallest part that halving gives. Default: the trainer's.")
@click.option("--part-rows", type=POSITIVE, help="Queries clustered in one piece. Default: from --memory.")
def cluster(data: str, run: str, watch: bool, beam_options: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Publish queries in the order of balanced clusters of their embeddings, so that a stream deals whole clusters.

    For recipes with order.cluster above 1, such as `ngame`. Everything after -- goes to Beam.

    \b
    Examples:
      extremis cluster data/ runs/1                    the newest dump
      extremis cluster data/ runs/1 --watch            beside a trainer, wherever it runs
      extremis cluster data/ runs/2 --queries embeddings/ --size 64 --for-epoch 0
      extremis cluster data/ runs/1 --memory 8GiB -- --direct_num_workers=8 --direct_running_mode=multi_processing
    """
    from extremis.training.miner import end_with_trainer
    from pipelines import cluster as clustering
    from schemas.layout import RunLayout, numbered
    from schemas.options import check

    require_watchable(watch, options)
    epoch = options.pop("epoch")
    cluster_options = check(clustering.ClusterOptions, stated(options))
    if watch:
        end_with_trainer()
        return {"run": run, "tables": clustering.watch(data, run, cluster_options, beam_options, progress=say_lines)}
    manifest = clustering.cluster(data, run, epoch, cluster_options, beam_options, say)
    say(f"{manifest.rows:,} queries in {manifest.counters['clusters']:,} clusters, for training from {run}")
    tables = RunLayout(run)
    newest = options["out"] or tables.clusters(numbered(tables.clusters_root)[-1], manifest.kind)
    say(f"next: extremis inspect {newest}")
    facts = manifest.model_dump(include={"rows", "counters"})
    return {"digest": manifest.digest, **facts, "clusters": manifest.parameters["clusters"]}
