"""Several recipes on the same data: ASTRA's Tables 5 to 8, and DEXML's Tables 3 and 4, as a command."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from extremis.console import say, table
from extremis.evaluation import evaluate
from extremis.report.build import Options, build
from extremis.training import train
from schemas import storage
from schemas.errors import ExtremisError, InputError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from schemas.storage import join
from trainer.config import Recipe, load_recipe

SHOWN: tuple[str, ...] = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
SHOWN_BY_DEXML = ("P@1", "P@5", "R@10", "R@100")
STRATEGIES = (  # in the order of Table 5
    "random",
    "theta-hard",
    "theta-curriculum",
    "random+theta-hard",
    "w-hard",
    "curriculum",
    "astra",
)
BASE = "astra"
# Shares of the base recipe's k_h and k_r that Table 6 has of 50 and 400; and multiples of tau_s and tau_r in 7 and 8.
_MIXTURES = ((1, 1), (1, 0.75), (1, 0.5), (1, 0.25), (0.6, 1), (0.6, 0.25), (0.4, 1), (0.4, 0.75))
_MULTIPLES = (1, 2, 4)
DEXML_MINED = (0, 1, 2, 5, 10)  # mined negatives a query in its Table 3
DEXML_LOSSES: dict[str, dict[str, str | int]] = {  # of its Table 4
    "bce": {"loss.kind": "bce"},
    "softmax": {"loss.kind": "softmax"},
    "decoupled-softmax": {"loss.kind": "decoupled"},
    "softtop-5": {"loss.kind": "softtopk", "loss.k": 5},
    "softtop-100": {"loss.kind": "softtopk", "loss.k": 100},
}
RESULT = "ablation.json"  # of one run in its RUN, of all of them in OUT
PAGE = "ablation.md"
CHARTS = "ablation.html"  # `extremis report` of all of them, where plotly is installed


@dataclass(frozen=True)
class Variant:
    """One line of the comparison, trained into OUT/<name>."""

    name: str
    recipe: Recipe


def strategies(names: Sequence[str], overrides: Sequence[str]) -> list[Variant]:
    """The recipes by name, or by the path of a file, which gives its name. Raises InputError."""
    return [Variant(name.rsplit("/", 1)[-1].removesuffix(".toml"), load_recipe(name, overrides)) for name in names]


def grid(number: int, overrides: Sequence[str]) -> list[Variant]:
    """ASTRA's Table 6 (k_h : k_r), 7 (tau_s) or 8 (tau_r) around the recipe `astra`; its own values come first.

    Values that leave no epoch to use a table in are left out. Raises InputError.
    """
    base = load_recipe(BASE, overrides)
    if number == 6:
        pairs = [(round(h * base.negatives.hard), round(r * base.negatives.random)) for h, r in _MIXTURES]
        settings = [{"negatives.hard": max(1, hard), "negatives.random": random} for hard, random in pairs]
        names = [f"k-{one['negatives.hard']}-{one['negatives.random']}" for one in settings]
    else:
        key = {7: "start", 8: "every"}[number]
        first = getattr(base.refresh, key)
        values = [first * times for times in _MULTIPLES if first * times < base.train.epochs]
        settings = [{f"refresh.{key}": value} for value in values]
        names = [f"{key}-{value}" for value in values]
    variants = {}
    for name, changes in zip(names, settings, strict=True):
        changed = load_recipe(BASE, [*overrides, *(f"{key}={value}" for key, value in changes.items())])
        variants[BASE if changed == base else name] = changed
    return [Variant(name, recipe) for name, recipe in variants.items()]


def mined_negatives(overrides: Sequence[str]) -> list[Variant]:
    """DEXML's Table 3: the batch's labels with 0 to 10 mined negatives a query, and every label. Raises InputError."""
    sampled = [
        Variant(f"mined-{count}", load_recipe("dexml-sampled", [*overrides, f"negatives.hard={count}"]))
        for count in DEXML_MINED
    ]
    return [*sampled, Variant("all-labels", load_recipe("dexml", overrides))]


def losses(overrides: Sequence[str]) -> list[Variant]:
    """DEXML's Table 4: its recipe with each loss over every label. Raises InputError."""
    return [
        Variant(name, load_recipe("dexml", [*overrides, *(f"{key}={value}" for key, value in changes.items())]))
        for name, changes in DEXML_LOSSES.items()
    ]


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
