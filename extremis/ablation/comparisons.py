"""Comparisons of the papers, as lists of recipes: ASTRA's Tables 5 to 8, DEXML's 3 and 4, figures of MIPS-s and LNS."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from schemas.errors import InputError
from schemas.layout import DataLayout
from schemas.manifest import open_manifest
from trainer.config import Recipe, load_recipe

SHOWN: tuple[str, ...] = ("P@1", "P@3", "P@5", "PSP@1", "PSP@3", "PSP@5")
STRATEGIES = (  # in the order of ASTRA's Table 5
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
_MINED = (0, 1, 2, 5, 10)  # mined negatives per query in DEXML's Table 3
_LOSSES: dict[str, dict[str, str | int]] = {  # of its Table 4
    "bce": {"loss.kind": "bce"},
    "softmax": {"loss.kind": "softmax"},
    "decoupled-softmax": {"loss.kind": "decoupled"},
    "softtop-5": {"loss.kind": "softtopk", "loss.k": 5},
    "softtop-100": {"loss.kind": "softtopk", "loss.k": 100},
}
# MIPS-s: 100 negatives per query, without weights (its equation 9); vectors start at random.
_MIPS = (
    "refresh.index=exact",
    "refresh.start=0",
    "negatives.reweight=false",
    "negatives.random=85",
    "negatives.hard=15",
    "classifier.bias=false",
    "classifier.initial_bias=0",
    "classifier.initial_scale=0.05",
)
_UNIFORM = ("negatives.hard=0", "negatives.random=100")
_HARDEST = ("negatives.hard=100", "negatives.random=0")
# LNS: a softmax over the positives and 200 negatives per query.
_LNS = ("loss.kind=softmax", "negatives.random=0", "classifier.bias=false", "classifier.initial_scale=0.05")
_SAMPLED = ("negatives.lsh.hard=0", "negatives.random=200")


@dataclass(frozen=True)
class Variant:
    """A line of a comparison."""

    name: str
    recipe: Recipe


@dataclass(frozen=True)
class Comparison:
    """A table of a paper: `variants(data, overrides)` makes its lines; `shown` are its metrics."""

    variants: Callable[[str, Sequence[str]], list[Variant]]
    shown: tuple[str, ...] = SHOWN


def variants_of(
    data: str, table: str, recipes: Sequence[str] | None, only: Sequence[str] | None, overrides: Sequence[str]
) -> tuple[list[Variant], tuple[str, ...]]:
    """Return the lines of `table`, or a line for each of `recipes`, and the metrics to show.

    `only` keeps the lines of these names. Raises InputError.
    """
    comparison = COMPARISONS[table]
    if recipes is None:
        variants, shown = comparison.variants(data, overrides), comparison.shown
    else:
        variants, shown = strategies(recipes, overrides), SHOWN
    names = [variant.name for variant in variants]
    for name in only or ():
        if name not in names:
            raise InputError(f"--only {name!r}: the comparison has no such line. Choose from {', '.join(names)}.")
    return [variant for variant in variants if only is None or variant.name in only], shown


def strategies(names: Sequence[str], overrides: Sequence[str]) -> list[Variant]:
    """Load recipes by name, or by the path of a file, which gives the variant its name. Raises InputError."""
    return [Variant(name.rsplit("/", 1)[-1].removesuffix(".toml"), load_recipe(name, overrides)) for name in names]


def _changed(recipe: str, overrides: Sequence[str], changes: Mapping[str, Sequence[str]]) -> list[Variant]:
    """Load `recipe` once for each name, with its changes; `overrides` come last and win."""
    return [Variant(name, load_recipe(recipe, [*keys, *overrides])) for name, keys in changes.items()]


def _set(changes: Mapping[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in changes.items()]


def _table_5(data: str, overrides: Sequence[str]) -> list[Variant]:
    return strategies(STRATEGIES, overrides)


def _grid(number: int, data: str, overrides: Sequence[str]) -> list[Variant]:
    """Vary the recipe `astra` as in ASTRA's Table 6 (k_h : k_r), 7 (tau_s) or 8 (tau_r); `astra` itself comes first.

    Values that leave no epoch to use a table in are left out. Raises InputError.
    """
    base = load_recipe(BASE, overrides)
    if number == 6:
        pairs = [(round(h * base.negatives.hard), round(r * base.negatives.random)) for h, r in _MIXTURES]
        settings = [{"negatives.hard": max(1, hard), "negatives.random": random} for hard, random in pairs]
        names = [f"k-{setting['negatives.hard']}-{setting['negatives.random']}" for setting in settings]
    else:
        key = {7: "start", 8: "every"}[number]
        first = getattr(base.refresh, key)
        values = [first * times for times in _MULTIPLES if first * times < base.train.epochs]
        settings = [{f"refresh.{key}": value} for value in values]
        names = [f"{key}-{value}" for value in values]
    variants = {}
    for name, changes in zip(names, settings, strict=True):
        changed = load_recipe(BASE, [*overrides, *_set(changes)])
        variants[BASE if changed == base else name] = changed
    return [Variant(name, recipe) for name, recipe in variants.items()]


def _dexml_3(data: str, overrides: Sequence[str]) -> list[Variant]:
    """Compare the batch's labels with 0 to 10 mined negatives per query, and every label. Raises InputError."""
    sampled = [
        Variant(f"mined-{count}", load_recipe("dexml-sampled", [*overrides, f"negatives.hard={count}"]))
        for count in _MINED
    ]
    return [*sampled, Variant("all-labels", load_recipe("dexml", overrides))]


def _dexml_4(data: str, overrides: Sequence[str]) -> list[Variant]:
    """Compare losses over every label. Raises InputError."""
    return [Variant(name, load_recipe("dexml", [*overrides, *_set(changes)])) for name, changes in _LOSSES.items()]


def _mips_1(data: str, overrides: Sequence[str]) -> list[Variant]:
    """Train from scratch on the exactly hardest of every step: alone, with heavier positives, among uniform ones."""
    exact = (*_MIPS, "refresh.every_steps=1")
    return _changed(
        "mips-s",
        overrides,
        {
            "nn-top": (*exact, *_HARDEST),
            "nn-top-re": (*exact, *_HARDEST, "train.positive_ratio=50"),
            "nn-top-uniform": exact,
        },
    )


def _mips_2(data: str, overrides: Sequence[str]) -> list[Variant]:
    """Take 100 or 15 hard negatives, after an epoch of uniform ones, from an index made 1 or 8 times per epoch.

    Beside them, uniform negatives throughout, as in its Table 2. Raises InputError.
    """
    layout, recipe = DataLayout(data), load_recipe("mips-s", overrides)
    rows = open_manifest(layout.queries("train"), "queries").rows
    rows += open_manifest(layout.labels, "labels").rows if recipe.data.label_texts else 0
    steps = -(-rows // recipe.order.batch)
    warm = (*_MIPS, "refresh.start=1", "negatives.warmup=100")
    uniform = {"uniform": (*_MIPS, *_UNIFORM)}
    return _changed(
        "mips-s",
        overrides,
        uniform
        | {
            f"mips-{hard}-ppe-{times}": (*warm, *more, f"refresh.every_steps={-(-steps // times)}")
            for times in (1, 8)
            for hard, more in ((100, _HARDEST), (15, ()))
        },
    )


def _lns_4(data: str, overrides: Sequence[str]) -> list[Variant]:
    """Compare softmax over negatives from hash tables, by embedding and by label, with other ways to choose them."""
    hashed = ("negatives.lsh.hard=200",)
    in_trainer = ("refresh.source=in-trainer", "refresh.start=0", "refresh.every_steps=100")
    return _changed(
        "lns",
        overrides,
        {
            "lsh-embedding": (*_LNS, *hashed),
            **{f"lsh-embedding-{more}": (*_LNS, *hashed, f"negatives.lsh.tables={more}") for more in (100, 200, 400)},
            "lsh-label": (*_LNS, *hashed, "negatives.lsh.query=label"),
            "sampled-softmax": (*_LNS, *_SAMPLED),
            "frequency-based": (*_LNS, *_SAMPLED, "negatives.frequency_share=1"),
            "top-k-softmax": (*_LNS, "negatives.lsh.hard=0", "negatives.hard=200", *in_trainer),
            "full-softmax": (*_LNS, "negatives.lsh.hard=0", "negatives.pool=all"),
        },
    )


COMPARISONS = {
    "5": Comparison(_table_5),
    "6": Comparison(functools.partial(_grid, 6)),
    "7": Comparison(functools.partial(_grid, 7)),
    "8": Comparison(functools.partial(_grid, 8)),
    "dexml-3": Comparison(_dexml_3, ("P@1", "P@5", "R@10", "R@100")),
    "dexml-4": Comparison(_dexml_4, ("P@1", "P@5", "R@10", "R@100")),
    "mips-1": Comparison(_mips_1),
    "mips-2": Comparison(_mips_2),
    "lns-4": Comparison(_lns_4),
}
