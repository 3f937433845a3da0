"""`extremis cluster`: orders queries by balanced clusters."""

from os import fspath
from typing import Any

from extremis.command import Progress, build_options, command
from extremis.commands.shared import BeamOptions, NotNegative, Place, Size, StartTimeout, Url
from extremis.console import output, say
from extremis.miner import end_with_trainer, require_watchable
from pipelines.options import ClusterOptions


@command(ClusterOptions)
def cluster(
    data: Place,
    run: Place,
    *,
    epoch: NotNegative | None = None,
    watch: bool = False,
    queries: Url | None = None,
    for_epoch: int | None = None,
    out: Url | None = None,
    memory: Size | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    size: int | None = None,
    smallest: int | None = None,
    part_rows: int | None = None,
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
) -> dict[str, Any]:
    """Group the training queries into balanced clusters by their embeddings, for batches of similar queries.

    Use this command for recipes with order.cluster above 1, such as `ngame`. Options after -- are passed to Beam.

    Options:
        epoch: Epoch of the dump. Default: the newest complete dump.
        watch: Process every dump as it is completed, until the run is finished.

    Examples:
      extremis cluster data/ runs/1                    the newest dump
      extremis cluster data/ runs/1 --watch            alongside a trainer on any machine
      extremis cluster data/ runs/2 --queries embeddings/ --size 64 --for-epoch 0
      extremis cluster data/ runs/1 --memory 8GiB -- --direct_num_workers=8 --direct_running_mode=multi_processing
    """
    options = build_options(ClusterOptions, locals())
    require_watchable(watch, options, epoch)
    from pipelines import cluster as clustering
    from schemas.layout import RunLayout, list_numbers

    data, run = fspath(data), fspath(run)
    if watch:
        end_with_trainer()
        with output(bars=False):  # another process may show its own
            return {"run": run, "tables": clustering.watch(data, run, options, beam_options, progress=say)}
    manifest = clustering.cluster(data, run, epoch, options, beam_options, say)
    say(f"{manifest.rows:,} queries in {manifest.counters['clusters']:,} clusters, used from {run}")
    tables = RunLayout(run)
    newest = options.out or tables.clusters(list_numbers(tables.clusters_root)[-1], manifest.kind)
    say(f"next: extremis inspect {newest}")
    facts = manifest.model_dump(include={"rows", "counters"})
    return {"digest": manifest.digest, **facts, "clusters": manifest.parameters["clusters"]}
