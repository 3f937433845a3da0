"""Several recipes on the same data, trained one after the other and compared."""

import gc
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from extremis.ablation.comparisons import SHOWN, Variant
from extremis.console import say, table
from extremis.evaluation import evaluate
from extremis.report.build import Options, build
from extremis.training.train import train
from schemas import storage
from schemas.errors import ExtremisError, InputError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from schemas.storage import join

RESULT = "ablation.json"  # of one run in its RUN, of all of them in OUT
PAGE = "ablation.md"
CHARTS = "ablation.html"  # `extremis report` of all of them, where plotly is installed


def ablate(
    data: str,
    out: str,
    variants: Sequence[Variant],
    split: str,
    retry: bool = False,
    shown: Sequence[str] = SHOWN,
) -> dict[str, Any]:
    """Train each variant into OUT/<name>, evaluate it on `split`, print the comparison of `shown` metrics, write it.

    What is finished is not trained again, what was cut off goes on, what failed is left as it is unless `retry`: the
    others are compared all the same. Raises InputError where OUT holds runs on other data or of other recipes.
    """
    report: dict[str, Any] = {}
    for variant in variants:
        report[variant.name] = _one(data, join(out, variant.name), variant, split, retry, shown)
        _write(out, report, split, shown)
    rows = [[name, *_cells(one, shown)] for name, one in report.items()]
    table(f"{split}, %, with half of a 95 % interval", ["recipe", *shown, "train s"], rows)
    written = [RESULT, PAGE]
    done = [one["run"] for one in report.values() if one["error"] is None]
    if done and find_spec("plotly"):
        build(done, join(out, CHARTS), Options(queries=0), say)
        written.append(CHARTS)
    say(", ".join(join(out, name) for name in written))
    return report


def _one(data: str, run: str, variant: Variant, split: str, retry: bool, shown: Sequence[str]) -> dict[str, Any]:
    """What came of one variant: trained now, or before."""
    ks = sorted({int(name.partition("@")[2]) for name in shown})
    recipe = variant.recipe.model_dump(mode="json", exclude={"storage", "method"})
    made_from = {"data": open_manifest(data, "data").digest, "recipe": json.loads(json.dumps(recipe))}
    known = _known(run)
    if known is not None and known["made_from"] != made_from:
        raise InputError(
            f"{run}: holds a run of this name on other data or with other settings. Choose another OUT, or give the "
            "same --set options as before."
        )
    result: dict[str, Any] = {"run": run, "split": split, "error": None, "train_seconds": None}
    if known is not None:
        result |= known["result"]
        measured = result["split"] == split and {f"P@{k}" for k in ks} <= result.get("metrics", {}).keys()
        if (measured and not result["error"]) or (result["error"] and not retry):
            say(f"{variant.name}: {'failed' if result['error'] else 'finished'} before")
            return result
        result |= {"split": split, "error": None}
    try:
        if not storage.exists(RunLayout(run).finished):
            say(f"{variant.name}: training into {run}")
            outcome = train(data, run, variant.recipe, resume=True, beam_options=())
            gc.collect()  # a trainer is a cycle: the next would be beside its rows in memory
            result["train_seconds"] = round(sum(epoch["seconds"] for epoch in outcome["epochs"]), 1)
            result["table_versions"] = {str(epoch): made for epoch, made in outcome["table_versions"].items()}
        result |= evaluate(data, run, split, ks=ks)
    except InputError:
        raise  # wrong use: nothing was tried
    except ExtremisError as error:
        say(f"{variant.name}: {error}")
        result["error"] = str(error)
    body = json.dumps({"made_from": made_from, "result": result}, indent=1, sort_keys=True)
    storage.write_bytes(join(run, RESULT), body.encode())
    return result


def _known(run: str) -> dict[str, Any] | None:
    try:
        body: dict[str, Any] = json.loads(storage.read_bytes(join(run, RESULT)))
    except FileNotFoundError:
        return None
    return body


def _cells(one: Mapping[str, Any], shown: Sequence[str]) -> list[str]:
    """Metrics with half of their intervals, and the seconds of training."""
    if one["error"] is not None:
        return ["failed", *[""] * len(shown)]
    cells = []
    for name in shown:
        value = one["metrics"].get(name)
        low, high = one["intervals"].get(name, (0.0, 0.0))
        cells.append("" if value is None else f"{value:.2f} ±{(high - low) / 2:.2f}")
    seconds = one["train_seconds"]
    return [*cells, "" if seconds is None else f"{seconds:.0f}"]


def _write(out: str, report: Mapping[str, Any], split: str, shown: Sequence[str]) -> None:
    """The comparison so far, as JSON and as a page."""
    storage.write_bytes(join(out, RESULT), json.dumps(report, indent=1, sort_keys=True).encode())
    lines = [f"Split {split}, %, with half of a 95 % bootstrap interval over queries.", ""]
    lines += ["| recipe | " + " | ".join([*shown, "train s"]) + " |", "|---" * (len(shown) + 2) + "|"]
    for name, one in report.items():
        lines.append("| " + " | ".join([f"`{name}`", *_cells(one, shown)]) + " |")
    failed = [f"- `{name}` failed: {one['error']}" for name, one in report.items() if one["error"] is not None]
    storage.write_bytes(join(out, PAGE), "\n".join([*lines, *([""] if failed else []), *failed, ""]).encode())
