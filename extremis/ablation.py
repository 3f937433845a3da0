"""Several recipes on the same data: ASTRA's Table 5 as a command."""

from collections.abc import Sequence
from typing import Any

from extremis.console import say, table
from extremis.evaluation import evaluate
from extremis.training import train
from schemas import storage
from schemas.layout import RunLayout
from schemas.storage import join
from trainer.config import load_recipe

SHOWN = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")


def ablate(data: str, out: str, names: Sequence[str], overrides: Sequence[str], split: str) -> dict[str, Any]:
    """Train each recipe into OUT/<name> (or resume, or take what is finished), evaluate, and print the comparison."""
    recipes = {name: load_recipe(name, overrides) for name in names}
    report: dict[str, Any] = {}
    for name, recipe in recipes.items():
        run = join(out, name)
        seconds = None
        if not storage.exists(RunLayout(run).finished):
            say(f"{name}: training into {run}")
            outcome = train(data, run, recipe, resume=True, beam_options=())
            seconds = round(sum(epoch["seconds"] for epoch in outcome["epochs"]), 1)
        report[name] = {"run": run, "train_seconds": seconds, **evaluate(data, run, split)}
    rows = [
        [name, *(f"{r['metrics'][m]:.2f}" if m in r["metrics"] else "" for m in SHOWN), _seconds(r)]
        for name, r in report.items()
    ]
    table(f"{split}, %", ["recipe", *SHOWN, "train s"], rows)
    return report


def _seconds(report: dict[str, Any]) -> str:
    return "" if report["train_seconds"] is None else f"{report['train_seconds']:.0f}"
