"""The steps of `extremis run auto`: survey, trials, training with the best recipe on almost all rows, and fusion."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import tomli_w

from extremis.auto import WAITS
from extremis.auto.survey import VARIATIONS, Contender, Survey, contenders, variations
from extremis.auto.trials import METRIC, Trial, TrialData, best_of, holdout_share
from extremis.console import output, say
from extremis.remaining import Remaining
from extremis.spinner import doing
from extremis.supervisor import logged, train
from schemas import storage
from schemas.errors import InputError
from schemas.json_files import read_json, write_json
from schemas.layout import DataLayout, RunLayout, epoch_of, numbered
from schemas.owners.claim import Claim, claimed
from schemas.owners.place import require_place
from schemas.storage import join
from trainer.checkpoints.checkpoint import best_step, drop_old_checkpoints
from trainer.config.load import applicable_overrides, load_config, restore_recipe
from trainer.device import open_device
from trainer.encoders.token_vectors import find_token_vectors
from trainer.evaluation.fitting import REFIT_HOLDOUT, FitOptions, describe_weights, fit_ranker, fit_weights
from trainer.methods.recipe import Recipe
from trainer.settings.resolve import Resolved, measure_rows, resolve
from trainer.stream import ranks_of_environment

FOLDER, REPORT, RECIPE = "trials", "auto.json", "recipe.toml"
_HELD_OUT = 500  # queries held out of the final run: enough to fit the weights of scores, and few for training to lose
_PATIENCE = 2  # validations without a better result before training stops
_OF_TRIALS = 1 / 3  # share of the total time
_LATE = 1.1  # factor by which --minutes may be exceeded
# Time of an epoch of the final run, relative to a trial with as many rows; additional factor with a miner.
_WIDER, _MINED = 1.9, 1.7
_OF_RANKER, _OF_FUSION = 0.3, 0.1  # shares of the remaining time
_RANKER, _FUSION = 3.0, 1.0  # time of the ranker and the fusion in epochs, until it is measured
_LEAST_MINUTES = 0.05  # minimum for a trial


def run_auto(
    data: str,
    run: str,
    minutes: float = 0.0,
    overrides: Sequence[str] = (),
    beam_options: Sequence[str] = (),
    resume: bool = False,
    began: float | None = None,
    pretrained: str = "",
    **process: Any,
) -> dict[str, Any]:
    """Choose a recipe for DATA, and train with it in RUN. `minutes` limits the total time; 0: no limit.

    `pretrained`: a model whose token vectors are also tried, as `encoder.pretrained`.
    `began`: reading of `time.perf_counter` at which the time limit starts; None: now. `process`: options for training
    the final run, as in `extremis.supervisor:train`.
    Returns {"chosen", "trials", "epochs", ...}. Raises ExtremisError.
    """
    require_place(run, "trained", [data])
    began = time.perf_counter() if began is None else began
    remaining = Remaining(60 * minutes - (time.perf_counter() - began) if minutes else math.inf)
    with claimed(run, "trained", say) as claim, logged(run), output(remaining=remaining):
        is_there = storage.exists(RunLayout(run).config)
        _require_able(run, is_there, resume)
        survey = Survey.of(DataLayout(data))
        for line in survey.lines():
            say(line)
        if pretrained:
            find_token_vectors(pretrained, DataLayout(data))  # refuses a model with another tokenizer before any trial
        if is_there:
            recipe = restore_recipe(load_config(RunLayout(run).config)["recipe"], run)
            report, epoch = read_json(join(run, REPORT)), 0.0
        else:
            report, resolved, epoch = _choose(data, run, survey, pretrained, overrides, minutes, remaining)
            facts = measure_rows(resolved.recipe, data)
            texts = f" and {facts.label_texts:,} labels' texts" if facts.label_texts else ""
            held_out = survey.facts.queries - facts.queries
            say(f"training points: {facts.queries:,} queries{texts}; {held_out:,} queries are held out")
            for line in resolved.reasons:
                say(line)
            recipe = resolved.recipe
        spent = time.perf_counter() - began
        doing("fitting a linear ranker on words")
        training = epoch * recipe.train.epochs
        remaining.begin(epoch * _RANKER, lambda own: training + epoch * _FUSION)
        seconds = max(0.0, 60 * minutes - spent) * _OF_RANKER if minutes else math.inf
        ranker = fit_ranker(data, recipe, seconds=seconds)
        if not is_there:
            recipe = _within(recipe, minutes, epoch, time.perf_counter() - began, time.perf_counter() - began - spent)
            _write(run, report, recipe, claim)
        remaining.begin(training, lambda own: epoch * _FUSION)
        if storage.exists(RunLayout(run).finished):  # the newest checkpoint of a finished run may be gone
            outcome: dict[str, Any] = {"epochs": [], "table_versions": {}}
        else:
            outcome = train(data, run, recipe, resume=resume, beam_options=beam_options, **process)
        best = best_step(RunLayout(run))
        _tidy(RunLayout(run), best, claim)
        to_fit = FitOptions(step=best, device=recipe.train.device)
        doing("learning the weights of the scores")
        remaining.begin(epoch * _FUSION, lambda own: 0.0)
        fusion = fit_weights(data, run, to_fit, ranker=ranker, seconds=seconds).parameters
        say(f"{describe_weights(fusion)}; now: extremis evaluate {data} {run}")
        return {**report, **outcome, "fusion": fusion, "seconds": round(time.perf_counter() - began, 1)}


def _require_able(run: str, is_there: bool, resume: bool) -> None:
    """Raise InputError for requests that `auto` cannot fulfil, before anything is written."""
    ranks = ranks_of_environment().ranks
    if ranks > 1:
        raise InputError(
            f"auto tries recipes in one process, but {ranks} processes were launched. Run auto without torchrun, then "
            f"train its recipe {join(run, RECIPE)} with torchrun into another RUN."
        )
    if is_there and not resume:
        raise InputError(f"{run}: a run exists here already. Continue it with --resume, or choose another RUN.")
    if is_there and not storage.exists(join(run, REPORT)):
        raise InputError(
            f"{run}: this run was not started by auto. Continue it with its own recipe, or choose another RUN."
        )


def _choose(
    data: str, run: str, survey: Survey, pretrained: str, overrides: Sequence[str], minutes: float, remaining: Remaining
) -> tuple[dict[str, Any], Resolved, float]:
    """Try the contenders, then variations of the best; return a report, the winning recipe, and seconds per epoch.

    Trials use only a fraction of `minutes` (0: no limit). When this time is used up, no more contenders are tried.
    """
    rows, began = survey.facts.queries, time.perf_counter()
    fitting = _fitting(data, contenders(survey, pretrained), rows, overrides)
    first = next(iter(fitting.values()))
    machine = first.train
    open_device(machine.device)  # raises InputError before anything is written
    trial_data = TrialData.prepare(data, survey, join(run, FOLDER), machine.device, machine.threads)
    trials = list[Trial]()

    def epoch_of(seconds: float, recipe: Recipe) -> float:
        """Estimate the seconds of an epoch of `recipe` over all rows; `seconds`: an epoch of the recipe's trial."""
        return seconds * rows / trial_data.rows * _WIDER * (_MINED if recipe.table_epochs() else 1.0)

    def expect(contender: Contender, to_come: int) -> None:
        """Estimate the remaining time when the trial of `contender` begins, and `to_come` other trials follow."""

        def after(own: float) -> float:
            one = statistics.median([own, *(trial.seconds for trial in trials)])
            best = best_of(trials, trial_data.queries) if trials else None
            recipe = fitting.get(best.contender if best else contender, first)
            epoch = epoch_of(best.epoch if best else own / trial_data.epochs, recipe)
            return to_come * one + epoch * (recipe.train.epochs + _RANKER + _FUSION)

        remaining.begin(statistics.median(trial.seconds for trial in trials) if trials else 0.0, after)

    def try_out(kinds: Sequence[Contender], further: int) -> None:
        for number, contender in enumerate(kinds):
            left = minutes * _OF_TRIALS - (time.perf_counter() - began) / 60
            if trials and minutes and left <= 0:
                say(f"not tried, because no time is left: {contender.name}")
                continue
            best = best_of(trials, trial_data.queries) if trials else None
            to_come = len(kinds) - number - 1 + further
            title = f"trial {len(trials) + 1} of {len(trials) + 1 + to_come}, {contender.name}"
            expect(contender, to_come)
            share = max(left / (to_come + 1), _LEAST_MINUTES) if minutes else 0.0
            trials.append(trial_data.try_out(contender, title, best, share))

    try_out(list(fitting), VARIATIONS)
    best = best_of(trials, trial_data.queries).contender
    weight = _resolve(data, best, rows, overrides).recipe.encoder.model_dump().get("ngram_weight", 1.0)
    try_out(variations(best, weight), 0)
    chosen = best_of(trials, trial_data.queries)
    say(f"chosen: {chosen.contender.name}")
    report: dict[str, Any] = {"chosen": chosen.contender.recipe, "changes": list(chosen.contender.changes)}
    report["trials"] = [trial.facts() for trial in trials]
    resolved = _resolve(data, chosen.contender, rows, overrides)
    return report, resolved, epoch_of(chosen.epoch, resolved.recipe)


def _fitting(data: str, kinds: Sequence[Contender], rows: int, overrides: Sequence[str]) -> dict[Contender, Recipe]:
    """Return the contenders that fit the overrides, with their recipes. Raises InputError if no contender fits."""
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
    """Resolve the contender's recipe for training on all rows except the held-out rows."""
    waits = applicable_overrides(contender.recipe, [WAITS]) if WAITS in overrides else []
    changes = [
        *contender.changes,
        f"data.holdout={holdout_share(rows, _HELD_OUT)}",
        f"validation.metric={METRIC}",
        "checkpoint.keep=1",
        f"validation.patience={_PATIENCE}",
        *(each for each in overrides if each != WAITS),
        *waits,
    ]
    return resolve(contender.recipe, changes, data)


def _within(recipe: Recipe, minutes: float, epoch: float, spent: float, of_ranker: float) -> Recipe:
    """Limit training so that time for the fusion remains within `minutes`; `spent` seconds have passed.

    The fusion embeds all rows once, and may fit the ranker again, which took `of_ranker` seconds. Training takes at
    least two epochs, so that learning rates fall to their final values. Prints a line if these exceed the limit.
    """
    if not minutes:
        return recipe
    left = 60 * minutes - spent - (of_ranker if recipe.data.holdout > REFIT_HOLDOUT else 0.0)
    left -= max(_OF_FUSION * left, _FUSION * epoch)
    needed = minutes + (2 * epoch - left) / 60
    if needed > _LATE * minutes:
        say(
            f"--minutes {minutes:g} is too short: training takes at least two epochs, so the whole run takes about "
            f"{needed:.1f} minutes"
        )
    left = max(0.1, left / 60)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"minutes": left})})


def _tidy(run: RunLayout, best: int | None, claim: Claim) -> None:
    """Remove files that a finished run no longer needs: dumps, older tables, and checkpoints except `best`."""
    claim.require()
    storage.remove(run.dumps, recursive=True)
    drop_old_checkpoints(run, 0, best)
    for epoch in numbered(run.negatives_root)[:-1]:
        storage.remove(epoch_of(run.negatives_root, epoch), recursive=True)


def _write(run: str, report: dict[str, Any], recipe: Recipe, claim: Claim) -> None:
    """Write the chosen recipe and the reasons for the choice; the recipe file can be used like any other recipe."""
    claim.require()
    write_json(join(run, REPORT), report, indent=1)
    storage.write_bytes(join(run, RECIPE), tomli_w.dumps(recipe.model_dump(mode="json")).encode())
    storage.remove(join(run, FOLDER), recursive=True)
