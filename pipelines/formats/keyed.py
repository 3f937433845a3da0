"""Forms with string keys: which files at a source hold which table, and how each kind of file is read."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import orjson
import pyarrow as pa

from pipelines.formats import keyed_lines, keyed_pairs, keyed_parquet, lines
from pipelines.formats.base import LABELS, PAIRS, SPLITS, Context, Inputs, Parsed, Part, labels_schema
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

    def parse_points(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        ((role, url),) = part.files.items()
        features, labels = role.removesuffix(PAIRED) == FEATURES, not role.endswith(PAIRED)
        parser = keyed_parquet if url.endswith(f".{PARQUET}") else keyed_lines
        return parser.parse_points(raw, first_row, part.name, Shape(self.fields, context.text, features, labels))

    def parse_labels(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        """Parse labels: they are points that name none."""
        ((role, url),) = part.files.items()
        parsed = self.parse_points(raw, first_row, replace(part, files={role + PAIRED: url}), context)
        return Parsed(parsed.batch.select(labels_schema(role == FEATURES).names), parsed.rejects)

    def parse_pairs(self, raw: pa.RecordBatch, first_row: int, part: Part, context: Context) -> Parsed:
        (url,) = part.files.values()
        if url.endswith(f".{PARQUET}"):
            return keyed_parquet.parse_pairs(raw, first_row, part.name, self.fields)
        if re.search(rf"\.{TSV}$", url):
            return keyed_pairs.parse_pairs(raw, first_row, part.name)
        return keyed_lines.parse_pairs(raw, first_row, part.name, self.fields)


def find_tables(form: str, source: str, kind: str, expects: str, fields: Fields) -> Inputs:
    """Find the data set at `source` whose points are in files of `kind`; labels and pairs may be of another kind.

    Raises InputError: no points or labels, one file in two dresses, or columns that are missing.
    """
    root, names = listing(source)
    parts: list[Part] = []
    shared = _table(names, "queries", kind)
    paired = [split for split in SPLITS if _pairs(names, split)]
    for split in SPLITS:
        files = _table(names, _STEMS[split], kind)
        if files and shared and split in paired:
            raise InputError(f"{source}: both {files[0]} and {shared[0]} hold points of {split}. Remove one.")
        of_split = files or (shared if split in paired else [])
        if split in paired and not of_split:
            raise InputError(f"{source}: {_pairs(names, split)[0]} has no points beside it. Expected {expects}.")
        suffix = PAIRED if split in paired else ""
        parts += _parts(root, split, of_split, fields, (fields.key,) if suffix else (fields.key, fields.labels), suffix)
        parts += _parts(root, PAIRS + split, _pairs(names, split), fields, (fields.query_key, fields.label_key))
    of_labels = _table(names, _STEMS[LABELS], kind) or _table(names, _STEMS[LABELS], rf"(?:{JSONL}|{PARQUET})")
    parts += _parts(root, LABELS, of_labels, fields, (fields.key,))
    for table in ("train", LABELS):
        if not any(part.table == table for part in parts):
            raise InputError(f"{source}: no {table} here; found: {listed(names)}. Expected {expects}.")
    return Inputs(form, tuple(parts), keyed=True, shared_points=bool(shared and paired))


def has_points(names: Sequence[str], kind: str) -> bool:
    """Tell whether `names` hold train points in files that end in `kind`."""
    return bool(_table(names, _STEMS["train"], kind) or (_table(names, "queries", kind) and _pairs(names, "train")))


def features_in(urls: Sequence[str], fields: Fields) -> bool:
    """Tell whether the rows of any file have features, as its first row or its columns show. Raises InputError."""
    return any(fields.feature_ids in _field_names(url) for url in urls)


def _field_names(url: str) -> Sequence[str]:
    if url.endswith(f".{PARQUET}"):
        return list(keyed_parquet.read_schema(url).names)
    try:
        record = orjson.loads(lines.first_line(url))
    except orjson.JSONDecodeError:
        return []  # the line is rejected when it is its turn
    return list(record) if isinstance(record, dict) else []


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
