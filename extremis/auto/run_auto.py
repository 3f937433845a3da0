"""The steps of `extremis run auto`: survey, trials, training with the best recipe on almost all rows, and fusion."""

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import tomli_w

from extremis.auto import WAIT_FOR_TABLES
from extremis.auto.survey import VARIATIONS, Contender, Survey, contenders, variations
from extremis.auto.trials import METRIC, Trial, TrialData, best_trial, holdout_share
from extremis.console import output, say
from extremis.remaining_time import RemainingTime
from extremis.spinner import show_activity
from extremis.supervisor import carry, logged, train
from schemas import storage
from schemas.errors import InputError
from schemas.json_files import read_json, write_json
from schemas.layout import DataLayout, RunLayout, epoch_folder, list_numbers
from schemas.manifest import is_published
from schemas.owners.claim import Claim, claimed
from schemas.owners.outputs import require_output_folder
from schemas.storage import join
from schemas.table import Table
from trainer.checkpoints.checkpoint import best_step, drop_old_checkpoints
from trainer.config.load import applicable_overrides, load_config, read_recipe, validate
from trainer.device import open_device
from trainer.encoders.token_vectors import find_token_vectors
from trainer.evaluation.fitting import REFIT_HOLDOUT, FitOptions, describe_weights, fit_ranker, fit_weights
from trainer.evaluation.fusion_files import scored_step
from trainer.methods.recipe import Recipe
from trainer.model import find_earlier
from trainer.settings.resolve import Resolved, measure_rows, resolve
from trainer.stream import ranks_of_environment

TRIALS_FOLDER, AUTO_REPORT, RECIPE_FILE = "trials", "auto.json", "recipe.toml"
_HELD_OUT = 500  # queries held out of the final run: enough to fit the weights of scores, and few for training to lose
_PATIENCE = 2  # validations without a better result before training stops
_TRIALS_SHARE = 1 / 3  # share of the total time
_OVERRUN = 1.1  # factor by which --minutes may be exceeded
# Time of an epoch of the final run, relative to a trial with as many rows; additional factor with a miner.
_WIDTH_FACTOR, _MINER_FACTOR = 1.9, 1.7
_RANKER_SHARE, _FUSION_SHARE = 0.3, 0.1  # shares of the remaining time
_RANKER_EPOCHS, _FUSION_EPOCHS = 3.0, 1.0  # time of the ranker and the fusion in epochs, until it is measured
_MIN_TRIAL_MINUTES = 0.05  # minimum for a trial


def run_auto(
    data: str,
    run: str,
    minutes: float = 0.0,
    overrides: Sequence[str] = (),
    beam_options: Sequence[str] = (),
    resume: bool = False,
    began: float | None = None,
    pretrained: str = "",
    earlier: str = "",
    **process: Any,
) -> dict[str, Any]:
    """Choose a recipe for DATA, and train with it in RUN. `minutes` limits the total time; 0: no limit.

    `earlier`: a run whose recipe is trained instead, as an update of this run; its fusion is fitted again.
    `pretrained`: a model whose token vectors are also tried, as `encoder.pretrained`.
    `began`: reading of `time.perf_counter` at which the time limit starts; None: now. `process`: options for training
    the final run, as in `extremis.supervisor:train`.
    Returns {"chosen", "trials", "epochs", ...}. Raises ExtremisError.
    """
    require_output_folder(run, "trained", [data])
    began = time.perf_counter() if began is None else began
    remaining = RemainingTime(60 * minutes - (time.perf_counter() - began) if minutes else math.inf)
    with claimed(run, "trained", say) as claim, logged(run), output(remaining=remaining):
        run_exists = storage.exists(RunLayout(run).config)
        _check_request(run, run_exists, resume)
        survey = Survey.of(DataLayout(data))
        for line in survey.lines():
            say(line)
        if pretrained:
            find_token_vectors(pretrained, DataLayout(data))  # refuses a model with another tokenizer before any trial
        report, epoch, again = dict[str, Any](), 0.0, dict[str, Any]()
        if run_exists:
            recipe = validate(load_config(RunLayout(run).config)["recipe"], run)
            report = read_json(join(run, AUTO_REPORT))
        else:
            if earlier:
                again, resolved = _continue(data, earlier, overrides)
            else:
                report, resolved, epoch = _choose(data, run, survey, pretrained, overrides, minutes, remaining)
            facts = measure_rows(resolved.recipe, data)
            say(f"training on {facts.described_points}; {survey.facts.queries - facts.queries:,} points are held out")
            for line in resolved.reasons:
                say(line)
            recipe = resolved.recipe
        spent = time.perf_counter() - began
        fits = not recipe.train.start_from or _refits_fusion(data, recipe)
        show_activity("fitting a linear ranker on words")
        training = epoch * recipe.train.epochs
        remaining.begin(epoch * _RANKER_EPOCHS, lambda own: training + epoch * _FUSION_EPOCHS)
        seconds = max(0.0, 60 * minutes - spent) * _RANKER_SHARE if minutes else math.inf
        ranker = fit_ranker(data, recipe, seconds=seconds) if fits else None
        if not run_exists:
            recipe = _limit_training(
                recipe, minutes, epoch, time.perf_counter() - began, time.perf_counter() - began - spent
            )
            _write_choice(run, report, again or recipe.model_dump(mode="json"), claim)
        remaining.begin(training, lambda own: epoch * _FUSION_EPOCHS)
        if storage.exists(RunLayout(run).finished):  # the newest checkpoint of a finished run may be gone
            outcome: dict[str, Any] = {"epochs": [], "table_versions": {}}
        else:
            outcome = train(data, run, recipe, resume=resume, beam_options=beam_options, **process)
        best = best_step(RunLayout(run))
        _remove_leftovers(RunLayout(run), best, claim)
        if not fits:
            carry(data, run, recipe.train.start_from, recipe.train.device)
            say(f"{run}: trained; next: extremis evaluate {data} {run}")
            return {**outcome, "seconds": round(time.perf_counter() - began, 1)}
        to_fit = FitOptions(step=best, device=recipe.train.device)
        show_activity("learning the weights of the scores")
        remaining.begin(epoch * _FUSION_EPOCHS, lambda own: 0.0)
        fusion = fit_weights(data, run, to_fit, ranker=ranker, seconds=seconds).parameters
        say(f"{describe_weights(fusion)}; next: extremis evaluate {data} {run}")
        return {**report, **outcome, "fusion": fusion, "seconds": round(time.perf_counter() - began, 1)}


def _check_request(run: str, run_exists: bool, resume: bool) -> None:
    """Raise InputError for requests that `auto` cannot fulfil, before anything is written."""
    ranks = ranks_of_environment().ranks
    if ranks > 1:
        raise InputError(
            f"auto tries recipes in one process, but {ranks} processes were launched. Run auto without torchrun, then "
            f"train its recipe {join(run, RECIPE_FILE)} with torchrun into another RUN."
        )
    if run_exists and not resume:
        raise InputError(f"{run}: a run exists here already. Continue it with --resume, or choose another RUN.")
    if run_exists and not storage.exists(join(run, AUTO_REPORT)):
        raise InputError(
            f"{run}: this run was not started by auto. Continue it with its own recipe, or choose another RUN."
        )


def _choose(
    data: str,
    run: str,
    survey: Survey,
    pretrained: str,
    overrides: Sequence[str],
    minutes: float,
    remaining: RemainingTime,
) -> tuple[dict[str, Any], Resolved, float]:
    """Try the contenders, then variations of the best; return a report, the winning recipe, and seconds per epoch.

    Trials use only a fraction of `minutes` (0: no limit). When this time is used up, no more contenders are tried.
    """
    rows, began = survey.facts.queries, time.perf_counter()
    fitting = _applicable_contenders(data, contenders(survey, pretrained), rows, overrides)
    first = next(iter(fitting.values()))
    machine = first.train
    open_device(machine.device)  # raises InputError before anything is written
    trial_data = TrialData.prepare(data, survey, join(run, TRIALS_FOLDER), machine.device, machine.threads)
    trials = list[Trial]()

    def epoch_seconds(seconds: float, recipe: Recipe) -> float:
        """Estimate the seconds of an epoch of `recipe` over all rows; `seconds`: an epoch of the recipe's trial."""
        return seconds * rows / trial_data.rows * _WIDTH_FACTOR * (_MINER_FACTOR if recipe.table_epochs() else 1.0)

    def expect(contender: Contender, to_come: int) -> None:
        """Estimate the remaining time when the trial of `contender` begins, and `to_come` other trials follow."""

        def after(own: float) -> float:
            one = statistics.median([own, *(trial.seconds for trial in trials)])
            best = best_trial(trials, trial_data.queries) if trials else None
            recipe = fitting.get(best.contender if best else contender, first)
            epoch = epoch_seconds(best.epoch if best else own / trial_data.epochs, recipe)
            return to_come * one + epoch * (recipe.train.epochs + _RANKER_EPOCHS + _FUSION_EPOCHS)

        remaining.begin(statistics.median(trial.seconds for trial in trials) if trials else 0.0, after)

    def run_trials(kinds: Sequence[Contender], further: int) -> None:
        for number, contender in enumerate(kinds):
            left = minutes * _TRIALS_SHARE - (time.perf_counter() - began) / 60
            if trials and minutes and left <= 0:
                say(f"not tried, because no time is left: {contender.name}")
                continue
            best = best_trial(trials, trial_data.queries) if trials else None
            to_come = len(kinds) - number - 1 + further
            title = f"trial {len(trials) + 1} of {len(trials) + 1 + to_come}, {contender.name}"
            expect(contender, to_come)
            share = max(left / (to_come + 1), _MIN_TRIAL_MINUTES) if minutes else 0.0
            trials.append(trial_data.run_trial(contender, title, best, share))

    run_trials(list(fitting), VARIATIONS)
    best = best_trial(trials, trial_data.queries).contender
    weight = _resolve(data, best, rows, overrides).recipe.encoder.model_dump().get("ngram_weight", 1.0)
    run_trials(variations(best, weight), 0)
    chosen = best_trial(trials, trial_data.queries)
    say(f"chosen: {chosen.contender.name}")
    if minutes and len(trials) == 1:
        say("odd: no other recipe was tried. Raise --minutes to compare recipes")
    report: dict[str, Any] = {"chosen": chosen.contender.recipe, "changes": list(chosen.contender.changes)}
    report["trials"] = [trial.to_json() for trial in trials]
    resolved = _resolve(data, chosen.contender, rows, overrides)
    return report, resolved, epoch_seconds(chosen.epoch, resolved.recipe)


def _applicable_contenders(
    data: str, kinds: Sequence[Contender], rows: int, overrides: Sequence[str]
) -> dict[Contender, Recipe]:
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
    waits = applicable_overrides(contender.recipe, [WAIT_FOR_TABLES]) if WAIT_FOR_TABLES in overrides else []
    changes = [
        *contender.changes,
        f"data.holdout={holdout_share(rows, _HELD_OUT)}",
        f"validation.metric={METRIC}",
        "checkpoint.keep=1",
        f"validation.patience={_PATIENCE}",
        *(each for each in overrides if each != WAIT_FOR_TABLES),
        *waits,
    ]
    return resolve(contender.recipe, changes, data)


def _continue(data: str, earlier: str, overrides: Sequence[str]) -> tuple[dict[str, Any], Resolved]:
    """Return the recipe of the run `earlier`, from scratch and as an update. Raises InputError, TableError."""
    recipe, _, _ = find_earlier(DataLayout(data), RunLayout(earlier))
    source = _find_recipe(earlier)
    resolved = resolve(source, ["train.minutes=0", f"data.holdout={recipe.data.holdout}", *overrides], data)
    say(f"continues {earlier} with its recipe, {recipe.title}, without trials")
    return read_recipe(source), resolved


def _find_recipe(run: str) -> str:
    """Return the file with the recipe of a run, or of the first run that it continues. Raises InputError."""
    kept, config = join(run, RECIPE_FILE), RunLayout(run).config
    if storage.exists(kept):
        return kept
    if not storage.exists(config):
        raise InputError(f"{run}: this run began the series, and is gone with its recipe. Give the recipe, not auto.")
    earlier = load_config(config)["recipe"]["train"].get("start_from")
    return _find_recipe(earlier) if earlier else config


def _refits_fusion(data: str, recipe: Recipe) -> bool:
    """Return whether the fusion of the earlier run is fitted again: it needs rows that the run is not trained on."""
    earlier = recipe.train.start_from
    _, before, _ = find_earlier(DataLayout(data), RunLayout(earlier), scored_step(RunLayout(earlier)))
    if not is_published(RunLayout(earlier).fusion(before.step)):
        say(f"{earlier} has no fusion, so no fusion is fitted")
        return False
    refits = bool(recipe.data.holdout) or "queries/val" in Table.open(data, "data").parents
    kept = "is kept, because no rows are held out and there is no split val"
    say(f"the fusion of {earlier} {'is fitted again, with ranker and memory' if refits else kept}")
    return refits


def _limit_training(recipe: Recipe, minutes: float, epoch: float, spent: float, of_ranker: float) -> Recipe:
    """Limit training so that time for the fusion remains within `minutes`; `spent` seconds have passed.

    The fusion embeds all rows once, and may fit the ranker again, which took `of_ranker` seconds. Training takes at
    least two epochs, so that learning rates fall to their final values. Prints a line if these exceed the limit.
    """
    if not minutes:
        return recipe
    left = 60 * minutes - spent - (of_ranker if recipe.data.holdout > REFIT_HOLDOUT else 0.0)
    left -= max(_FUSION_SHARE * left, _FUSION_EPOCHS * epoch)
    needed = minutes + (2 * epoch - left) / 60
    if needed > _OVERRUN * minutes:
        say(
            f"--minutes {minutes:g} is too short: training takes at least two epochs, so the whole run takes about "
            f"{needed:.1f} minutes"
        )
    left = max(0.1, left / 60)
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"minutes": left})})


def _remove_leftovers(run: RunLayout, best: int | None, claim: Claim) -> None:
    """Remove files that a finished run no longer needs: dumps, older tables, and checkpoints except `best`."""
    claim.require()
    storage.remove(run.dumps, recursive=True)
    drop_old_checkpoints(run, 0, best)
    for epoch in list_numbers(run.negatives_root)[:-1]:
        storage.remove(epoch_folder(run.negatives_root, epoch), recursive=True)


def _write_choice(run: str, report: dict[str, Any], recipe: dict[str, Any], claim: Claim) -> None:
    """Write the chosen recipe and the reasons for the choice; the recipe file can be used like any other recipe."""
    claim.require()
    write_json(join(run, AUTO_REPORT), report, indent=1)
    storage.write_bytes(join(run, RECIPE_FILE), tomli_w.dumps(recipe).encode())
    storage.remove(join(run, TRIALS_FOLDER), recursive=True)
