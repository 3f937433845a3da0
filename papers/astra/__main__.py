"""Tables 5 to 8 of ASTRA: `python -m papers.astra --table 5 DATA OUT`.

Negatives are counted, and drawn, per query; hard ones come from tables. Lines start from the recipe `astra`.
"""

import functools
from pathlib import Path

from extremis.ablation import Variants
from papers.tables import Comparison, Settings, change, main
from trainer.methods.astra import Astra
from trainer.settings.resolve import resolve

BASE = "astra"
STRATEGIES = (  # in the order of Table 5; those that do not ship are files of this folder
    "random",
    "theta-hard",
    "theta-curriculum",
    "random-theta-hard",
    "w-hard",
    "curriculum",
    BASE,
)
_SHIPPED = ("random", BASE)
_OWN = ("negatives.pool=own", "refresh.source=table")
# Shares of the base recipe's k_h and k_r that Table 6 has of 50 and 400; and multiples of tau_s and tau_r in 7 and 8.
_MIXTURES = ((1, 1), (1, 0.75), (1, 0.5), (1, 0.25), (0.6, 1), (0.6, 0.25), (0.4, 1), (0.4, 0.75))
_MULTIPLES = (1, 2, 4)


def table_5(data: str, settings: Settings) -> Variants:
    """Compare the strategies with as many negatives per query in every line, also before its first table."""
    negatives = _astra([*_OWN, *settings], data).negatives
    hard, random = negatives.hard, negatives.random
    mixtures = {"random": (0, hard + random), "w-hard": (hard + random, 0), "theta-hard": (hard + random, 0)}
    lines = {}
    for name in STRATEGIES:
        hard_here, random_here = mixtures.get(name, (hard, random))
        counts = f"negatives.hard={hard_here}", f"negatives.random={random_here}", "negatives.warmup=0"
        recipe = name if name in _SHIPPED else str(Path(__file__).with_name(f"{name}.toml"))
        lines[name] = resolve(recipe, [*_OWN, *settings, *counts], data).recipe
    return lines


def table_6(data: str, settings: Settings) -> Variants:
    """Vary k_h : k_r of the recipe `astra`, per query."""
    settings = [*_OWN, *settings]
    negatives, changes = _astra(settings, data).negatives, {}
    for hard_share, random_share in _MIXTURES:
        hard, random = max(1, round(hard_share * negatives.hard)), round(random_share * negatives.random)
        changes[f"k-{hard}-{random}"] = (*settings, f"negatives.hard={hard}", f"negatives.random={random}")
    return _name_base(change(BASE, changes, data), data, settings)


def vary_refresh(key: str, data: str, settings: Settings) -> Variants:
    """Vary `refresh.<key>` of the recipe `astra`, as long as an epoch is left to use a table in."""
    settings = [*_OWN, *settings]
    base = _astra(settings, data)
    values = [getattr(base.refresh, key) * times for times in _MULTIPLES]
    changes = {f"{key}-{n}": (*settings, f"refresh.{key}={n}") for n in values if n < base.train.epochs}
    return _name_base(change(BASE, changes, data), data, settings)


def _astra(settings: Settings, data: str) -> Astra:
    recipe = resolve(BASE, settings, data).recipe
    assert isinstance(recipe, Astra)
    return recipe


def _name_base(lines: Variants, data: str, settings: Settings) -> Variants:
    """Give the line that equals the recipe `astra` its name."""
    base = _astra(settings, data)
    return {BASE if recipe == base else name: recipe for name, recipe in lines.items()}


TABLES = {
    "5": Comparison(table_5),
    "6": Comparison(table_6),
    "7": Comparison(functools.partial(vary_refresh, "start")),
    "8": Comparison(functools.partial(vary_refresh, "every")),
}

if __name__ == "__main__":
    main("astra", TABLES)
