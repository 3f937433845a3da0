"""Formats with string keys: find the files of each table at a source, read the files, and parse rows into points.

The file extension determines the reader, which yields blocks of lines or columns (`lines`, `column_files`). The names
of the fields determine how a block becomes points, labels or pairs (`from_lines`, `from_columns`). The formats differ
only in the kind of file, and in whether labels can be extracted from the points.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats import column_files, from_columns, from_lines, lines, records
from pipelines.formats.base import LABELS, PAIRS, SPLITS, Inputs, Parsed, Part, RowContents, Text, labels_schema
from pipelines.formats.column_files import ARROW, CSV, PARQUET, is_csv
from pipelines.formats.names import (
    ABSENT,
    OF_PAIRS,
    OF_ROWS,
    Fields,
    Shape,
    in_use,
    list_files,
    one_of,
    say_names,
    single_file,
)
from schemas.errors import InputError
from schemas.manifest import MOST_DENSE
from schemas.storage import join

ROWS = "rows"  # the role of a part's only file
_FIRST_ROWS = 1 << 10  # first rows, which show the length of vectors
JSONL, TSV = rf"(?:jsonl|ndjson){lines.CODEC}", rf"tsv{lines.CODEC}"
_ANY = rf"(?:{JSONL}|{PARQUET}|{CSV}|{ARROW})"  # pattern of the files of labels and pairs
_STEMS = {"train": "train", "val": "(?:val|valid|validation|dev)", "test": "test", LABELS: "labels"}
_QRELS = {"train": ("train",), "val": ("dev", "val"), "test": ("test",)}


@dataclass(frozen=True)
class Keyed:
    """Reads parts that consist of one file each, according to the file extension. `fields`: names of the fields."""

    fields: Fields = field(default_factory=Fields)
    label_fields: Fields | None = None  # names in the table of labels; None: the same names
    labels_needed: bool = True  # False: points may name labels that another source defines
    name: str = ""

    def fields_of(self, part: Part) -> Fields:
        """Return the names of the fields in `part`."""
        own = part.table == LABELS and not part.contents.derived
        return (own and self.label_fields) or self.fields

    def _inputs(self, parts: Sequence[Part], shared_points: bool = False) -> Inputs:
        """Return the inputs with `parts`. Raises InputError if a file lacks a column that --fields names."""
        for part in parts:
            (url,), labels = part.files.values(), part.table == LABELS
            if not (part.contents.derived or _is_tabbed(part)):
                of_labels = ("labels", "label") if part.contents.labels and not labels else ()
                read = OF_PAIRS if part.table.startswith(PAIRS) else (*OF_ROWS, *of_labels)
                require_named_columns(url, self.fields_of(part), read, self.fields if labels else Fields())
        return Inputs(self.name, _of_one_length(parts), keyed=True, shared_points=shared_points)

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield blocks with one column `line` or, for columnar files, with the columns of the file."""
        (url,), fields = part.files.values(), self.fields_of(part)
        names = [name for name in vars(fields).values() if part.contents.dense or name != fields.vector]
        if is_csv(url) and not _is_tabbed(part):
            return column_files.read_csv(url, block_rows)
        if url.endswith(f".{ARROW}"):
            return column_files.read_arrow(url, block_rows, names)
        if url.endswith(f".{PARQUET}"):
            return column_files.read_parquet(url, block_rows, names)
        return iter(lines.LineBlocks(url, block_rows))

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        (url,), fields, contents = part.files.values(), self.fields_of(part), part.contents
        parser = from_columns if is_csv(url) or url.endswith((f".{PARQUET}", f".{ARROW}")) else from_lines
        if _is_tabbed(part):
            return from_lines.parse_tabbed_pairs(raw, first_row, part.name)
        if part.table.startswith(PAIRS):
            return parser.parse_pairs(raw, first_row, part.name, fields)
        # Labels are parsed like points without labels.
        labels = part.table == LABELS
        named = contents.labels and (contents.derived or not labels)
        keyless, of_labels = not contents.keys, labels and not contents.derived
        shape = Shape(fields, text, contents.features, named, keyless, contents.single, contents.dense, of_labels)
        parsed = parser.parse_points(raw, first_row, part.name, shape)
        if contents.derived:
            return labels_of(parsed)
        if not labels:
            return parsed
        return Parsed(parsed.batch.select(labels_schema(contents.features, contents.dense).names), parsed.rejects)


@dataclass(frozen=True)
class KeyedFiles(Keyed):
    """Format with files called `train`, `test`, `val` and `labels`, whose extensions match the pattern `extension`.

    A table may have many files (`train-00000-of-00016.parquet`, `train/*.parquet`), and a data set may be a single
    file. Pairs may be in separate files (`pairs_train.jsonl`, `.tsv`, `.parquet`), with the points of all splits in one
    `queries` file. derives: if there is no file of labels, labels are extracted from the points. unsplit_pattern: file
    name pattern of the training files in a folder without splits. other_format_file: name of a file that indicates
    another format.
    """

    expects: str = ""
    extension: str = ""  # pattern of the files of points; labels and pairs may have another kind
    derives: bool = False
    unsplit_pattern: str | None = None
    other_format_file: str | None = None

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        if self._unsplit_files(names) or (not names and single_file(source, self.extension)):
            return self.other_format_file not in names
        shared = _table(names, "queries", self.extension) and _pairs(names, "train")
        return bool(_table(names, _STEMS["train"], self.extension) or shared) and self.other_format_file not in names

    def find(self, source: str) -> Inputs:
        """Find the data set at `source`.

        Raises InputError if points, labels or columns are missing, or if the same file exists in two formats.
        """
        if single_file(source, self.extension):
            root, slash, name = source.rpartition("/")
            return self._find_points((root or slash) if slash else ".", {"train": [name]})
        root, names = list_files(source)
        if self._unsplit_files(names):
            return self._find_points(root, {"train": self._unsplit_files(names)})
        if not self.derives or _table(names, "queries", self.extension) or _pairs(names, "train"):
            return self._find_tables(source, root, names)
        files = {split: _table(names, _STEMS[split], self.extension) for split in SPLITS}
        if not files["train"]:
            raise InputError(f"{source}: no training data here; found: {say_names(names)}. Expected {self.expects}.")
        return self._find_points(root, files, self._label_files(names))

    def _find_tables(self, source: str, root: str, names: Sequence[str]) -> Inputs:
        """Find a data set of points, pairs and labels, each table in its own files."""
        fields, parts = self.fields, list[Part]()
        shared = _table(names, "queries", self.extension)
        paired = [split for split in SPLITS if _pairs(names, split)]
        for split in SPLITS:
            files = _table(names, _STEMS[split], self.extension)
            if files and shared and split in paired:
                raise InputError(
                    f"{source}: both {files[0]} and {shared[0]} contain points of {split}. Remove one of the two files."
                )
            of_split = files or (shared if split in paired else [])
            if split in paired and not of_split:
                pairs = _pairs(names, split)[0]
                raise InputError(f"{source}: no points for {pairs} here. Expected {self.expects}.")
            required = [fields.key] if split in paired else [fields.key, fields.labels]
            parts += _parts(root, split, of_split, fields, required, split not in paired)
            parts += _parts(root, PAIRS + split, _pairs(names, split), fields, (fields.query_key, fields.label_key))
        own = self.label_fields or fields
        parts += _parts(root, LABELS, self._label_files(names), own, (own.key,))
        for table in ("train", LABELS) if self.labels_needed or self.label_fields else ("train",):
            if not any(part.table == table for part in parts):
                raise InputError(f"{source}: no {table} here; found: {say_names(names)}. Expected {self.expects}.")
        return self._inputs(parts, shared_points=bool(shared and paired))

    def _find_points(self, root: str, files: Mapping[str, Sequence[str]], of_labels: Sequence[str] = ()) -> Inputs:
        """Find a data set in `files`, which are grouped by split. Labels come from `of_labels`, or from the points.

        Raises InputError if columns are missing.
        """
        parts, derived = list[Part](), list[Part]()
        for split, names in files.items():
            for name in names:
                url = join(root, name)
                contents = _require_points(url, self.fields)
                parts.append(Part(split, name, {ROWS: url}, contents=contents))
                derived.append(Part(LABELS, name, {ROWS: url}, contents=replace(contents, derived=True)))
        if of_labels:
            own = self.label_fields or self.fields
            derived = _parts(root, LABELS, of_labels, own, (own.key,))
        elif self.label_fields:
            raise InputError(
                f"--fields: labels.* names columns of a file of labels, but {root} has no such file, or INPUT is a "
                "single file. Add labels.csv or labels.jsonl to a folder with the points, or leave labels.* out."
            )
        return self._inputs([*parts, *derived])

    def _label_files(self, names: Sequence[str]) -> list[str]:
        """List the files of labels, of the points' kind or else of any kind."""
        return _table(names, _STEMS[LABELS], self.extension) or _table(names, _STEMS[LABELS], _ANY)

    def _unsplit_files(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if self.unsplit_pattern and re.fullmatch(self.unsplit_pattern, name)]


@dataclass(frozen=True)
class Beir(Keyed):
    """`corpus.jsonl` (`_id`, `title`, `text`), `queries.jsonl` (`_id`, `text`), `qrels/train.tsv`, and optionally
    `qrels/dev.tsv`, `qrels/test.tsv` (query-id, corpus-id, score).

    The points of a split are the queries in its qrels; a score of 0 or less means that the pair is not relevant.
    """

    name: str = "beir"
    expects: str = "corpus.jsonl, queries.jsonl, qrels/train.tsv, and optionally qrels/dev.tsv, qrels/test.tsv"
    fields: Fields = field(default_factory=lambda: Fields(key="_id"))

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return any(f"corpus.jsonl{codec}" in names for codec in lines.SUFFIXES)

    def find(self, source: str) -> Inputs:
        root, names = list_files(source)

        def find_file(*plain: str, required: bool = True) -> str | None:
            usual = [name + suffix for name in plain for suffix in lines.SUFFIXES]
            return one_of(source, names, usual, self.expects, required=required)

        corpus, queries = find_file("corpus.jsonl"), find_file("queries.jsonl")
        parts = []
        for split in SPLITS:
            qrels = find_file(*(f"qrels/{name}.tsv" for name in _QRELS[split]), required=split == "train")
            if qrels:
                parts.append(
                    Part(split, str(queries), {ROWS: join(root, str(queries))}, contents=RowContents(labels=False))
                )
                parts.append(Part(PAIRS + split, qrels, {ROWS: join(root, qrels)}))
        parts.append(Part(LABELS, str(corpus), {ROWS: join(root, str(corpus))}))
        return self._inputs(parts, shared_points=True)


# JSON lines: a point has `key`, `text` and `labels`, a list of label keys; a label has `key` and `text`.
JSON_LINES = KeyedFiles(
    name="jsonl",
    expects="train.jsonl (key, text, labels) and labels.jsonl (key, text), and optionally test.jsonl, ...; or "
    "queries.jsonl (key, text), pairs_train.tsv or .csv (query_key, label_key) and labels.jsonl",
    extension=JSONL,
    other_format_file="corpus.jsonl",
)
# Parquet: the same columns; `key` and `text` strings, `labels` a list of strings.
PARQUET_FILES = KeyedFiles(
    name="parquet",
    expects="train.parquet (key, text, labels) and labels.parquet (key, text), and optionally other splits",
    extension=PARQUET,
)
# CSV and TSV: `text`, and `label` (one per row) or `labels` (separated by | or ;); `key` is optional.
CSV_FILES = KeyedFiles(
    name="csv",
    expects="train.csv (text, label), and optionally test.csv, labels.csv (key, text); or a single file; or "
    "queries.csv (key, text), pairs_train.csv (query_key, label_key) and labels.csv",
    extension=CSV,
    derives=True,
)
# A data set of Hugging Face `datasets`, from `save_to_disk`. Columns are as in CSV; class labels are read as names.
DATASETS = KeyedFiles(
    name="datasets",
    expects="dataset_dict.json and train/data-00000-of-00001.arrow (text, label or labels), as save_to_disk writes",
    extension=ARROW,
    derives=True,
    unsplit_pattern=rf"data-[^/]*\.{ARROW}",
)


def labels_of(points: Parsed) -> Parsed:
    """Return the distinct labels of parsed points, ordered by the first row of each label, without rejects."""
    named = points.batch["label_keys"]
    owner = np.repeat(np.arange(len(named)), pc.list_value_length(named).to_numpy())
    coded = named.flatten().dictionary_encode()
    first = np.full(len(coded.dictionary), len(owner), np.int64)
    np.minimum.at(first, coded.indices.to_numpy(), np.arange(len(owner)))
    rows = points.batch["row"].take(pa.array(owner[first]))
    return Parsed(pa.record_batch([rows, coded.dictionary, coded.dictionary], schema=labels_schema(False)), [])


def features_in(urls: Sequence[str], fields: Fields) -> bool:
    """Return whether any file contains features, according to its first rows or its columns. Raises InputError."""
    return any(fields.feature_ids in field_names(url) for url in urls)


def vector_length(urls: Sequence[str], fields: Fields) -> int:
    """Return the length of the first vector in the first rows of the files; 0 if there is none. Raises InputError."""
    name = fields.vector
    for url in urls:
        if is_csv(url) or name not in field_names(url):
            continue
        lengths: list[int] = []
        for first in islice(
            Keyed(fields).read(Part("", url, {ROWS: url}, contents=RowContents(dense=1)), _FIRST_ROWS), 1
        ):
            if name not in first.schema.names:
                _, found, _ = records.parse_lines(first["line"].to_pylist(), 0, url, lambda record, _: record.get(name))
                lengths = [len(value) for value in found if isinstance(value, list)]
            elif column_files.is_list(first[name].type):
                lengths = pc.list_value_length(first[name]).drop_null().to_pylist()
        if (length := next(filter(None, lengths), 0)) > MOST_DENSE:
            raise InputError(
                f"{url}: a vector of {length:,} numbers; expected at most {MOST_DENSE:,}. Use shorter vectors."
            )
        if length:
            return length
    return 0


def _of_one_length(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Return the parts, modified to expect vectors of the same length as the first vector."""
    dense = next((part.contents.dense for part in parts if part.contents.dense), 0)
    return tuple(
        replace(part, contents=replace(part.contents, dense=dense if part.contents.dense else 0)) for part in parts
    )


def field_names(url: str) -> Sequence[str]:
    """Return the field names of a file; for JSON lines, the field names of its first records.

    JSON lines are read one MiB at a time until a record with fields is found. Raises InputError, StorageError.
    """
    columns = column_files.column_names(url)
    if columns is not None:
        return columns
    for some in lines.read_lines(url):
        names = dict.fromkeys(name for line in some for name in records.field_names(line))  # in order of appearance
        if names:
            return list(names)
    return []  # every line is rejected later, when it is parsed


def require_named_columns(url: str, fields: Fields, read: Sequence[str], usual: Fields) -> None:
    """Raise InputError if a file lacks a column that `fields` names otherwise than `usual`, among the fields `read`."""
    stated = {name: column for name in read if (column := getattr(fields, name)) not in (getattr(usual, name), ABSENT)}
    names = field_names(url) if stated else ()
    for name, column in stated.items():
        if names and column not in names:
            present = ", ".join(records.shown(name) for name in names[:20])
            raise InputError(
                f"{url}: no column {column!r}, which --fields gives as {name}; found: {present}. Correct the name in "
                "--fields, or leave it out."
            )


def _require_points(url: str, fields: Fields) -> RowContents:
    """Return what a file of points with labels contains. Raises InputError if texts or labels are missing."""
    names = field_names(url)
    featured, dense = fields.feature_ids in names, vector_length([url], fields)
    of_labels = in_use(fields.label, fields.labels)
    has_text, has_labels = featured or dense or {*fields.texts} & {*names}, {*of_labels} & {*names}
    problems = [
        *([] if has_text else [f"no text ({fields.body})"]),
        *([] if has_labels else [f"no labels ({', '.join(of_labels)})"]),
    ]
    if problems:
        shown = ", ".join(ascii(name)[1:-1][:40] for name in names[:20]) or "no fields"
        known = len(names) > 1
        stated = [
            *([] if has_text else [f"text={names[0] if known else 'query'}"]),
            *([] if has_labels else [f"label={names[-1] if known else 'category'}"]),
        ]
        example = ",".join(stated)
        raise InputError(
            f"{url}: {' and '.join(problems)}; found: {shown}. Expected a header, and rows with a text and one "
            "label or a list of labels. If the columns have other names, specify the names, as in "
            f"--fields {example[:100]}"
            f"{'' if has_labels else ' (labels=… for lists)'}."
        )
    return RowContents(features=featured, keys=fields.key in names, single=fields.labels not in names, dense=dense)


def _table(names: Sequence[str], stem: str, kind: str) -> list[str]:
    """List the files of a table: `stem.kind`, `stem-00000.kind`, or `*.kind` in the folder `stem` or `stem.kind`."""
    pattern = rf"{stem}(?:[-_.0-9][^/]*|(?:\.{kind})?/[^/]+)?\.{kind}"
    return [name for name in names if re.fullmatch(pattern, name)]


def _pairs(names: Sequence[str], split: str) -> list[str]:
    return _table(names, rf"pairs[-_/]{_STEMS[split]}", _ANY)


def _is_tabbed(part: Part) -> bool:
    """Return whether a part contains tab-separated pairs, which need no header."""
    return part.table.startswith(PAIRS) and all(re.search(rf"\.{TSV}$", url) for url in part.files.values())


def _parts(
    root: str, table: str, names: Sequence[str], fields: Fields, required: Sequence[str], labels: bool = True
) -> list[Part]:
    """Make one part per file, in the order of the file names."""
    plain: dict[str, str] = {}
    for name in names:
        same = plain.setdefault(re.sub(rf"\.{_ANY}$", "", name), name)
        if same != name:
            raise InputError(
                f"{root}: both {same} and {name} are here, with the same content. Remove one of the two files."
            )
    urls = [join(root, name) for name in names]
    pairs = table.startswith(PAIRS)
    dense = 0 if pairs else vector_length(urls, fields)
    contents = RowContents(features=not pairs and features_in(urls, fields), labels=labels, dense=dense)
    groups = [[name] for name in required] + ([] if pairs or contents.features or dense else [in_use(*fields.texts)])
    example = "labels.key=code,labels.text=name" if table == LABELS else "key=id,text=query"
    parts = [Part(table, name, {ROWS: url}, contents=contents) for name, url in zip(names, urls, strict=True)]
    for part in parts:
        if not _is_tabbed(part):
            column_files.check_columns(part.files[ROWS], *groups, example=example)
    return parts
