"""`extremis mine`: hard-negative tables from the dumps of a run."""

from os import fspath
from typing import Any, Literal

from extremis.command import Progress, command, options_of
from extremis.commands.shared import BeamOptions, Device, NotNegative, Place, Size, StartTimeout, Url
from extremis.console import say, say_lines
from extremis.miner import end_with_trainer, require_watchable
from pipelines.options import MineOptions


@command(MineOptions)
def mine(
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
    by: Literal["classifier", "labels"] | None = None,
    vectors: Url | None = None,
    width: int | None = None,
    ranges: int | None = None,
    skip_top: int | None = None,
    window: int | None = None,
    margin: float | None = None,
    relative_margin: float | None = None,
    max_score: float | None = None,
    min_score: float | None = None,
    sample: Literal["top", "uniform", "softmax"] | None = None,
    temperature: float | None = None,
    equal_texts: Literal["off", "equal", "near"] | None = None,
    index: str | None = None,
    target_recall: float | None = None,
    nprobe: int | None = None,
    ef_search: int | None = None,
    refine: int | None = None,
    block_rows: int | None = None,
    query_batch: int | None = None,
    tasks_per_block: int | None = None,
    threads: int | None = None,
    device: Device | None = None,
    audit_queries: int | None = None,
    keep_index: Url | None = None,
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
) -> dict[str, Any]:
    """Make hard-negative tables from the dumps of RUN.

    Everything after -- goes to Beam.

    Options:
        epoch: Epoch of the dump. Default: the newest complete dump.
        watch: Process every dump as it is completed, until the run is finished.

    Examples:
      extremis mine data/ runs/1                       the newest dump
      extremis mine data/ runs/1 --watch               beside a trainer, wherever it runs
      extremis mine data/ runs/1 --memory 8GiB --index IVF4096,PQ32x4fs
      extremis mine data/ runs/1 --by labels --out negatives/theta
      extremis mine data/ runs/1 --skip-top 5 --relative-margin 0.05 --overwrite
    """
    options = options_of(MineOptions, locals())
    require_watchable(watch, options, epoch)
    from pipelines import mine as mining
    from schemas.storage import join

    data, run = fspath(data), fspath(run)
    if watch:
        end_with_trainer()
        return {"run": run, "tables": mining.watch(data, run, options, beam_options, progress=say_lines)}
    manifests = mining.mine(data, run, epoch, options, beam_options, say)
    tables = {name: _report(name, manifest, options.target_recall) for name, manifest in manifests.items()}
    table = join(options.out, next(iter(tables))) if options.out else f"{data} --run {run}"
    say(f"next: extremis inspect {table}")
    return {"run": run, "tables": tables}


def _report(name: str, manifest: Any, target_recall: float) -> dict[str, Any]:
    recall = manifest.quality.get("recall_at_k")
    say(f"{name}: {manifest.rows:,} rows, recall " + ("not measured" if recall is None else f"{recall:.4f}"))
    if recall is not None and recall < target_recall:
        say(f"{name}: below --target-recall {target_recall}: raise --nprobe or --refine, or leave both out")
    return {"digest": manifest.digest, **manifest.model_dump(include={"rows", "counters", "quality"})}
