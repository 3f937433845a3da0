"""Queries as a person reads them: text, positives, and the hard negatives that a run's table joins to them."""

from dataclasses import dataclass, field

import numpy as np

from extremis.inspecting.decode_text import Words, clean, input_columns
from extremis.inspecting.rows import Rows
from extremis.inspecting.run_tables import Mined, mined
from schemas import storage
from schemas.errors import InputError, TableError
from schemas.layout import DataLayout, RunLayout
from schemas.manifest import Manifest, open_manifest
from schemas.shard_files.parquet import matrix_column
from schemas.tables import PAD

LONGEST_QUERY = 600
LONGEST_LABEL = 160


@dataclass
class Example:
    """One query. Negatives and predictions are (label id, score), best first."""

    split: str
    row: int
    key: str
    text: str
    positives: list[int]
    negatives: list[tuple[int, float]] = field(default_factory=list)
    predictions: list[tuple[int, float]] = field(default_factory=list)

    @property
    def label_ids(self) -> list[int]:
        """Every label that is named."""
        return [*self.positives, *(label for label, _ in self.negatives), *(label for label, _ in self.predictions)]


def splits_of(data: DataLayout) -> list[str]:
    """The splits of DATA, train first. Raises TableError."""
    parents = open_manifest(data.root, "data").parents
    names = [name.removeprefix("queries/") for name in parents if name.startswith("queries/")]
    return sorted(names, key=lambda name: (name != "train", name))


def newest_joined(run: RunLayout, queries: Manifest) -> Mined | None:
    """The newest finished table of the run that is aligned with `queries`; None where there is none."""
    return next((one for one in mined(run) if one.manifest.parents.get("queries") == queries.digest), None)


def read_examples(
    data: DataLayout, split: str, rows: np.ndarray, words: Words, joined: Mined | None = None
) -> list[Example]:
    """Rows of a split in ascending order, with the negatives of `joined` where given. Raises TableError."""
    queries = Rows(data.queries(split), open_manifest(data.queries(split), "queries"))
    chosen = np.unique(np.asarray(rows, np.int64))
    found = queries.read(chosen, ["query_id", "key", "label_ids", *input_columns(queries.columns)])
    columns = [found.column(name).to_pylist() for name in ("query_id", "key", "label_ids")]
    texts = words.texts(found, LONGEST_QUERY)
    examples = [
        Example(split, row, clean(key, LONGEST_LABEL), text, list(positives))
        for row, key, positives, text in zip(*columns, texts, strict=True)
    ]
    if joined is not None:
        table = Rows(joined.url, joined.manifest).read(chosen, ["label_ids", "scores"])
        labels, scores = matrix_column(table, "label_ids"), matrix_column(table, "scores")
        for example, ids, of in zip(examples, labels.tolist(), scores.tolist(), strict=True):
            example.negatives = [pair for pair in zip(ids, of, strict=True) if pair[0] != PAD]
    return examples


def find_example(data: DataLayout, key: str, words: Words, split: str | None, run: RunLayout | None) -> Example:
    """The query of this key, from the first split that has it. Raises InputError where none has, TableError."""
    splits = splits_of(data)
    if split is not None and split not in splits:
        raise InputError(f"{data.root}: no split {split!r}; this data set has {', '.join(splits)}.")
    for name in [split] if split else splits:
        manifest = open_manifest(data.queries(name), "queries")
        row = Rows(data.queries(name), manifest).find(key)
        if row is not None:
            joined = None if run is None else newest_joined(run, manifest)
            return read_examples(data, name, np.asarray([row]), words, joined)[0]
    raise InputError(
        f"{data.root}: no query with key {key!r} in {', '.join([split] if split else splits)}. "
        "Keys are those of the input (uid, _id, or a line's number); rows that were rejected are in "
        f"{data.rejects}."
    )


def require_run(run: str) -> RunLayout:
    """The layout of the run at `run`. Raises TableError where there is none."""
    layout = RunLayout(run)
    if not storage.exists(layout.config):
        raise TableError(f"{run}: no run here (no config.toml). Is the path right?")
    return layout
