"""`extremis lengths` counts the tokens of texts, to choose --max-tokens."""

from os import fspath
from typing import Annotated, Any

from extremis.command import Option, Progress, command
from extremis.commands.shared import Place
from extremis.console import table


@command()
def lengths(
    data: Place, *, split: str = "train", share: Annotated[float, Option(gt=0, le=1)] = 0.95, progress: Progress = True
) -> dict[str, Any]:
    """Count the tokens of the queries of DATA.

    Options:
        split: A split of DATA.
        share: Share of the queries with at most `tokens` tokens.
    """
    import numpy as np
    import pyarrow.compute as pc

    from schemas.layout import DataLayout
    from schemas.table import Table

    queries = Table.open(DataLayout(fspath(data)).queries(split), "queries")
    counts = np.concatenate([pc.list_value_length(rows["input_ids"]) for rows in queries.batches(["input_ids"])])
    facts = {"queries": len(counts), "tokens": int(np.quantile(counts, share)), "longest": int(counts.max())}
    table(f"tokens of {split}", ["", "count"], [[name, f"{count:,}"] for name, count in facts.items()])
    return facts
