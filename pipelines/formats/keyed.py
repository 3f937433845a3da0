"""Formats whose labels have keys: JSON lines, CSV, Parquet, data sets, BEIR, AttentionXML; and texts to predict on."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, zip_longest

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.formats import base, from_columns, from_lines
from pipelines.formats.base import LABELS, PAIRS, SPLITS, Fields, Inputs, Parsed, Part, RowContents, Text
from pipelines.formats.from_columns import ARROW, CSV, PARQUET, is_csv
from schemas import storage
from schemas.errors import InputError, option
from schemas.manifest import MOST_DENSE
from schemas.ragged import offsets_of
from schemas.storage import join

ROWS = "rows"  # the role of a part's only file
_FIRST_ROWS = 1 << 10  # first rows, which show the length of vectors
JSONL, TSV = rf"(?:jsonl|ndjson){base.CODEC}", rf"tsv{base.CODEC}"
_ANY = rf"(?:{JSONL}|{PARQUET}|{CSV}|{ARROW})"  # pattern of the files of labels and pairs
_STEMS = {"train": "train", "val": "(?:val|valid|validation|dev)", "test": "test", LABELS: "labels"}
_EXAMPLE = ("query", "category")  # names of a text and a label
_QRELS = {"train": ("train",), "val": ("dev", "val"), "test": ("test",)}


@dataclass(frozen=True)
class Keyed:
    """Reads parts that consist of one file each, according to the file extension. `fields`: names of the fields.

    encoding: of files of text; None: by the byte order mark, or UTF-8. whole: also read columns that are no fields.
    """

    fields: Fields = field(default_factory=Fields)
    label_fields: Fields | None = None  # names in the table of labels; None: the same names
    labels_needed: bool = True  # False: points may name labels that another source defines
    encoding: str | None = None
    whole: bool = False
    name: str = ""

    def fields_of(self, part: Part) -> Fields:
        return (part.lists_labels and self.label_fields) or self.fields

    def _inputs(self, parts: Sequence[Part], shared_points: bool = False) -> Inputs:
        """Return the inputs with `parts`. Raises InputError if a file lacks a column that --fields names."""
        for part in parts:
            if not (part.contents.derived or _is_tabbed(part)):
                of_labels = ("labels", "label") if part.contents.labels else ()
                read = base.OF_PAIRS if part.table.startswith(PAIRS) else (*base.OF_ROWS, *of_labels)
                usual = self.fields if part.table == LABELS else Fields()
                self.require_named_columns(part.files[ROWS], self.fields_of(part), read, usual)
        # All vectors have the length of the first one.
        dense = next((part.contents.dense for part in parts if part.contents.dense), 0)
        contents = (replace(part.contents, dense=dense if part.contents.dense else 0) for part in parts)
        parts = tuple(replace(part, contents=known) for part, known in zip(parts, contents, strict=True))
        return Inputs(self.name, parts, keyed=True, shared_points=shared_points)

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield blocks with one column `line` or, for columnar files, with the columns of the file."""
        (url,), fields = part.files.values(), self.fields_of(part)
        names = self.field_names(url) if self.whole else [*vars(fields).values()]
        names = [name for name in names if self.whole or part.contents.dense or name != fields.vector]
        if is_csv(url) and not _is_tabbed(part):
            return from_columns.read_csv(url, block_rows, self.encoding)
        if url.endswith(f".{ARROW}"):
            return from_columns.read_arrow(url, block_rows, names)
        if url.endswith(f".{PARQUET}"):
            return from_columns.read_parquet(url, block_rows, names)
        return iter(base.LineBlocks(url, block_rows, encoding=self.encoding))

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        (url,), fields, contents = part.files.values(), self.fields_of(part), part.contents
        parser = from_columns if is_csv(url) or url.endswith((f".{PARQUET}", f".{ARROW}")) else from_lines
        if _is_tabbed(part):
            return from_lines.parse_tabbed_pairs(raw, first_row, part.name)
        if part.table.startswith(PAIRS):
            return parser.parse_pairs(raw, first_row, part.name, fields)
        parsed = parser.parse_points(raw, first_row, part, fields, text)
        if contents.derived:
            return labels_of(parsed)
        if part.table != LABELS:
            return parsed
        return Parsed(parsed.batch.select(base.labels_schema(contents.features, contents.dense).names), parsed.rejects)

    def vector_length(self, urls: Sequence[str], fields: Fields) -> int:
        """Return the length of the first vector in the first rows of the files; 0: none. Raises InputError."""
        name = fields.vector
        for url in urls:
            if is_csv(url) or name not in self.field_names(url):
                continue
            lengths: list[int] = []
            part = Part("", url, {ROWS: url}, contents=RowContents(dense=1))
            for first in islice(replace(self, fields=fields, label_fields=None).read(part, _FIRST_ROWS), 1):
                if name not in first.schema.names:
                    lines = first["line"].to_pylist()
                    _, found, _ = base.parse_lines(lines, 0, url, lambda record, _: record.get(name))
                    lengths = [len(value) for value in found if isinstance(value, list)]
                elif from_columns.is_list(first[name].type):
                    lengths = pc.list_value_length(first[name]).drop_null().to_pylist()
            if (length := next(filter(None, lengths), 0)) > MOST_DENSE:
                raise InputError(
                    f"{url}: a vector of {length:,} numbers; expected at most {MOST_DENSE:,}. Use shorter vectors."
                )
            if length:
                return length
        return 0

    def field_names(self, url: str) -> Sequence[str]:
        """Return the field names of a file; for JSON lines, the field names of its first records.

        JSON lines are read one MiB at a time until a record with fields is found. Raises InputError, StorageError.
        """
        columns = from_columns.column_names(url, self.encoding)
        if columns is not None:
            return columns
        for some in base.read_lines(url, self.encoding):
            names = dict.fromkeys(name for line in some for name in base.field_names(line))  # in order of appearance
            if names:
                return list(names)
        return []  # every line is rejected later, when it is parsed

    def require_named_columns(self, url: str, fields: Fields, read: Sequence[str], usual: Fields) -> None:
        """Raise InputError if a file lacks a column that `fields` names unlike `usual`, among the fields `read`."""
        stated = {name: getattr(fields, name) for name in read if getattr(fields, name) != getattr(usual, name)}
        names = self.field_names(url) if stated else ()
        for name, column in stated.items():
            if names and column not in (*names, base.ABSENT):
                present = ", ".join(base.shown(name) for name in names[:20])
                raise InputError(
                    f"{url}: no column {column!r}, which {option('fields')} gives as {name}; found: {present}. Correct "
                    f"the name in {option('fields')}, or leave it out."
                )

    def check_columns(self, url: str, *required: Sequence[str], example: str = "key=id,text=query") -> None:
        """Raise InputError if a file contains no column from one of the groups in `required`; types are checked later.

        example: a value of --fields to show in the message.
        """
        names = from_columns.column_names(url, self.encoding)
        for group in required:
            if names is not None and not set(group) & set(names):
                present = ", ".join(base.shown(name) for name in names[:20])
                raise InputError(
                    f"{url}: no column {' or '.join(map(repr, group))}; found: {present}. If the column has another "
                    f"name, rename it, or give its name with {option('fields')}, as in {option('fields', example)}."
                )


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
        if self._unsplit_files(names) or (not names and base.single_file(source, self.extension)):
            return self.other_format_file not in names
        shared = _table(names, "queries", self.extension) and _pairs(names, "train")
        return bool(_table(names, _STEMS["train"], self.extension) or shared) and self.other_format_file not in names

    def find(self, source: str) -> Inputs:
        """Find the data set at `source`.

        Raises InputError if points, labels or columns are missing, or if the same file exists in two formats.
        """
        if base.single_file(source, self.extension):
            root, slash, name = source.rpartition("/")
            return self._find_points((root or slash) if slash else ".", {"train": [name]})
        root, names = base.list_files(source)
        if self._unsplit_files(names):
            return self._find_points(root, {"train": self._unsplit_files(names)})
        if not self.derives or _table(names, "queries", self.extension) or _pairs(names, "train"):
            return self._find_tables(source, root, names)
        files = {split: _table(names, _STEMS[split], self.extension) for split in SPLITS}
        if not files["train"]:
            raise InputError(
                f"{source}: no training data here; found: {base.say_names(names)}. Expected {self.expects}."
            )
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
            parts += self._parts(root, split, of_split, fields, required)
            of_pairs = fields.query_key, fields.label_key
            parts += self._parts(root, PAIRS + split, _pairs(names, split), fields, of_pairs)
        own = self.label_fields or fields
        parts += self._parts(root, LABELS, self._label_files(names), own, (own.key,))
        for table in ("train", LABELS) if self.labels_needed or self.label_fields else ("train",):
            if not any(part.table == table for part in parts):
                raise InputError(f"{source}: no {table} here; found: {base.say_names(names)}. Expected {self.expects}.")
        return self._inputs(parts, shared_points=bool(shared and paired))

    def _find_points(self, root: str, files: Mapping[str, Sequence[str]], of_labels: Sequence[str] = ()) -> Inputs:
        """Find a data set in `files`, which are grouped by split. Labels come from `of_labels`, or from the points.

        Raises InputError if columns are missing.
        """
        places = [(split, name, join(root, name)) for split, names in files.items() for name in names]
        parts = [Part(split, name, {ROWS: url}, contents=self._require_points(url)) for split, name, url in places]
        derived = [replace(part, table=LABELS, contents=replace(part.contents, derived=True)) for part in parts]
        if of_labels:
            own = self.label_fields or self.fields
            derived = self._parts(root, LABELS, of_labels, own, (own.key,))
        elif self.label_fields:
            raise InputError(
                f"{option('fields')}: labels.* names columns of a file of labels, but {root} has none, or is a single "
                "file. Add labels.csv or labels.jsonl to a folder with the points, or leave labels.* out."
            )
        return self._inputs([*parts, *derived])

    def _parts(
        self, root: str, table: str, names: Sequence[str], fields: Fields, required: Sequence[str]
    ) -> list[Part]:
        """Make one part per file, in the order of the file names; the files have the fields `required`."""
        plain: dict[str, str] = {}
        for name in names:
            same = plain.setdefault(re.sub(rf"\.{_ANY}$", "", name), name)
            if same != name:
                raise InputError(
                    f"{root}: both {same} and {name} are here, with the same content. Remove one of the two files."
                )
        urls, labels = [join(root, name) for name in names], fields.labels in required
        contents, groups = RowContents(labels=labels), [[name] for name in required]
        if not table.startswith(PAIRS):
            featured = any(fields.feature_ids in self.field_names(url) for url in urls)
            contents = RowContents(featured, labels=labels, dense=self.vector_length(urls, fields))
            groups += [base.in_use(*fields.texts)] if contents.need_text else []
        example = "labels.key=code,labels.text=name" if table == LABELS else "key=id,text=query"
        parts = [Part(table, name, {ROWS: url}, contents=contents) for name, url in zip(names, urls, strict=True)]
        for part in parts:
            if not _is_tabbed(part):
                self.check_columns(part.files[ROWS], *groups, example=example)
        return parts

    def _require_points(self, url: str) -> RowContents:
        """Return what a file of points with labels contains. Raises InputError if texts or labels are missing."""
        fields, names = self.fields, self.field_names(url)
        featured, dense = fields.feature_ids in names, self.vector_length([url], fields)
        of_labels = base.in_use(fields.label, fields.labels)
        has_labels, (first, *_, last) = {*of_labels} & {*names}, names if len(names) > 1 else _EXAMPLE
        missing = dict[str, str]()  # and how --fields might name it
        if not (featured or dense or {*fields.texts} & {*names}):
            missing[f"no text ({fields.body})"] = f"text={first}"
        if not has_labels:
            missing[f"no labels ({', '.join(of_labels)})"] = f"label={last}"
        if missing:
            shown = ", ".join(ascii(name)[1:-1][:40] for name in names[:20]) or "no fields"
            example = ",".join(missing.values())[:100]
            raise InputError(
                f"{url}: {' and '.join(missing)}; found: {shown}. Expected a header, and rows with a text and one "
                f"label or a list of labels. If the columns have other names, specify the names, as in "
                f"{option('fields', example)}{'' if has_labels else ' (labels=… for lists)'}."
            )
        return RowContents(features=featured, keys=fields.key in names, single=fields.labels not in names, dense=dense)

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
        return any(name in names for name in base.packed("corpus.jsonl"))

    def find(self, source: str) -> Inputs:
        root, names = base.list_files(source)

        def find_part(table: str, *plain: str, required: bool = True) -> list[Part]:
            name = base.one_of(source, names, base.packed(*plain), self.expects, required=required)
            return [Part(table, name, {ROWS: join(root, name)}, contents=RowContents(labels=False))] if name else []

        labels, parts = find_part(LABELS, "corpus.jsonl"), list[Part]()
        for split in SPLITS:
            points, qrels = find_part(split, "queries.jsonl"), [f"qrels/{name}.tsv" for name in _QRELS[split]]
            pairs = find_part(PAIRS + split, *qrels, required=split == "train")
            parts += [*points, *pairs] if pairs else []
        return self._inputs([*parts, *labels], shared_points=True)


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
    coded = named.flatten().dictionary_encode()
    _, first = np.unique(coded.indices, return_index=True)
    rows = points.batch["row"].take(pc.list_parent_indices(named).take(pa.array(first)))
    return Parsed(pa.record_batch([rows, coded.dictionary, coded.dictionary], schema=base.labels_schema(False)), [])


def _table(names: Sequence[str], stem: str, kind: str) -> list[str]:
    """List the files of a table: `stem.kind`, `stem-00000.kind`, or `*.kind` in the folder `stem` or `stem.kind`."""
    pattern = rf"{stem}(?:[-_.0-9][^/]*|(?:\.{kind})?/[^/]+)?\.{kind}"
    return [name for name in names if re.fullmatch(pattern, name)]


def _pairs(names: Sequence[str], split: str) -> list[str]:
    return _table(names, rf"pairs[-_/]{_STEMS[split]}", _ANY)


def _is_tabbed(part: Part) -> bool:
    """Return whether a part contains tab-separated pairs, which need no header."""
    return part.table.startswith(PAIRS) and all(re.search(rf"\.{TSV}$", url) for url in part.files.values())


TEXT = "text"


@dataclass(frozen=True)
class AttentionXml:
    """Reads texts, and labels that are separated by blanks. Points without keys have a hash of the text as key."""

    name: str = "attentionxml"
    expects: str = "train_raw_texts.txt (or train_texts.txt), train_labels.txt, and optionally the same files of test"

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return any(name.startswith(("train_raw_texts.txt", "train_texts.txt")) for name in names)

    def find(self, source: str) -> Inputs:
        source, names = base.list_files(source)
        parts = list[Part]()
        for split in SPLITS:
            raw, plain, named = (base.packed(f"{split}_{stem}.txt") for stem in ("raw_texts", "texts", LABELS))
            if split != "train" and not {*raw, *plain, *named} & {*names}:
                continue
            texts = base.one_of(source, names, raw, self.expects)
            texts = texts or base.one_of(source, names, plain, self.expects, required=True)
            labels = base.one_of(source, names, named, self.expects, required=True)
            files = {TEXT: join(source, str(texts)), LABELS: join(source, str(labels))}
            contents = RowContents(keys=False)
            parts.append(Part(split, str(texts), files, contents=contents))
            parts.append(Part(LABELS, str(texts), files, contents=replace(contents, derived=True)))
        return Inputs(self.name, tuple(parts), keyed=True)

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield blocks with the columns TEXT and LABELS. Raises InputError if the files have different lengths."""
        readers = (base.LineBlocks(part.files[role], block_rows) for role in (TEXT, LABELS))
        for texts, labels in zip_longest(*readers):
            if not texts or not labels or len(texts) != len(labels):
                places = " and ".join(part.files.values())
                raise InputError(f"{places}: expected the same number of lines. Do the files belong to the same split?")
            yield pa.record_batch({TEXT: texts["line"], LABELS: labels["line"]})

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        named = [line.split() for line in raw[LABELS].to_pylist()]
        offsets = pa.array(offsets_of(np.array([len(keys) for keys in named])), pa.int32())
        keys = pa.array(chain.from_iterable(named), pa.binary()).view(pa.string())  # checked when it is parsed
        columns = {TEXT: raw[TEXT].view(pa.large_string()), LABELS: pa.ListArray.from_arrays(offsets, keys)}
        parsed = from_columns.parse_points(pa.record_batch(columns), first_row, part, Fields(), text)
        return labels_of(parsed) if part.contents.derived else parsed


INPUT = "\x01input"  # column with the rows as they are in the file: records of its columns, or lines of JSON
_FORMS = {"text": rf"(?:txt|text){base.CODEC}", "jsonl": JSONL, "parquet": PARQUET, "csv": CSV, "arrow": ARROW}


def _form_by_name(name: str) -> str:
    return next((form for form, kind in _FORMS.items() if re.search(rf"\.{kind}$", name)), "")


@dataclass(frozen=True)
class Texts:
    """Rows from files in format `form` (None: from the file name). `title_only`: like `extremis shard --text title`.

    `fields`: names of the fields; None: those of `made_with` if a file has such texts, else the usual names.
    `encoding`: of files of text; None: by the byte order mark, or UTF-8. `whole`: yield the column INPUT, too.
    """

    source: str
    form: str | None = None
    fields: Fields | None = None
    title_only: bool = False
    made_with: Fields = field(default_factory=Fields)
    encoding: str | None = None
    whole: bool = False

    def batches(self, rows: int, features: bool, dense: int = 0) -> Iterator[pa.RecordBatch]:
        """Yield up to `rows` rows at a time: `key`, `text` and, with `features`, `feature_ids` and `feature_values`.

        dense: length of the vectors in an additional column; 0: no vectors. Raises InputError at the first invalid row,
        if there are no rows, and if a file changes while it is read; StorageError.
        """
        with base.unchanged(self.places()):
            yield from self._read(rows, features, dense)

    def _read(self, rows: int, features: bool, dense: int) -> Iterator[pa.RecordBatch]:
        seen = 0
        for url, form in self.files():
            if form == "text" and (features or dense):
                read = "sparse features" if features else "vectors"
                raise InputError(
                    f"{url}: these are lines of text, but this encoder reads {read}. Give JSON lines or Parquet."
                )
            blocks = self._read_lines(url, rows) if form == "text" else self._read_records(url, rows, features, dense)
            for batch in blocks:
                if "key" not in batch.schema.names:  # row numbers identify rows
                    numbers = pa.array(np.arange(seen, seen + batch.num_rows)).cast(pa.string())
                    batch = batch.add_column(0, "key", numbers)
                seen += batch.num_rows
                if batch.num_rows:
                    yield batch
        if not seen:
            raise InputError(f"{self.source}: the input has no rows.")

    def notes(self) -> Iterator[str]:
        """Yield lines to print about the files. Raises InputError like `files`."""
        yield from base.notes_on(self.source, self.places())

    def places(self) -> list[str]:
        """List the URLs of all files. Raises InputError like `files`."""
        return [url for url, _ in self.files()]

    def files(self) -> list[tuple[str, str]]:
        """List (URL, form) of all files by name. Raises InputError if there are no files or a format is unknown."""
        urls = [self.source]
        if not storage.exists(self.source):
            root, names = base.list_files(self.source)
            names = [name for name in names if not name.endswith("/")]
            kept = names if self.form or base.is_pattern(self.source) else [*filter(_form_by_name, names)]
            if not kept:
                raise InputError(
                    f"{self.source}: no input here; found: {base.say_names(names)}. Expected a file, a folder or a "
                    "pattern: text lines (.txt), JSON lines (.jsonl), CSV (.csv, .tsv), all of these also compressed, "
                    "Parquet (.parquet) or Arrow (.arrow)."
                )
            urls = [join(root, name) for name in kept]
        files = [(url, self.form or _form_by_name(url)) for url in urls]
        for url in (url for url, form in files if not form):
            raise InputError(f"{url}: unknown file extension. Give the format with {option('form', '|'.join(_FORMS))}.")
        return files

    def _read_lines(self, url: str, rows: int) -> Iterator[pa.RecordBatch]:
        first = 0

        def refuse(row: int, byte: int) -> None:
            line = block["line"][row].as_py()[max(byte - 40, 0) :]
            raise InputError(f"{url}, line {first + row + 1:,}: {base.not_utf8(line)}.")

        for block in base.LineBlocks(url, rows, encoding=self.encoding):
            text = base.decode_column(block["line"], refuse)
            given = {INPUT: pa.StructArray.from_arrays([text], ["text"])} if self.whole else {}
            yield pa.record_batch({"text": text, **given})
            first += len(block)

    def _read_records(self, url: str, rows: int, features: bool, dense: int) -> Iterator[pa.RecordBatch]:
        reader = Keyed(encoding=self.encoding, whole=self.whole)
        names = reader.field_names(url)
        fields = self.fields or self.made_with.within(names)
        reader = replace(reader, fields=fields)
        reader.require_named_columns(url, self.fields or Fields(), base.OF_TEXTS, Fields())
        if not (features or dense):
            reader.check_columns(url, base.in_use(*fields.texts))
        is_present = {fields.feature_ids: not features or fields.feature_ids in names}
        is_present[fields.vector] = not dense or reader.vector_length([url], fields) > 0
        for name in (name for name, present in is_present.items() if not present):
            raise InputError(
                f"{url}: no column {name}, which this encoder needs. Add it, or give its name with {option('fields')}."
            )
        # As for a point with labels in pairs, only key, text, features and vector are read.
        contents = RowContents(features, keys=fields.key in names, labels=False, dense=dense)
        part, first = Part("test", url, {ROWS: url}, contents=contents), 0
        for raw in reader.read(part, rows):
            parsed = reader.parse(raw, first, part, "title" if self.title_only else "title+content")
            if parsed.rejects:
                reject = parsed.rejects[0]
                raise InputError(f"{reject.file}, line {reject.line}: {reject.detail}. Fix the row, or leave it out.")
            batch = parsed.batch.drop_columns(["row", "merged", *([] if contents.keys else ["key"])])
            if self.whole:
                given = raw.take(pc.subtract(parsed.batch["row"], first))
                names = [name for name in given.schema.names if name != from_columns.COUNT]
                is_line = given.schema == base.SCHEMA
                batch = batch.append_column(INPUT, given["line"] if is_line else given.select(names).to_struct_array())
            first += raw.num_rows
            yield batch


BEIR = Beir()


ATTENTION_XML = AttentionXml()
