"""What stands for a run, a checkpoint and a kind of scores; and why `auto` chose its recipe."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from extremis.auto.trials import METRIC
from schemas.layout import RunLayout
from schemas.table import Table
from trainer.checkpoints.checkpoint import Checkpoint
from trainer.evaluation.fusion_files import KIND, scores_of

_BESIDE = {"texts": "labels' texts", "votes": "votes of training points", "linear": "linear ranker"}


class Standing(NamedTuple):
    """The step and the scores that stand for a run; `fusion`: facts of the fitting, where they are fused."""

    step: int
    scores: str
    fusion: Mapping[str, Any]

    @classmethod
    def of(cls, run: RunLayout, checkpoint: Checkpoint, later: bool) -> "Standing":
        """Read what stands for a run on its own data, or on a `later` version of it. Raises TableError."""
        scores = "classifier" if later else scores_of(run.root, checkpoint.step)
        fusion = Table.open(run.fusion(checkpoint.step), KIND).parameters if scores == "fused" else {}
        return cls(checkpoint.step, scores, fusion)

    @property
    def formula(self) -> str:
        """Say what is added up."""
        weights = [(self.fusion.get(field), name) for field, name in _BESIDE.items()]
        return " + ".join(["vectors", *(f"{weight:.2f} × {name}" for weight, name in weights if weight)])


def explain_choice(report: Mapping[str, Any]) -> str:
    """Say by which figures `auto` chose its recipe; `report`: what it recorded."""
    finished = sorted((t for t in report["trials"] if not t.get("ended")), key=lambda t: -float(t[METRIC]))
    chosen = next(t for t in finished if (t["recipe"], t["changes"]) == (report["chosen"], report["changes"]))
    text = f"auto chose {_name(chosen)}: {METRIC} {chosen[METRIC]:.2f} on queries held out of the trials"
    other = next((trial for trial in finished if trial is not chosen), None)
    if other is None:
        return f"{text}; no other trial went to its end."
    text += f"; the best of the others, {_name(other)}, had {other[METRIC]:.2f}"
    unclear = ", which is not clearly more: hard negatives, which no trial has, lift a dual encoder most"
    return f"{text}{unclear if other[METRIC] > chosen[METRIC] else ''}."


def _name(trial: Mapping[str, Any]) -> str:
    return " with ".join([trial["recipe"], *filter(None, [", ".join(trial["changes"])])])
