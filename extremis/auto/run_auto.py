"""The run of `auto`: survey, trials, the best recipe trained on all rows but a few, and its scores fused."""

import time
from collections.abc import Sequence
from typing import Any

import tomli_w

from extremis.auto.survey import VARIATIONS, Contender, Survey, contenders, variations
from extremis.auto.trials import METRIC, SHOWN, Trial, TrialData, best_of, holdout_share
from extremis.console import say, table
from extremis.supervisor import train
from schemas import storage
from schemas.errors import InputError
from schemas.json_files import read_json, write_json
from schemas.layout import DataLayout, RunLayout, epoch_of, numbered
from schemas.owners.claim import claimed
from schemas.owners.place import require_place
from schemas.storage import join
from trainer.checkpoints.checkpoint import best_step, drop_old_checkpoints
from trainer.config import Recipe, load_config, restore_recipe
from trainer.device import open_device
from trainer.evaluation.fitting import FitOptions, describe_weights, fit_weights
from trainer.settings.resolve import Resolved, resolve
from trainer.stream import ranks_of_environment

FOLDER, REPORT, RECIPE = "trials", "auto.json", "recipe.toml"
_HELD_OUT = 500  # queries that the final run goes without: enough for the weights of scores, and few to lose
_PATIENCE = 2  # validations without a better one
_OF_TRIALS = 1 / 3  # of the time for all
_LEAST_MINUTES = 0.05  # of a trial


def run_auto(
    data: str,
    run: str,
    minutes: float = 0.0,
    overrides: Sequence[str] = (),
    beam_options: Sequence[str] = (),
    resume: bool = False,
    **process: Any,
) -> dict[str, Any]:
    """Choose a recipe for DATA and train it into RUN; `minutes` for all of it, 0: as long as it takes.

    `process`: options of the final run's training, as of `extremis.supervisor:train`.
    Returns {"chosen", "trials", "epochs", ...}. Raises ExtremisError.
    """
    require_place(run, "trained", [data])
    with claimed(run, "trained", say):
        began = time.perf_counter()
        is_there = storage.exists(RunLayout(run).config)
        _require_able(run, is_there, resume)
        survey = Survey.of(DataLayout(data))
        for line in survey.lines():
            say(line)
        if is_there:
            recipe = restore_recipe(load_config(RunLayout(run).config)["recipe"], run)
            report = read_json(join(run, REPORT))
        else:
            report, resolved = _choose(data, run, survey, overrides, minutes)
            for line in resolved.lines(data):
                say(line)
            recipe = _within(resolved.recipe, minutes, time.perf_counter() - began)
            _write(run, report, recipe)
        if storage.exists(RunLayout(run).finished):  # its newest checkpoint may be gone
            outcome: dict[str, Any] = {"epochs": [], "table_versions": {}}
        else:
            outcome = train(data, run, recipe, resume=resume, beam_options=beam_options, **process)
        best = best_step(RunLayout(run))
        _tidy(RunLayout(run), best)
        to_fit = FitOptions(step=best, device=recipe.train.device)
        fusion = fit_weights(data, run, to_fit).parameters
        say(f"{describe_weights(fusion)}; now: extremis evaluate {data} {run} --scores fused")
        return {**report, **outcome, "fusion": fusion, "seconds": round(time.perf_counter() - began, 1)}


def _require_able(run: str, is_there: bool, resume: bool) -> None:
    """Refuse what `auto` cannot do, before anything is made. Raises InputError."""
    ranks = ranks_of_environment().ranks
    if ranks > 1:
        raise InputError(
            f"auto tries recipes in one process, and {ranks} were launched. Run it without torchrun, then train "
            f"{join(run, RECIPE)} with it into another RUN."
        )
    if is_there and not resume:
        raise InputError(f"{run}: there is a run here already. Go on with --resume, or choose another RUN.")
    if is_there and not storage.exists(join(run, REPORT)):
        raise InputError(f"{run}: this run was not started by auto. Go on with its own recipe, or choose another RUN.")


def _choose(
    data: str, run: str, survey: Survey, overrides: Sequence[str], minutes: float
) -> tuple[dict[str, Any], Resolved]:
    """Try the contenders, then variations of the best, and return a report and the recipe of the winner.

    Of `minutes` (0: no limit) trials have a share; contenders that find no time left are not tried.
    """
    rows, began = survey.facts.queries, time.perf_counter()
    fitting = _fitting(data, contenders(survey), rows, overrides)
    device = next(iter(fitting.values())).train.device
    open_device(device)  # raises InputError before anything is made
    trial_data, trials = TrialData.prepare(data, survey, join(run, FOLDER), device), list[Trial]()

    def try_out(kinds: Sequence[Contender], to_come: int) -> None:
        for number, contender in enumerate(kinds):
            left = minutes * _OF_TRIALS - (time.perf_counter() - began) / 60
            if trials and minutes and left <= 0:
                say(f"not tried: {contender.name}, for lack of time")
                continue
            share = max(left / (len(kinds) - number + to_come), _LEAST_MINUTES) if minutes else 0.0
            trials.append(trial_data.try_out(contender, best_of(trials, trial_data.queries) if trials else None, share))

    try_out(list(fitting), VARIATIONS)
    best = best_of(trials, trial_data.queries).contender
    weight = _resolve(data, best, rows, overrides).recipe.encoder.model_dump().get("ngram_weight", 1.0)
    try_out(variations(best, weight), 0)
    chosen = best_of(trials, trial_data.queries)
    _show(trials, chosen)
    report: dict[str, Any] = {"chosen": chosen.contender.recipe, "changes": list(chosen.contender.changes)}
    report["trials"] = [trial.facts() for trial in trials]
    return report, _resolve(data, chosen.contender, rows, overrides)


def _fitting(data: str, kinds: Sequence[Contender], rows: int, overrides: Sequence[str]) -> dict[Contender, Recipe]:
    """Return the contenders that the overrides fit, each with its recipe. Raises InputError where they fit none."""
    fitting, faults = dict[Contender, Recipe](), list[InputError]()
    for contender in kinds:
        try:
            fitting[contender] = _resolve(data, contender, rows, overrides).recipe
        except InputError as error:
            faults.append(error)
    if not fitting:
        raise faults[0]
    for fault in faults:
        say(f"not tried: {fault}")
    return fitting


def _resolve(data: str, contender: Contender, rows: int, overrides: Sequence[str]) -> Resolved:
    """Return the contender's recipe for all rows but those held out."""
    changes = [
        *contender.changes,
        f"data.holdout={holdout_share(rows, _HELD_OUT)}",
        f"validation.metric={METRIC}",
        "checkpoint.keep=1",
        f"validation.patience={_PATIENCE}",
        *overrides,
    ]
    return resolve(contender.recipe, changes, data)


def _within(recipe: Recipe, minutes: float, seconds: float) -> Recipe:
    """Let training end when `minutes` are over, of which `seconds` are."""
    if not minutes:
        return recipe
    left = max(0.1, minutes - seconds / 60)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"minutes": left})})


def _tidy(run: RunLayout, best: int | None) -> None:
    """Remove what a finished run needs no more: dumps, tables of negatives but the newest, checkpoints but `best`."""
    with claimed(run.root, "trained") as claim:  # held already
        claim.require()
        storage.remove(run.dumps, recursive=True)
        drop_old_checkpoints(run, 0, best)
        for epoch in numbered(run.negatives_root)[:-1]:
            storage.remove(epoch_of(run.negatives_root, epoch), recursive=True)


def _write(run: str, report: dict[str, Any], recipe: Recipe) -> None:
    """Write what was chosen and why, in place of the trials; the recipe can be trained again as any other."""
    with claimed(run, "trained") as claim:  # held already
        claim.require()
        write_json(join(run, REPORT), report, indent=1)
        storage.write_bytes(join(run, RECIPE), tomli_w.dumps(recipe.model_dump(mode="json")).encode())
        storage.remove(join(run, FOLDER), recursive=True)


def _show(trials: Sequence[Trial], best: Trial) -> None:
    rows = []
    for trial in trials:
        name = trial.contender.name + (" *" if trial is best else "")
        seconds = f"{trial.seconds:.0f}" + (", ended" if trial.ended else "")
        rows.append([name, *(f"{trial.metrics[n]:.2f}" for n in SHOWN), seconds])
    table("trials on an excerpt of the data (*: chosen)", ["", *SHOWN, "seconds"], rows)
