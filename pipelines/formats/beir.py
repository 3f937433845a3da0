"""BEIR form: a corpus whose documents are the labels, queries, and their relevance by split."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipelines.formats import keyed, lines
from pipelines.formats.base import LABELS, PAIRS, SPLITS, Inputs, Part
from pipelines.formats.fields import Fields
from pipelines.formats.names import listing, one_of
from schemas.storage import join

_QRELS = {"train": ("train",), "val": ("dev", "val"), "test": ("test",)}


@dataclass(frozen=True)
class Beir(keyed.Keyed):
    """`corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`), `qrels/train.tsv`, and where there are
    any `qrels/dev.tsv`, `qrels/test.tsv` (query-id, corpus-id, score).

    The points of a split are the queries that its qrels name; a score that is not above 0 is no relevance.
    """

    name: str = "beir"
    expects: str = "corpus.jsonl, queries.jsonl, qrels/train.tsv, and where there are any qrels/dev.tsv, qrels/test.tsv"
    fields: Fields = field(default_factory=lambda: Fields(key="_id"))

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return any(f"corpus.jsonl{codec}" in names for codec in lines.SUFFIXES)

    def find(self, source: str) -> Inputs:
        root, names = listing(source)

        def find_file(*plain: str, required: bool = True) -> str | None:
            usual = [name + suffix for name in plain for suffix in lines.SUFFIXES]
            return one_of(source, names, usual, self.expects, required=required)

        corpus, queries = find_file("corpus.jsonl"), find_file("queries.jsonl")
        parts = []
        for split in SPLITS:
            qrels = find_file(*(f"qrels/{name}.tsv" for name in _QRELS[split]), required=split == "train")
            if qrels:
                parts.append(Part(split, str(queries), {keyed.PLAIN + keyed.PAIRED: join(root, str(queries))}))
                parts.append(Part(PAIRS + split, qrels, {keyed.PLAIN: join(root, qrels)}))
        parts.append(Part(LABELS, str(corpus), {keyed.PLAIN: join(root, str(corpus))}))
        return Inputs(self.name, tuple(parts), keyed=True, shared_points=True)
