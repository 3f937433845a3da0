"""A table of a paper as a command: recipes with settings, trained one after the other and compared."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from extremis.ablation import SHOWN, Variants, ablate
from schemas.errors import ExtremisError, InputError
from trainer.config.load import applicable_overrides
from trainer.settings.resolve import facts_of, resolve

Settings: TypeAlias = Sequence[str]  # section.key=value


@dataclass(frozen=True)
class Comparison:
    """A table: `lines(data, settings)` makes its lines, where `settings` hold for all; `shown` are its metrics."""

    lines: Callable[[str, Settings], Variants]
    shown: tuple[str, ...] = SHOWN


def change(recipe: str, changes: Mapping[str, Settings], data: str, settings: Settings = ()) -> Variants:
    """Load `recipe` once for each name, with its changes; `settings` come last and win. Raises InputError."""
    options = {name: applicable_overrides(recipe, [*keys, *settings]) for name, keys in changes.items()}
    return {name: resolve(recipe, keys, data).recipe for name, keys in options.items()}


def count_steps(recipe: str, settings: Settings, data: str) -> int:
    """Count the steps of an epoch of `recipe` with `settings`. Raises TableError."""
    changed = resolve(recipe, settings, data).recipe
    return -(-facts_of(changed, data).points // changed.order.batch)


def lines_of(comparison: Comparison, data: str, settings: Settings, only: Sequence[str]) -> Variants:
    """Return the lines of a comparison; `only` those of these names, where there are any. Raises InputError."""
    lines = comparison.lines(data, settings)
    for name in only:
        if name not in lines:
            raise InputError(f"--only {name!r}: the table has no such line. Choose from {', '.join(lines)}.")
    return {name: recipe for name, recipe in lines.items() if not only or name in only}


def main(paper: str, comparisons: Mapping[str, Comparison], arguments: Sequence[str] | None = None) -> None:
    """Make one of `comparisons` on DATA into OUT, as `extremis ablate` does."""
    parser = argparse.ArgumentParser(prog=f"python -m papers.{paper}")
    parser.add_argument("data", metavar="DATA", help="what `extremis shard` wrote")
    parser.add_argument("out", metavar="OUT", help="each line is a run below it; what is finished is not trained again")
    parser.add_argument("--table", choices=comparisons, default=next(iter(comparisons)), help="default: %(default)s")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change every line")
    parser.add_argument("--only", default="", metavar="LINE,...", help="lines to train; default: all")
    parser.add_argument("--split", default="test", help="split to score; default: %(default)s")
    parser.add_argument("--retry", action="store_true", help="continue what failed before")
    options = parser.parse_args(arguments)
    comparison, only = comparisons[options.table], [name.strip() for name in options.only.split(",") if name.strip()]
    try:
        lines = lines_of(comparison, options.data, options.set, only)
        ablate(options.data, options.out, lines, options.split, comparison.shown, options.retry)
    except ExtremisError as error:
        sys.stderr.write(f"Error: {error}\n")
        sys.exit(2)
