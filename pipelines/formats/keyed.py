"""Forms with string keys: which files at a source hold which table, and how each kind of file is read."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from pipelines.formats import keyed_arrow, keyed_csv, keyed_lines, keyed_pairs, keyed_parquet, lines, records
from pipelines.formats.base import LABELS, PAIRS, SPLITS, Inputs, Parsed, Part, Text, labels_schema
from pipelines.formats.derived import labels_of, remapped
from pipelines.formats.fields import Fields, Shape
from pipelines.formats.keyed_arrow import ARROW
from pipelines.formats.keyed_csv import CSV
from pipelines.formats.names import listed, listing, single_file
from schemas.errors import InputError
from schemas.storage import join

PLAIN, FEATURES = "rows", "rows with features"  # the role of a part's only file
PAIRED = " and pairs"  # in a role: the split has a pairs file, and its points name no labels themselves
KEYLESS = " without keys"  # a point's key is a hash of its text
SINGLE = " of one label"  # a row names one label
DERIVED = " whose labels are meant"  # a part of labels: those that points name
JSONL, PARQUET, TSV = rf"(?:jsonl|ndjson){lines.CODEC}", "parquet", rf"tsv{lines.CODEC}"
_STEMS = {"train": "train", "val": "(?:val|valid|validation|dev)", "test": "test", LABELS: "labels"}


@dataclass(frozen=True)
class Keyed:
    """Reader of parts of one file each, by the end of its name; `fields` are the names of the fields in it."""

    fields: Fields = field(default_factory=Fields)
    label_fields: Fields | None = None  # in the table of labels; None: the same
    labels_needed: bool = True  # False: points may name labels that are known from elsewhere

    def fields_of(self, part: Part) -> Fields:
        """Return the names of the fields in `part`."""
        own = part.table == LABELS and not any(DERIVED in role for role in part.files)
        return (own and self.label_fields) or self.fields

    def read(self, part: Part, block_rows: int) -> Iterator[pa.RecordBatch]:
        """Yield blocks with a column `line`, or of Parquet the columns as they are."""
        (url,), fields = part.files.values(), self.fields_of(part)
        if keyed_csv.is_csv(url) and not part.table.startswith(PAIRS):
            return keyed_csv.read_blocks(url, block_rows)
        if url.endswith(f".{ARROW}"):
            return keyed_arrow.read_blocks(url, block_rows, [*vars(fields).values()])
        if url.endswith(f".{PARQUET}"):
            return keyed_parquet.read_blocks(url, block_rows, [*vars(fields).values()])
        return lines.read_blocks(url, block_rows)

    def parse(self, raw: pa.RecordBatch, first_row: int, part: Part, text: Text) -> Parsed:
        ((role, url),), fields = part.files.items(), self.fields_of(part)
        parser = keyed_parquet if url.endswith((f".{PARQUET}", f".{ARROW}")) else keyed_lines
        if part.table.startswith(PAIRS):
            if re.search(rf"\.{TSV}$", url):
                return keyed_pairs.parse_pairs(raw, first_row, part.name)
            return parser.parse_pairs(raw, first_row, part.name, fields)
        # Labels are points that name none.
        features, labels, derived = FEATURES in role, part.table == LABELS, DERIVED in role
        named = derived or not (labels or PAIRED in role)
        shape = Shape(fields, text, features, named, KEYLESS in role, SINGLE in role)
        if keyed_csv.is_csv(url):
            parsed = _parse_csv(raw, first_row, part.name, shape)
        else:
            parsed = parser.parse_points(raw, first_row, part.name, shape)
        if derived:
            return labels_of(parsed)
        return Parsed(parsed.batch.select(labels_schema(features).names), parsed.rejects) if labels else parsed


def _parse_csv(raw: pa.RecordBatch, first_row: int, file: str, shape: Shape) -> Parsed:
    rows, places, rejects = keyed_csv.whole_rows(raw, first_row, file)
    named = shape.fields.labels
    if shape.labels and not shape.single:
        place = rows.schema.get_field_index(named)
        rows = rows.set_column(place, named, keyed_csv.split_lists(rows[named]))
    return remapped(keyed_parquet.parse_points(rows, 0, file, shape), places, first_row, rejects)


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
        if not names and single_file(source, self.kind):
            return True
        shared = _table(names, "queries", self.kind) and _pairs(names, "train")
        return bool(_table(names, _STEMS["train"], self.kind) or shared)

    def find(self, source: str) -> Inputs:
        """Find the data set at `source`.

        Raises InputError: no points or labels, one file in two dresses, or columns that are missing.
        """
        if single_file(source, self.kind):
            root, slash, name = source.rpartition("/")
            return self._whole(source, (root or slash) if slash else ".", {"train": [name]})
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
        own = self.label_fields or fields
        parts += _parts(root, LABELS, of_labels, own, (own.key,))
        for table in ("train", LABELS) if self.labels_needed else ("train",):
            if not any(part.table == table for part in parts):
                raise InputError(f"{source}: no {table} here; found: {listed(names)}. Expected {self.expects}.")
        return Inputs(self.name, tuple(parts), keyed=True, shared_points=bool(shared and paired))

    def _whole(
        self, source: str, root: str, files: Mapping[str, Sequence[str]], of_labels: Sequence[str] = ()
    ) -> Inputs:
        """Find a data set in `files` by split, whose labels are those of `of_labels`, or else those that points name.

        Raises InputError: columns that are missing.
        """
        parts, derived = list[Part](), list[Part]()
        for split, names in files.items():
            for name in names:
                url = join(root, name)
                role = _role(url, self.fields)
                parts.append(Part(split, name, {role: url}))
                derived.append(Part(LABELS, name, {role.replace(FEATURES, PLAIN) + DERIVED: url}))
        if of_labels:
            own = self.label_fields or self.fields
            derived = _parts(root, LABELS, of_labels, own, (own.key,))
        return Inputs(self.name, (*parts, *derived), keyed=True)


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


@dataclass(frozen=True)
class Csv(Parquet):
    """`train.csv`, and where there are any `test.csv`, `val.csv`, `labels.csv`; or one file. So `.tsv`.

    Columns are `text`, and `label` (a row names one) or `labels` (with | or ; between them); `key` is optional.
    Labels are those of `labels.csv` (`key`, `text`), or else those that the rows name.
    """

    name: str = "csv"
    expects: str = "train.csv (text, label), and where there are any test.csv, labels.csv (key, text); or one such file"
    kind: str = CSV

    def find(self, source: str) -> Inputs:
        if single_file(source, self.kind):
            return super().find(source)
        root, names = listing(source)
        if _table(names, "queries", self.kind):
            return super().find(source)
        files = {split: _table(names, _STEMS[split], self.kind) for split in SPLITS}
        if not files["train"]:
            raise InputError(f"{source}: no train here; found: {listed(names)}. Expected {self.expects}.")
        return self._whole(source, root, files, _table(names, _STEMS[LABELS], self.kind))


@dataclass(frozen=True)
class Datasets(Csv):
    """A data set of Hugging Face `datasets`, as `save_to_disk` writes it: with splits, or one that is train.

    Columns are those of `Csv`; class labels are their names.
    """

    name: str = "datasets"
    expects: str = (
        "dataset_dict.json and train/data-00000-of-00001.arrow (text, label or labels), as save_to_disk writes"
    )
    kind: str = ARROW

    def find(self, source: str) -> Inputs:
        root, names = listing(source)
        alone = _alone(names)
        return self._whole(source, root, {"train": alone}) if alone else super().find(source)

    def recognises(self, source: str, names: Sequence[str]) -> bool:
        return bool(_alone(names)) or super().recognises(source, names)


def features_in(urls: Sequence[str], fields: Fields) -> bool:
    """Tell whether the rows of any file have features, as its first rows or its columns show. Raises InputError."""
    return any(fields.feature_ids in field_names(url) for url in urls)


def field_names(url: str) -> Sequence[str]:
    """Return the names of the fields of a file, of JSON lines those of its first records.

    First are those of the first MiB, or the first one after. Raises InputError, StorageError.
    """
    if url.endswith(f".{PARQUET}"):
        return list(keyed_parquet.read_schema(url).names)
    if url.endswith(f".{ARROW}"):
        return keyed_arrow.field_names(url)
    if keyed_csv.is_csv(url):
        return keyed_csv.field_names(url)
    for some in lines.read_lines(url):
        names = dict.fromkeys(name for line in some for name in records.field_names(line))  # in their order
        if names:
            return list(names)
    return []  # every line is rejected when it is its turn


def _alone(names: Sequence[str]) -> list[str]:
    """List the files of a saved data set without splits."""
    return [name for name in names if re.fullmatch(rf"data-[^/]*\.{ARROW}", name)]


def _role(url: str, fields: Fields) -> str:
    """Describe what the rows of a file hold that has points and their labels. Raises InputError: neither is in it."""
    names = field_names(url)
    featured = fields.feature_ids in names
    problems = [
        *([] if featured or {*fields.texts} & {*names} else [f"no text ({fields.text}, {fields.title})"]),
        *([] if {fields.labels, fields.label} & {*names} else [f"no labels ({fields.label}, {fields.labels})"]),
    ]
    if problems:
        shown = ", ".join(ascii(name)[1:-1][:40] for name in names[:20]) or "no fields"
        example = f"text={names[0]},label={names[-1]}" if len(names) > 1 else "text=query,label=category"
        raise InputError(
            f"{url}: {' and '.join(problems)} in it; found: {shown}. Expected rows of a text with one label or a list "
            f"of them, below a header. If they are called otherwise, say so, as in --fields {example[:100]}."
        )
    parts = [FEATURES if featured else PLAIN, "" if fields.key in names else KEYLESS]
    return "".join([*parts, "" if fields.labels in names else SINGLE])


def _check_csv(url: str, fields: Fields, required: Sequence[str]) -> None:
    names = keyed_csv.field_names(url)
    missing = [name for name in required if name not in names] or not {*fields.texts} & {*names}
    if missing:
        raise InputError(
            f"{url}: expected the columns {', '.join(required)} and {fields.text}; found: {', '.join(names)[:200]}. If "
            "they are called otherwise, say so, as in --fields labels.key=code,labels.text=name."
        )


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
        elif keyed_csv.is_csv(url) and not table.startswith(PAIRS):
            _check_csv(url, fields, required)
    pairs = table.startswith(PAIRS)
    role = FEATURES if not pairs and features_in(urls, fields) else PLAIN
    for url in urls:
        if url.endswith(f".{PARQUET}") and role == PLAIN and not pairs:
            keyed_parquet.check_columns(url, fields.texts)
    return [Part(table, name, {role + suffix: url}) for name, url in zip(names, urls, strict=True)]
