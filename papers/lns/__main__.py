"""Figure 4 of LNS: `python -m papers.lns DATA OUT`."""

from pathlib import Path

from extremis.ablation import Variants
from papers.tables import Comparison, Settings, change, main
from schemas.layout import DataLayout
from schemas.table import Table
from trainer.methods.lns import Lns
from trainer.settings.resolve import resolve

_RECIPE = str(Path(__file__).with_name("lns-paper.toml"))
_IN_TRAINER = ("refresh.source=in-trainer", "refresh.start=0")


def figure_4(data: str, settings: Settings) -> Variants:
    """Vary the source of a softmax's negatives: hash tables by embedding and by label, or another.

    Other lines have as many per query as share a bucket with it by chance. Raises TableError.

    First without any correction for the sampling. Then with it: hashed negatives count once, random ones beside them
    stand for all other labels, and random ones alone for all.
    """
    labels = Table.open(DataLayout(data).labels, "labels").rows
    recipe = resolve(_RECIPE, settings, data).recipe
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
    return change(_RECIPE, changes, data, settings)


TABLES = {"figure-4": Comparison(figure_4)}

if __name__ == "__main__":
    main("lns", TABLES)
