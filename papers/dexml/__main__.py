"""Tables 3 and 4 of DEXML: `python -m papers.dexml --table 3 DATA OUT`."""

from extremis.ablation import Variants
from papers.tables import Comparison, Settings, change, main

_SHOWN = ("P@1", "P@5", "R@10", "R@100")
_MINED = (0, 1, 2, 5, 10)  # mined negatives per query
_LOSSES = {
    "bce": ("loss.kind=bce",),
    "softmax": ("loss.kind=softmax",),
    "decoupled-softmax": ("loss.kind=decoupled",),
    "softtop-5": ("loss.kind=softtopk", "loss.k=5"),
    "softtop-100": ("loss.kind=softtopk", "loss.k=100"),
}


def table_3(data: str, settings: Settings) -> Variants:
    """Compare the batch's labels with 0 to 10 mined negatives per query, and every label."""
    sampled = {f"mined-{count}": (*settings, f"negatives.hard={count}") for count in _MINED}
    return {**change("dexml-sampled", sampled, data), **change("dexml", {"all-labels": settings}, data)}


def table_4(data: str, settings: Settings) -> Variants:
    """Compare losses over every label."""
    return change("dexml", {name: (*settings, *keys) for name, keys in _LOSSES.items()}, data)


TABLES = {"3": Comparison(table_3, _SHOWN), "4": Comparison(table_4, _SHOWN)}

if __name__ == "__main__":
    main("dexml", TABLES)
