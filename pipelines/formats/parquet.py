"""Form with string keys in Parquet."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.formats import keyed
from pipelines.formats.base import Inputs


@dataclass(frozen=True)
class Parquet(keyed.Keyed):
    """`train.parquet`, `labels.parquet`, and where there are any `test.parquet`, `val.parquet`; each may be many files
    (`train-00000-of-00016.parquet`, `train/*.parquet`).

    Columns are those of `Jsonl`: `key` and `text` strings, `labels` a list of strings. So are pairs.
    """

    name: str = "parquet"
    expects: str = "train.parquet (key, text, labels) and labels.parquet (key, text), and where there are any others"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return keyed.has_points(names, keyed.PARQUET)

    def find(self, source: str) -> Inputs:
        return keyed.find_tables(self.name, source, keyed.PARQUET, self.expects, self.fields)
