"""`extremis train`: trains without starting a miner; it can use tables from a miner that runs elsewhere."""

from collections.abc import Sequence
from os import fspath
from typing import Annotated, Any

from extremis.command import Option, Progress, changes, command
from extremis.commands.shared import DEVICE, Place, Recipe, Settings, with_settings
from extremis.console import say
from extremis.stopping import GRACE
from schemas.process import limit_openmp_threads

LOOPBACK = "127.0.0.1"
_FROM = "Start from the encoder and the label vectors of RUN1, a run on an earlier version of DATA."
_THREADS = "Number of threads; the miner uses the same number. Default: the cores that this process may use."

RecipeDevice = Annotated[
    str,
    DEVICE,
    Option("Device to use. Default: as in the recipe; usually auto, which takes a GPU if the machine has one."),
]
FromRun = Annotated[Place, Option(_FROM, metavar="RUN1", flags=("--from",))]
Threads = Annotated[int, Option(_THREADS, ge=1)]
Resume = Annotated[
    bool, Option("Continue from the newest checkpoint of RUN. Without a checkpoint, start from the beginning.")
]
MetricsPort = Annotated[int, Option("Port that serves metrics for Prometheus. 0: any free port.", ge=0, le=65535)]
Grace = Annotated[
    float, Option("Seconds for a checkpoint after SIGTERM or SIGHUP; Ctrl-C has no limit. 0: end at once.", ge=0)
]
MetricsHost = Annotated[str, Option("Address that the metrics port listens on.")]


@command()
def train(
    recipe: Recipe,
    data: Place,
    run: Place,
    *,
    set: Settings = (),
    from_run: FromRun | None = None,
    device: RecipeDevice | None = None,
    threads: Threads | None = None,
    resume: Resume = False,
    metrics_port: MetricsPort | None = None,
    grace: Grace = GRACE,
    metrics_host: MetricsHost = LOOPBACK,
    progress: Progress = True,
) -> dict[str, Any] | None:
    """Train RECIPE on DATA, and write the results to RUN. This starts no miner, but a miner may run elsewhere.

    RECIPE is a name (see `extremis recipes`) or a TOML file.

    Examples:
      extremis train astra data/ runs/1 --set train.epochs=30
      extremis train astra data/ runs/1 --resume
      extremis train astra data/2/ runs/2 --from runs/1
      torchrun --nproc-per-node 2 -m extremis train astra data/ runs/1
    """
    process = process_options(resume, metrics_port, metrics_host, grace)
    overrides = overrides_of(set, device, threads, from_run)
    return train_recipe(fspath(recipe), fspath(data), fspath(run), overrides, process)


def overrides_of(set: Settings, device: str | None, threads: int | None, from_run: Place | None) -> tuple[str, ...]:
    """Return the changes to the recipe, including those by other options; also set the threads of this process."""
    if threads is not None:
        limit_openmp_threads(threads)
    start_from = from_run and fspath(from_run)
    return with_settings(changes(set), train__device=device, train__threads=threads, train__start_from=start_from)


def process_options(resume: bool, port: int | None, host: str, grace: float) -> dict[str, Any]:
    """Return options for the training process that do not affect the results of the run."""
    return {"resume": resume, "metrics": None if port is None else (host, port), "grace": grace}


def train_recipe(
    recipe: str,
    data: str,
    run: str,
    overrides: Sequence[str],
    process: dict[str, Any],
    beam_options: Sequence[str] | None = None,
) -> dict[str, Any] | None:
    """Train on the ranks that torchrun launched; rank 0 returns the outcome.

    `beam_options`: options for the miner; None: no miner.
    """
    from trainer.config.load import load_recipe

    load_recipe(recipe, overrides)  # a typo is reported before PyTorch is loaded

    from extremis.supervisor import carry, joined_ranks
    from extremis.supervisor import train as train_watched
    from trainer.settings.resolve import resolve

    with joined_ranks() as group:
        resolved = resolve(recipe, overrides, data)
        for line in resolved.lines(data) if group.first else ():
            say(line)
        outcome = train_watched(data, run, resolved.recipe, beam_options=beam_options, group=group, **process)
    if not group.first:
        return None
    if earlier := resolved.recipe.train.start_from:  # when no other rank waits for this rank
        carry(data, run, earlier, resolved.recipe.train.device)
    say(f"{run}: trained; next: extremis evaluate {data} {run}")
    return {"run": run, **outcome}
