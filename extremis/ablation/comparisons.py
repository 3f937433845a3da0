"""Comparisons of the papers, as lists of recipes: ASTRA's Tables 5 to 8, DEXML's 3 and 4, of MIPS-s and LNS."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from schemas.errors import InputError
from schemas.layout import DataLayout, check_name
from schemas.table import Table
from trainer.config import Recipe, recipe_names
from trainer.config.load import fitting
from trainer.methods.astra import Astra
from trainer.methods.lns import Lns
from trainer.settings.resolve import facts_of, resolve

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
# ASTRA's tables: negatives are counted, and drawn, per query; hard ones are stale.
_OWN = ("negatives.pool=own", "refresh.source=table")
# Shares of the base recipe's k_h and k_r that Table 6 has of 50 and 400; and multiples of tau_s and tau_r in 7 and 8.
_MIXTURES = ((1, 1), (1, 0.75), (1, 0.5), (1, 0.25), (0.6, 1), (0.6, 0.25), (0.4, 1), (0.4, 0.75))
_MULTIPLES = (1, 2, 4)
_MINED = (0, 1, 2, 5, 10)  # mined negatives per query in DEXML's Table 3
_LOSSES = {  # of its Table 4
    "bce": ("loss.kind=bce",),
    "softmax": ("loss.kind=softmax",),
    "decoupled-softmax": ("loss.kind=decoupled",),
    "softtop-5": ("loss.kind=softtopk", "loss.k=5"),
    "softtop-100": ("loss.kind=softtopk", "loss.k=100"),
}
# MIPS-s: each query's own negatives, all of weight 1 as positives are (its equation 9); vectors start at random.
_MIPS = (
    "refresh.start=0",
    "data.label_texts=false",
    "negatives.pool=own",
    "negatives.reweight=false",
    "train.positive_weight=0",
    "classifier.bias=false",
    "classifier.initial_bias=0",
    "classifier.initial_scale=0.05",
)
_FROM_INDEX = 5  # labels per query by MIPS in its Table 2 (section 5.1)
_SHARE = 0.01  # of all labels that are a query's negatives there
# Its section 3: 100 negatives per query, by exact search.
_HUNDRED = (*_MIPS, "refresh.index=exact", "negatives.random=85", "negatives.hard=15")
_HARDEST = ("negatives.hard=100", "negatives.random=0")
# From scratch on the exactly hardest of every step: alone, with heavier positives, among uniform ones.
_EXACT = (*_HUNDRED, "refresh.every_steps=1")
_MIPS_1 = {
    "nn-top": (*_EXACT, *_HARDEST),
    "nn-top-re": (*_EXACT, *_HARDEST, "train.positive_ratio=50"),
    "nn-top-uniform": _EXACT,
}
_IN_TRAINER = ("refresh.source=in-trainer", "refresh.start=0")

Variants: TypeAlias = dict[str, Recipe]  # lines of a comparison by name


@dataclass(frozen=True)
class Comparison:
    """A table of a paper: `variants(data, overrides)` makes its lines; `shown` are its metrics."""

    variants: Callable[[str, Sequence[str]], Variants]
    shown: tuple[str, ...] = SHOWN


def variants_of(
    data: str, table: str, recipes: Sequence[str] | None, only: Sequence[str] | None, overrides: Sequence[str]
) -> tuple[Variants, tuple[str, ...]]:
    """Return the lines of `table`, or a line for each of `recipes`, and the metrics to show.

    `only` keeps the lines of these names. Raises InputError.
    """
    comparison = COMPARISONS[table] if recipes is None else Comparison(functools.partial(_load, recipes))
    variants = comparison.variants(data, overrides)
    for name in only or ():
        if name not in variants:
            raise InputError(f"--only {name!r}: the comparison has no such line. Choose from {', '.join(variants)}.")
    return {name: recipe for name, recipe in variants.items() if only is None or name in only}, comparison.shown


def _load(names: Sequence[str], data: str, overrides: Sequence[str]) -> Variants:
    """Load recipes by name, or by the path of a file, which gives the line its name. Raises InputError."""
    shipped = recipe_names()
    lines = {
        name if name in shipped else check_name("--recipes", name.rsplit("/", 1)[-1].removesuffix(".toml")): name
        for name in names
    }
    return {line: resolve(name, fitting(name, overrides), data).recipe for line, name in lines.items()}


def _change(recipe: str, changes: Mapping[str, Sequence[str]], data: str, overrides: Sequence[str] = ()) -> Variants:
    """Load `recipe` once for each name, with its changes; `overrides` come last and win. Raises InputError."""
    options = {name: fitting(recipe, [*keys, *overrides]) for name, keys in changes.items()}
    return {name: resolve(recipe, keys, data).recipe for name, keys in options.items()}


def _table_5(data: str, overrides: Sequence[str]) -> Variants:
    """Compare the strategies with as many negatives per query in every line, also before its first table."""
    negatives = _astra([*_OWN, *overrides], data).negatives
    hard, random = negatives.hard, negatives.random
    mixtures = {"random": (0, hard + random), "w-hard": (hard + random, 0), "theta-hard": (hard + random, 0)}
    variants = {}
    for name in STRATEGIES:
        hard_here, random_here = mixtures.get(name, (hard, random))
        counts = f"negatives.hard={hard_here}", f"negatives.random={random_here}", "negatives.warmup=0"
        variants[name] = resolve(name, [*_OWN, *overrides, *counts], data).recipe
    return variants


def _table_6(data: str, overrides: Sequence[str]) -> Variants:
    """Vary k_h : k_r of the recipe `astra`, per query."""
    overrides = [*_OWN, *overrides]
    negatives, changes = _astra(overrides, data).negatives, {}
    for hard_share, random_share in _MIXTURES:
        hard, random = max(1, round(hard_share * negatives.hard)), round(random_share * negatives.random)
        changes[f"k-{hard}-{random}"] = (*overrides, f"negatives.hard={hard}", f"negatives.random={random}")
    return _name_base(_change(BASE, changes, data), data, overrides)


def _vary_refresh(key: str, data: str, overrides: Sequence[str]) -> Variants:
    """Vary `refresh.<key>` of the recipe `astra`, as long as an epoch is left to use a table in."""
    overrides = [*_OWN, *overrides]
    base = _astra(overrides, data)
    values = [getattr(base.refresh, key) * times for times in _MULTIPLES]
    changes = {f"{key}-{n}": (*overrides, f"refresh.{key}={n}") for n in values if n < base.train.epochs}
    return _name_base(_change(BASE, changes, data), data, overrides)


def _astra(overrides: Sequence[str], data: str) -> Astra:
    recipe = resolve(BASE, overrides, data).recipe
    assert isinstance(recipe, Astra)
    return recipe


def _name_base(variants: Variants, data: str, overrides: Sequence[str]) -> Variants:
    """Give the line that equals the recipe `astra` its name."""
    base = resolve(BASE, overrides, data).recipe
    return {BASE if recipe == base else name: recipe for name, recipe in variants.items()}


def _dexml_3(data: str, overrides: Sequence[str]) -> Variants:
    """Compare the batch's labels with 0 to 10 mined negatives per query, and every label."""
    sampled = {f"mined-{count}": (*overrides, f"negatives.hard={count}") for count in _MINED}
    return {**_change("dexml-sampled", sampled, data), **_change("dexml", {"all-labels": overrides}, data)}


def _dexml_4(data: str, overrides: Sequence[str]) -> Variants:
    """Compare losses over every label."""
    return _change("dexml", {name: (*overrides, *keys) for name, keys in _LOSSES.items()}, data)


def _mips_2(data: str, overrides: Sequence[str]) -> Variants:
    """Take 100 or 15 hard negatives, after an epoch of uniform ones, from an index made 1 or 8 times per epoch.

    Beside them, uniform negatives throughout. Raises TableError.
    """
    steps = _steps("mips-s", _HUNDRED, data, overrides)
    warm = (*_HUNDRED, "refresh.start=1", "negatives.warmup=100")
    changes = {"uniform": (*_HUNDRED, "negatives.hard=0", "negatives.random=100")}
    for times in (1, 8):
        for hard, more in ((100, _HARDEST), (15, ())):
            changes[f"mips-{hard}-ppe-{times}"] = (*warm, *more, f"refresh.every_steps={-(-steps // times)}")
    return _change("mips-s", changes, data, overrides)


def _mips_table_2(data: str, overrides: Sequence[str]) -> Variants:
    """Compare uniform negatives, those of the index alone after an epoch of uniform ones, and a few among uniform ones.

    1 % of the labels in every line, from an index that is made once per epoch. Raises TableError.
    """
    count = max(2 * _FROM_INDEX, round(_SHARE * Table.open(DataLayout(data).labels, "labels").rows))
    once = (*_MIPS, f"refresh.every_steps={_steps('mips-s', _MIPS, data, overrides)}")
    alone = "refresh.start=1", f"negatives.warmup={count}", f"negatives.hard={count}", "negatives.random=0"
    changes = {
        "uniform": (*once, "negatives.hard=0", f"negatives.random={count}"),
        "mips-a": (*once, *alone),
        "mips-s": (*once, f"negatives.hard={_FROM_INDEX}", f"negatives.random={count - _FROM_INDEX}"),
    }
    return _change("mips-s", changes, data, overrides)


def _steps(recipe: str, keys: Sequence[str], data: str, overrides: Sequence[str]) -> int:
    """Count the steps of an epoch of `recipe` with its changes. Raises TableError."""
    changed = resolve(recipe, [*keys, *overrides], data).recipe
    return -(-facts_of(changed, data).points // changed.order.batch)


def _lns_4(data: str, overrides: Sequence[str]) -> Variants:
    """Vary the source of a softmax's negatives: hash tables by embedding and by label, or another.

    Other lines have as many per query as share a bucket with it by chance. Raises TableError.

    First without any correction for the sampling. Then with it: hashed negatives count once, random ones beside them
    stand for all other labels, and random ones alone for all.
    """
    labels = Table.open(DataLayout(data).labels, "labels").rows
    recipe = resolve("lns-paper", overrides, data).recipe
    assert isinstance(recipe, Lns)
    options = recipe.negatives.lsh
    count = max(1, round(labels * (1 - (1 - 1 / options.buckets) ** options.tables)))
    by_label = "negatives.lsh.query=label"
    unhashed = "method=astra"
    uniform = f"negatives.random={count}"
    corrected = "negatives.reweight=true"
    frequent = "negatives.frequency_share=1"
    twice = f"negatives.random={2 * count}"
    changes = {
        "lsh-embedding": (),
        "lsh-label": (by_label,),
        "lsh-embedding+uniform": (uniform,),
        "sampled-softmax": (unhashed, uniform),
        "frequency-based": (unhashed, uniform, frequent),
        "top-k-softmax": (unhashed, f"negatives.hard={count}", *_IN_TRAINER),
        "full-softmax": ("method=renee",),
        "lsh-embedding-corrected": (uniform, corrected),
        "lsh-label-corrected": (by_label, uniform, corrected),
        "sampled-softmax-corrected": (unhashed, twice, corrected),
        "frequency-based-corrected": (unhashed, twice, frequent, corrected),
    }
    return _change("lns-paper", changes, data, overrides)


COMPARISONS = {
    "5": Comparison(_table_5),
    "6": Comparison(_table_6),
    "7": Comparison(functools.partial(_vary_refresh, "start")),
    "8": Comparison(functools.partial(_vary_refresh, "every")),
    "dexml-3": Comparison(_dexml_3, ("P@1", "P@5", "R@10", "R@100")),
    "dexml-4": Comparison(_dexml_4, ("P@1", "P@5", "R@10", "R@100")),
    "mips-1": Comparison(functools.partial(_change, "mips-s", _MIPS_1)),
    "mips-2": Comparison(_mips_2),
    "mips-table-2": Comparison(_mips_table_2),
    "lns-4": Comparison(_lns_4),
}
