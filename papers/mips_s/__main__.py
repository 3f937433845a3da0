"""Figures 1 and 2, and Table 2, of MIPS-s: `python -m papers.mips_s --table figure-1 DATA OUT`.

All negatives are each query's own, and of weight 1 as positives are (equation 9); vectors start at random.
"""

from extremis.ablation import Variants
from papers.tables import Comparison, Settings, change, count_steps, main
from schemas.layout import DataLayout
from schemas.table import Table

_RECIPE = "mips-s"
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
_FROM_INDEX = 5  # labels per query by MIPS in Table 2 (section 5.1)
_SHARE = 0.01  # of all labels that are a query's negatives there
# Section 3: 100 negatives per query, by exact search.
_HUNDRED = (*_MIPS, "refresh.index=exact", "negatives.random=85", "negatives.hard=15")
_HARDEST = ("negatives.hard=100", "negatives.random=0")
_EXACT = (*_HUNDRED, "refresh.every_steps=1")


def figure_1(data: str, settings: Settings) -> Variants:
    """Train from scratch on the exactly hardest of every step: alone, with heavier positives, among uniform ones."""
    changes = {
        "nn-top": (*_EXACT, *_HARDEST),
        "nn-top-re": (*_EXACT, *_HARDEST, "train.positive_ratio=50"),
        "nn-top-uniform": _EXACT,
    }
    return change(_RECIPE, changes, data, settings)


def figure_2(data: str, settings: Settings) -> Variants:
    """Take 100 or 15 hard negatives, after an epoch of uniform ones, from an index made 1 or 8 times per epoch.

    Beside them, uniform negatives throughout. Raises TableError.
    """
    steps = count_steps(_RECIPE, [*_HUNDRED, *settings], data)
    warm = (*_HUNDRED, "refresh.start=1", "negatives.warmup=100")
    changes = {"uniform": (*_HUNDRED, "negatives.hard=0", "negatives.random=100")}
    for times in (1, 8):
        for hard, more in ((100, _HARDEST), (15, ())):
            changes[f"mips-{hard}-ppe-{times}"] = (*warm, *more, f"refresh.every_steps={-(-steps // times)}")
    return change(_RECIPE, changes, data, settings)


def table_2(data: str, settings: Settings) -> Variants:
    """Compare uniform negatives, those of the index alone after an epoch of uniform ones, and a few among uniform ones.

    1 % of the labels in every line, from an index that is made once per epoch. Raises TableError.
    """
    count = max(2 * _FROM_INDEX, round(_SHARE * Table.open(DataLayout(data).labels, "labels").rows))
    once = (*_MIPS, f"refresh.every_steps={count_steps(_RECIPE, [*_MIPS, *settings], data)}")
    alone = "refresh.start=1", f"negatives.warmup={count}", f"negatives.hard={count}", "negatives.random=0"
    changes = {
        "uniform": (*once, "negatives.hard=0", f"negatives.random={count}"),
        "mips-a": (*once, *alone),
        "mips-s": (*once, f"negatives.hard={_FROM_INDEX}", f"negatives.random={count - _FROM_INDEX}"),
    }
    return change(_RECIPE, changes, data, settings)


TABLES = {"figure-1": Comparison(figure_1), "figure-2": Comparison(figure_2), "table-2": Comparison(table_2)}

if __name__ == "__main__":
    main("mips_s", TABLES)
