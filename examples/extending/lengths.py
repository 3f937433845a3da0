"""`extremis lengths` counts the tokens of texts, to choose --max-tokens."""

from dataclasses import dataclass
from os import fspath
from typing import Annotated

from pydantic import Field

from extremis.function import Place, Progress, function
from extremis.result import Grid, Result


@dataclass(frozen=True, repr=False, kw_only=True)
class LengthsResult(Result):
    queries: int
    tokens: int
    longest: int


@function
def lengths(
    data: Place, *, split: str = "train", share: Annotated[float, Field(gt=0, le=1)] = 0.95, progress: Progress = True
) -> LengthsResult:
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
    rows = [[name, f"{count:,}"] for name, count in facts.items()]
    return LengthsResult(**facts, shown=[Grid(f"tokens of {split}", ["", "count"], rows)])
