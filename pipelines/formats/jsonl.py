"""Form with string keys in JSON lines."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.formats import keyed
from pipelines.formats.base import Inputs


@dataclass(frozen=True)
class Jsonl(keyed.Keyed):
    """`train.jsonl`, `labels.jsonl`, and where there are any `test.jsonl`, `val.jsonl`; each may be many files
    (`train-00001.jsonl.gz`, `train/*.jsonl`).

    A point has `key`, `text` and `labels`, a list of label keys; a label has `key` and `text`. Pairs may be in files of
    their own (`pairs_train.jsonl`, `.tsv`, `.parquet`), and then the points of all splits in one `queries.jsonl`.
    """

    name: str = "jsonl"
    expects: str = (
        "train.jsonl (key, text, labels) and labels.jsonl (key, text), and where there are any test.jsonl, ..."
    )

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return keyed.has_points(names, keyed.JSONL) and "corpus.jsonl" not in names

    def find(self, source: str) -> Inputs:
        return keyed.find_tables(self.name, source, keyed.JSONL, self.expects, self.fields)
