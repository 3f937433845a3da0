"""Forms with string keys: which files at a source hold which table, and how each kind of file is read."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from pipelines.formats import keyed_lines, keyed_pairs, keyed_parquet, lines, records
from pipelines.formats.base import LABELS, PAIRS, SPLITS, Inputs, Parsed, Part, Text, labels_schema
from pipelines.formats.fields import Fields, Shape
from pipelines.formats.names import listed, listing
from schemas.errors import InputError
from schemas.storage import join

PLAIN, FEATURES = "rows", "rows with features"  # the role of a part's only file
PAIRED = " and pairs"  # at its end: the split has a pairs file, and its points name no labels themselves
JSONL, PARQUET, TSV = rf"(?:jsonl|ndjson){lines.CODEC}", "parquet", rf"tsv{lines.CODEC}"
_STEMS = {"train": "train", "val": "(?:val|valid|validation|dev)", "test": "test", LABELS: "labels"}


@dataclass(frozen=True)
class Keyed:
    """Reader of parts of one file each, by the end of its name; `fields` are the names of the fields in it."""

    fields: Fields = field(default_factory=Fields)

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield blocks with a column `line`, or of Parquet the columns as they are."""
        (url,) = part.files.values()
        if url.endswith(f".{PARQUET}"):
            return keyed_parquet.read_blocks(url, block_rows, [*vars(self.fields).values()])
        return lines.read_blocks(url, block_rows)

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        ((role, url),) = part.files.items()
        parser = keyed_parquet if url.endswith(f".{PARQUET}") else keyed_lines
        if part.table.startswith(PAIRS):
            if re.search(rf"\.{TSV}$", url):
                return keyed_pairs.parse_pairs(raw, first_row, part.name)
            return parser.parse_pairs(raw, first_row, part.name, self.fields)
        # Labels are points that name none.
        features, labels = role.removesuffix(PAIRED) == FEATURES, part.table == LABELS
        shape = Shape(self.fields, text, features, not (labels or role.endswith(PAIRED)))
        parsed = parser.parse_points(raw, first_row, part.name, shape)
        return Parsed(parsed.batch.select(labels_schema(features).names), parsed.rejects) if labels else parsed


@dataclass(frozen=True)
class Parquet(Keyed):
    """`train.parquet`, `labels.parquet`, and where there are any `test.parquet`, `val.parquet`; each may be many files
    (`train-00000-of-00016.parquet`, `train/*.parquet`).

    Columns are those of `Jsonl`: `key` and `text` strings, `labels` a list of strings. So are pairs.
    """

    name: str = "parquet"
    expects: str = "train.parquet (key, text, labels) and labels.parquet (key, text), and where there are any others"
    kind: str = PARQUET  # of the files of points; labels and pairs may be of another kind

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        shared = _table(names, "queries", self.kind) and _pairs(names, "train")
        return bool(_table(names, _STEMS["train"], self.kind) or shared)

    def find(self, source: str) -> Inputs:
        """Find the data set at `source`.

        Raises InputError: no points or labels, one file in two dresses, or columns that are missing.
        """
        root, names = listing(source)
        fields, parts = self.fields, list[Part]()
        shared = _table(names, "queries", self.kind)
        paired = [split for split in SPLITS if _pairs(names, split)]
        for split in SPLITS:
            files = _table(names, _STEMS[split], self.kind)
            if files and shared and split in paired:
                raise InputError(f"{source}: both {files[0]} and {shared[0]} hold points of {split}. Remove one.")
            of_split = files or (shared if split in paired else [])
            if split in paired and not of_split:
                pairs = _pairs(names, split)[0]
                raise InputError(f"{source}: {pairs} has no points beside it. Expected {self.expects}.")
            suffix, required = (PAIRED, [fields.key]) if split in paired else ("", [fields.key, fields.labels])
            parts += _parts(root, split, of_split, fields, required, suffix)
            parts += _parts(root, PAIRS + split, _pairs(names, split), fields, (fields.query_key, fields.label_key))
        stem = _STEMS[LABELS]
        of_labels = _table(names, stem, self.kind) or _table(names, stem, rf"(?:{JSONL}|{PARQUET})")
        parts += _parts(root, LABELS, of_labels, fields, (fields.key,))
        for table in ("train", LABELS):
            if not any(part.table == table for part in parts):
                raise InputError(f"{source}: no {table} here; found: {listed(names)}. Expected {self.expects}.")
        return Inputs(self.name, tuple(parts), keyed=True, shared_points=bool(shared and paired))


@dataclass(frozen=True)
class Jsonl(Parquet):
    """`train.jsonl`, `labels.jsonl`, and where there are any `test.jsonl`, `val.jsonl`; each may be many files
    (`train-00001.jsonl.gz`, `train/*.jsonl`).

    A point has `key`, `text` and `labels`, a list of label keys; a label has `key` and `text`. Pairs may be in files of
    their own (`pairs_train.jsonl`, `.tsv`, `.parquet`), and then the points of all splits in one `queries.jsonl`.
    """

    name: str = "jsonl"
    expects: str = (
        "train.jsonl (key, text, labels) and labels.jsonl (key, text), and where there are any test.jsonl, ..."
    )
    kind: str = JSONL

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return super().recognises(source, names) and "corpus.jsonl" not in names


def features_in(urls: Sequence[str], fields: Fields) -> bool:
    """Tell whether the rows of any file have features, as its first rows or its columns show. Raises InputError."""
    return any(fields.feature_ids in _field_names(url) for url in urls)


def _field_names(url: str) -> set[str]:
    """Return a file's columns, or the fields of its first records: those of its first MiB, or the first one after."""
    if url.endswith(f".{PARQUET}"):
        return set(keyed_parquet.read_schema(url).names)
    for some in lines.read_lines(url):
        names: set[str] = set().union(*map(records.field_names, some))
        if names:
            return names
    return set()  # every line is rejected when it is its turn


def _table(names: Sequence[str], stem: str, kind: str) -> list[str]:
    """List the files of a table: `stem.kind`, `stem-00000.kind`, or all that end in `kind` in the folder `stem`."""
    return [name for name in names if re.fullmatch(rf"{stem}(?:[-_.0-9][^/]*|/[^/]+)?\.{kind}", name)]


def _pairs(names: Sequence[str], split: str) -> list[str]:
    return _table(names, rf"pairs[-_/]{_STEMS[split]}", rf"(?:{TSV}|{JSONL}|{PARQUET})")


def _parts(
    root: str, table: str, names: Sequence[str], fields: Fields, required: Sequence[str], suffix: str = ""
) -> list[Part]:
    """Make one part a file, in the order of their names."""
    plain: dict[str, str] = {}
    for name in names:
        same = plain.setdefault(re.sub(rf"\.({JSONL}|{PARQUET}|{TSV})$", "", name), name)
        if same != name:
            raise InputError(f"{root}: both {same} and {name} are here, for the same thing. Remove one.")
    urls = [join(root, name) for name in names]
    for url in urls:
        if url.endswith(f".{PARQUET}"):
            keyed_parquet.check_columns(url, *([name] for name in required))
    pairs = table.startswith(PAIRS)
    role = FEATURES if not pairs and features_in(urls, fields) else PLAIN
    for url in urls:
        if url.endswith(f".{PARQUET}") and role == PLAIN and not pairs:
            keyed_parquet.check_columns(url, fields.texts)
    return [Part(table, name, {role + suffix: url}) for name, url in zip(names, urls, strict=True)]
