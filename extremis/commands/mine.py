"""`extremis mine`."""

from typing import Any

import click

from extremis.commands.options import NOT_NEGATIVE, POSITIVE, device_option, dump_options, require_watchable, stated
from extremis.console import say, say_lines


@click.command()
@dump_options
@click.option(
    "--by",
    type=click.Choice(["classifier", "labels"]),
    help="Score by classifier vectors or by label embeddings. Default: the trainer's.",
)
@click.option("--vectors", metavar="URL", help="Vectors from `extremis embed --what labels` instead of the dump's.")
@click.option("--width", type=POSITIVE, help="K, hard negatives per query. Default: the trainer's.")
@click.option("--ranges", type=POSITIVE, help="Equal label ranges that give K negatives each (one per rank).")
@click.option("--skip-top", type=NOT_NEGATIVE, help="Number of best-ranked negatives to leave out.")
@click.option("--window", type=POSITIVE, help="Negatives come from ranks [skip-top, window).")
@click.option("--margin", type=float, help="Keep scores below the weakest positive's score minus this.")
@click.option("--relative-margin", type=float, help="The same, as a share of that positive's score.")
@click.option("--index", help="exact, auto, or a Faiss factory string. Default: the trainer's.")
@click.option("--target-recall", type=float, help="Recall to tune nprobe, ef-search and refine to. Default: 0.95.")
@click.option("--nprobe", type=POSITIVE, help="Inverted lists searched per query. Default: tuned.")
@click.option("--ef-search", type=POSITIVE, help="Breadth of an HNSW search. Default: tuned.")
@click.option("--refine", type=POSITIVE, help="Score this many times K candidates exactly. Default: tuned.")
@click.option("--block-rows", type=POSITIVE, help="Vectors in one index at a time. Default: from --memory.")
@click.option("--query-batch", type=POSITIVE, help="Queries searched at a time. Default: from --memory.")
@click.option("--tasks-per-block", type=POSITIVE, help="Work items per block, each with an index. Default: 1.")
@click.option("--threads", type=POSITIVE, help="Faiss threads per worker. Default: all cores.")
@device_option
@click.option("--audit-queries", type=NOT_NEGATIVE, help="Rows to search exactly too. Default: 200 to 1000.")
@click.option("--keep-index", metavar="URL", help="Keep every block's Faiss index under URL, for serving.")
def mine(data: str, run: str, watch: bool, beam_options: tuple[str, ...], **options: Any) -> dict[str, Any]:
    """Make hard-negative tables from the dumps of RUN. Everything after -- goes to Beam.

    \b
    Examples:
      extremis mine data/ runs/1                       the newest dump
      extremis mine data/ runs/1 --watch               beside a trainer, wherever it runs
      extremis mine data/ runs/1 --memory 8GiB --index IVF4096,PQ32x4fs
      extremis mine data/ runs/1 --by labels --out negatives/theta
      extremis mine data/ runs/1 --skip-top 5 --relative-margin 0.05 --overwrite
    """
    from extremis.training.miner import end_with_trainer
    from pipelines import mine as mining
    from schemas.options import check
    from schemas.storage import join

    require_watchable(watch, options)
    epoch = options.pop("epoch")
    mine_options = check(mining.MineOptions, stated(options))
    if watch:
        end_with_trainer()
        return {"run": run, "tables": mining.watch(data, run, mine_options, beam_options, progress=say_lines)}
    manifests = mining.mine(data, run, epoch, mine_options, beam_options, say)
    tables = {name: _report(name, manifest, mine_options.target_recall) for name, manifest in manifests.items()}
    table = join(mine_options.out, next(iter(tables))) if mine_options.out else f"{data} --run {run}"
    say(f"next: extremis inspect {table}")
    return {"run": run, "tables": tables}


def _report(name: str, manifest: Any, target_recall: float) -> dict[str, Any]:
    recall = manifest.quality.get("recall_at_k")
    say(f"{name}: {manifest.rows:,} rows, recall " + ("not measured" if recall is None else f"{recall:.4f}"))
    if recall is not None and recall < target_recall:
        say(f"{name}: below --target-recall {target_recall}: raise --nprobe or --refine, or leave both out")
    return {"digest": manifest.digest, **manifest.model_dump(include={"rows", "counters", "quality"})}
