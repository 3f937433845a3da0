"""`extremis ablate`: trains several recipes on the same data, one after the other, and compares the results."""

import gc
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from extremis.console import format_metric, say
from extremis.evaluation import evaluate
from extremis.reporting.page import build
from extremis.result import Grid
from extremis.supervisor import train
from schemas import storage
from schemas.errors import ClaimedError, ExtremisError, InputError, option
from schemas.layout import ABLATION_PAGE, ABLATION_RESULT, RunLayout, check_name
from schemas.owners import require_output_folder
from schemas.storage import join, read_json, write_json
from schemas.table import Table
from scoring.options import EvaluateOptions
from trainer.methods.recipe import Recipe
from trainer.recipe_files import applicable_overrides, recipe_names
from trainer.settings.resolve import resolve

_KS = (1, 3, 5)
SHOWN_METRICS = [f"{name}@{k}" for name in ("P", "PSP") for k in _KS]
CHARTS = "ablation.html"  # `extremis report` of all runs, if plotly is installed


def load_variants(recipes: Sequence[str], data: str, overrides: Sequence[str]) -> dict[str, Recipe]:
    """Load `recipes` for `data`, each with the applicable `overrides`, by the name of its line in the comparison.

    A recipe is a name, a file, or a folder of files. For a file, the line has the file's name. Raises InputError.
    """
    lines: dict[str, str] = {}
    for recipe in recipes:
        is_file = recipe in recipe_names() or recipe.endswith(".toml")
        names = [] if is_file else [name for name in storage.list_names(recipe) if name.endswith(".toml")]
        for each in [join(recipe, name) for name in names] or [recipe]:
            stem = each.rsplit("/", 1)[-1].removesuffix(".toml")
            lines[check_name(option("recipes"), stem) if each.endswith(".toml") else each] = each
    return {
        line: resolve(recipe, applicable_overrides(recipe, overrides), data).recipe for line, recipe in lines.items()
    }


def ablate(data: str, out: str, variants: Mapping[str, Recipe], split: str, retry: bool) -> tuple[dict[str, Any], Grid]:
    """Train each variant in OUT/<name>, evaluate it on `split`, and write and return a comparison of the metrics.

    Finished variants are not trained again, and interrupted variants continue. Variants that failed earlier are
    trained again only with `retry`. If a variant fails, the others are still compared. Raises InputError if OUT
    contains runs on other data or with other recipes.
    """
    require_output_folder(out, "compared", [data])
    report: dict[str, Any] = {}
    _write_comparison(out, report, split)
    for name, recipe in variants.items():
        report[name] = _train_and_score(data, join(out, name), recipe, split, retry)
        _write_comparison(out, report, split)
    rows = [[name, *_cells(result)] for name, result in report.items()]
    files = [ABLATION_RESULT, ABLATION_PAGE]
    runs = [result["run"] for result in report.values() if result["error"] is None]
    if runs and find_spec("plotly"):
        build(runs, join(out, CHARTS), say, queries=0)
        files.append(CHARTS)
    say(", ".join(join(out, name) for name in files))
    return report, Grid(f"{split}, in %, ± half of the 95 % interval", ["recipe", *SHOWN_METRICS, "train s"], rows)


def _train_and_score(data: str, run: str, recipe: Recipe, split: str, retry: bool) -> dict[str, Any]:
    """Train and score one variant, and return the result; reuse the result of an earlier call if there is one."""
    name = run.rsplit("/", 1)[-1]
    settings, place = recipe.model_dump(mode="json", exclude={"storage", "name"}), join(run, ABLATION_RESULT)
    made_from = {"data": Table.open(data, "data").digest, "recipe": json.loads(json.dumps(settings))}
    earlier = read_json(place) if storage.exists(place) else None
    if earlier is not None and earlier["made_from"] != made_from:
        raise InputError(
            f"{run}: contains a run with this name on other data or with other settings. Choose another OUT, or give "
            f"the {option('set')} options of that run."
        )
    result: dict[str, Any] = {"run": run, "split": split, "error": None, "train_seconds": None}
    if earlier is not None:
        result |= earlier["result"]
        measured = result["split"] == split and {f"P@{k}" for k in _KS} <= result.get("metrics", {}).keys()
        if (measured and not result["error"]) or (result["error"] and not retry):
            say(f"{name}: {'failed' if result['error'] else 'finished'} earlier")
            return result
        result |= {"split": split, "error": None}
    try:
        if not storage.exists(RunLayout(run).finished):
            say(f"{name}: training, in {run}")
            outcome = train(data, run, recipe, resume=True, beam_options=())
            gc.collect()  # a trainer has reference cycles, and would stay in memory while the next trainer runs
            result["train_seconds"] = round(sum(epoch["seconds"] for epoch in outcome["epochs"]), 1)
            result["table_versions"] = {str(epoch): table for epoch, table in outcome["table_versions"].items()}
        result |= evaluate(data, run, EvaluateOptions(split=split, k=_KS))
    except (InputError, ClaimedError):
        raise  # no training has started
    except ExtremisError as error:
        say(f"{name}: {error}")
        result["error"] = str(error)
    write_json(place, {"made_from": made_from, "result": result}, indent=1)
    return result


def _cells(result: Mapping[str, Any]) -> list[str]:
    """Format the metrics, half the width of each interval, and the seconds of training."""
    if result["error"] is not None:
        return ["failed", *[""] * len(SHOWN_METRICS)]
    seconds = result["train_seconds"]
    return [*(format_metric(result, name) for name in SHOWN_METRICS), "" if seconds is None else f"{seconds:.0f}"]


def _write_comparison(out: str, report: Mapping[str, Any], split: str) -> None:
    storage.write_bytes(join(out, ABLATION_RESULT), json.dumps(report, indent=1, sort_keys=True).encode())
    lines = [f"Split {split}: metrics in %, ± half of the 95 % bootstrap interval over texts.", ""]
    lines += ["| recipe | " + " | ".join([*SHOWN_METRICS, "train s"]) + " |", "|---" * (len(SHOWN_METRICS) + 2) + "|"]
    for name, result in report.items():
        lines.append("| " + " | ".join([f"`{name}`", *_cells(result)]) + " |")
    failed = [f"- `{name}` failed: {result['error']}" for name, result in report.items() if result["error"]]
    storage.write_bytes(join(out, ABLATION_PAGE), "\n".join([*lines, *([""] if failed else []), *failed, ""]).encode())
