"""`extremis cluster`."""

from typing import Any

import click

from extremis.commands.options import POSITIVE, dump_options, require_watchable, stated
from extremis.console import print_json, say
from schemas.options import check


@click.command()
@dump_options
@click.option("--size", type=click.IntRange(2), help="C, queries per cluster. Default: the trainer's.")
@click.option("--smallest", type=POSITIVE, help="Smallest part that halving gives. Default: the trainer's.")
@click.option("--part-rows", type=POSITIVE, help="Queries clustered in one piece. Default: from --memory.")
def cluster(
    data: str, run: str, epoch: int | None, watch: bool, as_json: bool, beam_options: tuple[str, ...], **options: Any
) -> None:
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
    from pipelines.cluster import ClusterOptions
    from pipelines.cluster import cluster as cluster_dump
    from pipelines.cluster import watch as watch_run

    cluster_options = check(ClusterOptions, stated(options))
    if watch:
        require_watchable(epoch, options)
        end_with_trainer()
        body: dict[str, Any] = {"run": run, "tables": watch_run(data, run, cluster_options, beam_options, progress=say)}
    else:
        manifest = cluster_dump(data, run, epoch, cluster_options, beam_options, say)
        facts = manifest.model_dump(include={"rows", "counters"})
        body = {"digest": manifest.digest, **facts, "clusters": manifest.parameters["clusters"]}
    if as_json:
        print_json(body)
