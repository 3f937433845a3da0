"""Finalists of `auto`: recipes trained at full length and fused, and what the held-out rows say of two of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from extremis.console import say, show_activity
from extremis.retention import find_unneeded, remove
from extremis.supervisor import train
from schemas import storage
from schemas.layout import RUN_FILE, RunLayout
from schemas.owners import claimed
from scoring.fitting import fit_fusion
from scoring.linear import LinearRanker
from scoring.options import FitOptions
from trainer.checkpoints import best_step, drop_old_checkpoints
from trainer.evaluation.metrics import Metrics, paired_difference
from trainer.loop import EpochReport
from trainer.methods.recipe import Recipe
from trainer.recipe_files import load_config, validate

METRICS = "nDCG@5", "PSP@5"  # the second only where DATA has propensities
_SURE = 1.96  # standard errors of a difference that is not by chance


@dataclass(frozen=True)
class Finalist:
    """A run at full length in the folder `place`: what training returned, and the `fusion`'s facts.

    `judged`: metrics of the held-out rows, by fused scores and by vectors alone. `peaked_first`: the first epoch was
    the best, by more than chance.
    """

    place: str
    recipe: Recipe
    outcome: dict[str, Any]
    fusion: dict[str, Any]
    judged: dict[str, Metrics]
    peaked_first: bool

    def replaces(self, cheaper: "Finalist") -> tuple[bool, str]:
        """Return whether this finalist replaces a cheaper one, and why: what the same held-out rows have, by text.

        It does if the fused metrics add up to more than one standard error more, and none is lower by more than chance.
        If they differ by less than that, the vectors alone decide in the same way, since they may serve alone.
        """
        told = list[str]()
        for name, metrics in self.judged.items():
            own, other = metrics.contributions(), cheaper.judged[name].contributions()
            names = [each for each in METRICS if each in own]
            now, before = (judged[name].result() for judged in (self.judged, cheaper.judged))
            leads = [paired_difference([own[each]], [other[each]], metrics.texts) for each in names]
            told += [
                f"{each} {now[each]:.2f} instead of {before[each]:.2f} ({lead:+.2f} ± {error:.2f}) by {name}"
                for each, (lead, error) in zip(names, leads, strict=True)
            ]
            gain, error = paired_difference(
                [own[each] for each in names], [other[each] for each in names], metrics.texts
            )
            is_worse = any(lead < -_SURE * by for lead, by in leads)
            if is_worse or abs(gain) > error:
                break
        return gain > error and not is_worse, f"{', '.join(told)} on {len(own[names[0]].achieved):,} held-out rows"


def train_finalist(
    data: str,
    place: str,
    recipe: Recipe,
    ranker: LinearRanker | None,
    seconds: float,
    fits: bool = True,
    **process: Any,
) -> Finalist:
    """Train `recipe` in `place`, unless it is trained, keep what a finished run needs, and fit the fusion if it `fits`.

    `seconds`: limit for fitting a ranker again. `process`: options of `extremis.supervisor:train`.
    """
    layout, scored = RunLayout(place), list[Metrics]()
    if storage.exists(layout.config):
        recipe = validate(load_config(layout.config)["recipe"], place)

    def keep(report: EpochReport) -> bool:
        scored.extend([report.scored] if report.scored else [])
        return True

    with claimed(place, "trained", say) as claim:
        outcome: dict[str, Any] = {"epochs": [], "table_versions": {}}
        if not storage.exists(layout.finished):  # the newest checkpoint of a finished run may be gone
            outcome = train(data, place, recipe, should_continue=keep, **process)
        best = best_step(layout)
        claim.require()
        remove(find_unneeded(place, keep=1))
        drop_old_checkpoints(layout, 0, best)
        facts, judged = dict[str, Any](), dict[str, Metrics]()
        if fits:
            show_activity("learning the weights of the scores")
            to_fit = FitOptions(step=best, device=recipe.train.device)
            manifest, judged = fit_fusion(data, place, to_fit, ranker=ranker, seconds=seconds)
            facts = manifest.parameters
    return Finalist(place, recipe, outcome, facts, judged, peaked_first(scored, recipe.validation.metric))


def peaked_first(scored: Sequence[Metrics], name: str) -> bool:
    """Return whether the first of an epoch's scores each was the best in metric `name`, by more than chance."""
    course = [each.contributions()[name] for each in scored]
    falls = [paired_difference(course[:1], [later], scored[0].texts) for later in course[1:]]
    return bool(falls) and all(fall > _SURE * error for fall, error in falls)


def move_run(place: str, run: str) -> None:
    """Move the files of the run at `place` to RUN; its settings last, so that RUN has no run before it is whole.

    What says that the run is finished goes first: after a crash, the run at `place` is trained again from what is left.
    """
    fs, root = storage.filesystem(place)
    names = sorted(path.removeprefix(root).lstrip("/") for path in fs.find(root))
    first, last = RunLayout("").finished.lstrip("/"), RUN_FILE
    for some in ([first], [name for name in names if name not in (first, last)], [last]):
        storage.move_files(place, run, some)
