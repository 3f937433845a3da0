"""Usual file names at a source, and field names in formats with string keys."""

import dataclasses
import difflib
import fnmatch
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pipelines.formats import lines
from pipelines.formats.base import Text
from schemas import storage
from schemas.errors import InputError
from schemas.storage import join

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_FILTERS = {
    "train": ("filter_labels_train.txt", "trn_filter_labels.txt"),
    "val": ("filter_labels_val.txt", "val_filter_labels.txt"),
    "test": ("filter_labels_test.txt", "tst_filter_labels.txt", "filter_labels_text.txt"),
}
# Names of files with data; a folder also has other files, such as README.md.
_DATA = re.compile(rf"\.(?:json\.gz|(?:jsonl|ndjson|csv|tsv|txt|text|parquet|arrow|npz){lines.CODEC})$")


def one_of(
    source: str, names: Sequence[str], usual: Sequence[str], expected: str, *, required: bool = False
) -> str | None:
    """Return the `usual` name that exists, or None. Raises InputError for two names, or for none if `required`."""
    present = [name for name in usual if name in names]
    if len(present) > 1:
        raise InputError(
            f"{source}: both {present[0]} and {present[1]} are here, with the same content. Remove one of the two "
            "files."
        )
    if not present and required:
        raise one_missing(source, names, usual, expected)
    return present[0] if present else None


def one_missing(source: str, names: Sequence[str], usual: Sequence[str], expected: str) -> InputError:
    """Return the error for a required file that is missing."""
    return InputError(f"{source}: no {' or '.join(usual)} here; found: {say_names(names)}. Expected {expected}.")


def filters_at(source: str, names: Sequence[str]) -> Mapping[str, str]:
    """Return the URLs of the XC filter files among `names`, by split."""
    stored = {split: [name + codec for name in usual for codec in lines.SUFFIXES] for split, usual in _FILTERS.items()}
    files = {split: one_of(source, names, usual, "") for split, usual in stored.items()}
    return {split: join(source, name) for split, name in files.items() if name}


def say_names(names: Sequence[str]) -> str:
    """List the first names, for a message."""
    return ", ".join(names[:10]) + (", …" if len(names) > 10 else "") if names else "nothing"


def is_pattern(source: str) -> bool:
    """Return whether `source` is a pattern: it contains `*` or `?`, and no file or folder has exactly this name."""
    if not set(source) & set("*?"):
        return False
    return not (storage.exists(source) or storage.is_folder(source) or storage.list_names(source))


def single_file(source: str, kind: str) -> bool:
    """Return whether `source` is a single file with the extension `kind` (a regex), not a folder or a pattern."""
    named = re.search(rf"\.{kind}$", source) is not None
    return named and not is_pattern(source) and not storage.list_names(source)


def list_files(source: str) -> tuple[str, list[str]]:
    """Return (prefix, sorted names below the prefix) of `source`, a prefix or a pattern (`is_pattern`).

    For a prefix, the result contains the names directly under the prefix and, as `folder/name`, the names in its
    folders; `folder/name/` is a folder in a folder. For a pattern, the result contains the matching names, relative to
    the folders before the first wildcard; `[` and `{` stand for themselves. Names that begin with `.` or `_` are left
    out.
    """
    if is_pattern(source):
        parts = source.split("/")
        wild = next(i for i, part in enumerate(parts) if "*" in part or "?" in part)
        root = "/".join(parts[:wild]) or ("/" if source.startswith("/") else ".")
        return root, _matching(root, parts[wild:])
    types, names = storage.list_types(source), list[str]()
    for name in visible(types):
        inside = storage.list_types(join(source, name)) if types[name] != "file" else {}
        names += [f"{name}/{each}{'/' * (inside[each] == 'directory')}" for each in visible(inside)]
        names += [] if inside else [name]
    return source, sorted(names)


def visible(names: Iterable[str]) -> list[str]:
    """Return the names that do not begin with `.` or `_`, which mark files of other programs, such as `._a.jsonl`."""
    return [name for name in names if not name.startswith((".", "_"))]


def notes_on(source: str, read: Sequence[str]) -> Iterator[str]:
    """Yield lines to print about the files at `source`, of which the URLs `read` are read.

    Raises InputError for a filter file that is not read.
    """
    root, names = list_files(source)
    left = [name for name in names if join(root, name) not in read and (name.endswith("/") or _DATA.search(name))]
    for name in left:
        if "filter_labels" in name and (name.endswith("/") or storage.size(join(root, name))):
            raise InputError(
                f"{join(root, name)}: a filter file names points and labels by line number, so it works only beside "
                "the points of an XC format. Give the data in the format xc-text, or remove the file: its pairs then "
                "count as wrong predictions."
            )
    if left:
        yield f"{source}: not read: {say_names(left)}"
    if unchecked := lines.unchecked(read):
        yield f"damage cannot be noticed, because these files have no checksums: {say_names(unchecked)}"


def _matching(root: str, patterns: Sequence[str]) -> list[str]:
    names = fnmatch.filter(visible(storage.list_names(root)), patterns[0].replace("[", "[[]"))
    if len(patterns) == 1:
        return sorted(names)
    return sorted(f"{name}/{rest}" for name in names for rest in _matching(join(root, name), patterns[1:]))


LABELS_PREFIX = "labels."  # prefix of a field of the table of labels
ABSENT = "\x01absent"  # name of a field whose usual column is used for another field
OF_PAIRS = ("query_key", "label_key", "weight")  # all other fields belong to points and labels
OF_TEXTS = ("key", "text", "title", "content")
OF_ROWS = (*OF_TEXTS, "feature_ids", "feature_values", "vector")  # fields of points and labels


@dataclass(frozen=True)
class Fields:
    """Name of each field in the data.

    A point has a key, a text, and `labels` or one `label`. A label has a key and a text. A pair has a query key, a
    label key and optionally a weight. If a record has `title`, the text is the title followed by `text` or `content`.
    Features and a vector are optional.
    """

    key: str = "key"
    text: str = "text"
    labels: str = "labels"
    label: str = "label"
    title: str = "title"
    content: str = "content"
    feature_ids: str = "feature_ids"
    feature_values: str = "feature_values"
    vector: str = "vector"
    query_key: str = "query_key"
    label_key: str = "label_key"
    weight: str = "weight"

    @property
    def texts(self) -> tuple[str, str, str]:
        """Fields that may contain the text."""
        return self.title, self.text, self.content

    @property
    def body(self) -> str:
        """Field that contains the text if no other field does."""
        return self.text if self.text != ABSENT else self.title

    def within(self, columns: Sequence[str]) -> "Fields":
        """Return the names of fields in rows with `columns`: these names if they have content, else the usual names."""
        if not {*self.texts, self.feature_ids, self.vector} & {*columns}:
            return Fields()
        return self if self.key in columns else dataclasses.replace(self, key=Fields().key)


Named = TypeVar("Named", bound="DataclassInstance")  # such as Fields: names of fields


def in_use(*names: str) -> list[str]:
    """Return the field names in use."""
    return [name for name in names if name != ABSENT]


class Shape(NamedTuple):
    """Structure of points: field names, the parts of a text, whether features and labels exist, and vector length."""

    fields: Fields
    text: Text
    features: bool
    labels: bool
    keyless: bool = False  # a point's key is a hash of its text
    single: bool = False  # a row names one label, in the field `label`
    dense: int = 0  # length of a row's vector; 0: no vector
    of_labels: bool = False  # rows are labels, whose keys have no blanks around them

    @property
    def needs_text(self) -> bool:
        """Whether a row without a text would be empty."""
        return not (self.features or self.dense)


def text_key(text: str) -> str:
    """Return a key for a point without a key: a hash of its text, so that rows with the same text become one point."""
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def parse_fields_by_table(text: str, usual: Named = Fields()) -> tuple[Named, Named | None]:  # type: ignore[assignment]
    """Parse `key=id,labels.key=code` into the field names of points and pairs, and the field names of labels.

    Entries that start with `labels.` change only the field names of labels; without such entries, the second result is
    None. Raises the errors of `parse_fields`.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    of_labels = [item.removeprefix(LABELS_PREFIX) for item in items if item.startswith(LABELS_PREFIX)]
    fields = parse_fields(",".join(item for item in items if not item.startswith(LABELS_PREFIX)), usual)
    return fields, parse_fields(",".join(of_labels), fields) if of_labels else None


def parse_fields(text: str, usual: Named = Fields()) -> Named:  # type: ignore[assignment]
    """Parse `key=id,text=query`, which gives the names of the fields that differ from the usual names.

    A column belongs to one field: if an entry assigns a column to a field, the field that usually uses this column is
    absent. Only the key and the text may share a column. Raises InputError if a field is unknown, a name is missing, or
    one column is assigned to two fields.
    """
    names = [field.name for field in dataclasses.fields(usual)]
    changes = dict[str, str]()
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"--fields: unknown field {name!r}; {meant}known fields: {', '.join(names)}.")
        if not equals or not value or name in changes:
            raise InputError(f"--fields: expected {name}=NAME once, got {item!r}. For example: key=id,text=query.")
        changes[name] = value
    changed = vars(usual) | changes
    for name, other in itertools.product(changes, names):
        same = name != other and changed[name] == changed[other] and (name in OF_PAIRS) == (other in OF_PAIRS)
        if same and {name, other} != {"key", "text"}:
            if other in changes:
                raise InputError(
                    f"--fields: {name} and {other} both name the column {changed[name]!r}. Use each column once."
                )
            changed[other] = ABSENT
    return dataclasses.replace(usual, **changed)
