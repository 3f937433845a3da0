"""`extremis run`: trains with a miner process."""

import time
from os import fspath
from typing import Annotated, Any

from extremis.command import Option, Progress, command
from extremis.commands import train as training
from extremis.commands.shared import BeamOptions, Place, Recipe, Settings, StartTimeout
from extremis.stopping import GRACE
from schemas.errors import InputError


@command()
def run(
    recipe: Recipe,
    data: Place,
    run: Place,
    *,
    set: Settings = (),
    from_run: training.FromRun | None = None,
    device: training.RecipeDevice | None = None,
    threads: training.Threads | None = None,
    resume: training.Resume = False,
    metrics_port: training.MetricsPort | None = None,
    grace: training.Grace = GRACE,
    metrics_host: training.MetricsHost = training.LOOPBACK,
    minutes: Annotated[float | None, Option(ge=0.1)] = None,
    pretrained: Annotated[str | None, Option(metavar="MODEL")] = None,
    deterministic: bool = False,
    start_timeout: StartTimeout | None = None,
    beam_options: BeamOptions = (),
    progress: Progress = True,
) -> dict[str, Any] | None:
    """Train RECIPE on DATA, with a miner process next to the trainer, and write the results to RUN.

    RECIPE is a name (see `extremis recipes`) or a TOML file. `auto` tries a few recipes on part of DATA, trains the
    best recipe, and learns to combine its scores with scores of label texts, nearby training points and a linear
    ranker. With --from RUN1, `auto` continues with the recipe of RUN1, without trials.

    If a table of hard negatives is late, a later epoch uses the table, unless the recipe waits for tables
    (refresh.stale = "wait"). Options after -- are passed to the miner's Beam pipeline.

    Options:
        minutes: With `auto`: limit for the total time. One trial, and two epochs of the chosen recipe, take place even
            if this takes longer. Default: no limit.
        pretrained: With `auto`: also try the token vectors of this model (a directory or hub name), which must have the
            same tokenizer as DATA.
        deterministic: Wait for each table, so that two runs with the same --threads write the same bytes.

    Examples:
      extremis run auto data/ runs/1 --minutes 10
      extremis run astra data/ runs/2 --set train.epochs=20
      extremis run auto data/2026-11-20/ runs/2026-11-20 --from runs/2026-11-19
    """
    began = time.perf_counter()  # PyTorch takes seconds to load
    recipe, data, run = fspath(recipe), fspath(data), fspath(run)
    process = training.process_options(resume, metrics_port, metrics_host, grace)
    overrides = training.overrides_of(set, device, threads, from_run)
    from trainer.config.load import WAIT_FOR_TABLES, applicable_overrides

    if deterministic and minutes is not None:
        raise InputError(
            "--minutes stops by the clock, so its result cannot be --deterministic. Give only one of the two."
        )
    if recipe != "auto":
        if minutes is not None:
            raise InputError("--minutes works only with `extremis run auto`. For a recipe give --set train.minutes=10.")
        if pretrained is not None:
            raise InputError(
                "--pretrained works only with `extremis run auto`. For a recipe give --set encoder.pretrained=MODEL."
            )
        waits = applicable_overrides(recipe, [WAIT_FOR_TABLES]) if deterministic else []
        return training.train_recipe(recipe, data, run, (*overrides, *waits), process, beam_options)
    if from_run is not None and pretrained is not None:
        raise InputError("--pretrained is for trials, and --from makes no trials. Give only one of the two.")
    from extremis.auto import run_auto

    overrides = (*overrides, WAIT_FOR_TABLES) if deterministic else overrides
    process["pretrained"] = fspath(pretrained or "")
    earlier = fspath(from_run or "")
    return run_auto(data, run, minutes or 0.0, overrides, beam_options, began=began, earlier=earlier, **process)
