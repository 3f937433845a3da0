"""Names of the fields in the forms with string keys, and how data with other names is read."""

import dataclasses
import difflib
import hashlib
from dataclasses import dataclass
from typing import NamedTuple

from pipelines.formats.base import Text
from schemas.errors import InputError

OF_LABELS = "labels."  # before a field of the table of labels


@dataclass(frozen=True)
class Fields:
    """Name of each field in the data. A point: key, text, labels, or one `label`; a label: key, text; a pair: the last
    three.

    Where a record has `title`, the text is the title and then `text` or `content`; features are optional.
    """

    key: str = "key"
    text: str = "text"
    labels: str = "labels"
    label: str = "label"
    title: str = "title"
    content: str = "content"
    feature_ids: str = "feature_ids"
    feature_values: str = "feature_values"
    query_key: str = "query_key"
    label_key: str = "label_key"
    weight: str = "weight"

    @property
    def texts(self) -> tuple[str, str, str]:
        """Fields that a text may be in."""
        return self.title, self.text, self.content


class Shape(NamedTuple):
    """Shape of points: the names of fields, the parts of a text, and whether there are features and labels."""

    fields: Fields
    text: Text
    features: bool
    labels: bool
    keyless: bool = False  # a point's key is a hash of its text
    single: bool = False  # a row names one label, in the field `label`


def text_key(text: str) -> str:
    """Return the key of a point that has none: a hash of its text, so that rows of one text are one point."""
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def parse_fields_by_table(text: str, usual: Fields = Fields()) -> tuple[Fields, Fields | None]:
    """Read `key=id,labels.key=code`: the names in points and pairs, and those in the table of labels.

    The latter are the former, changed by what begins with `labels.`; None: the same. Raises as `parse_fields`.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    of_labels = [item.removeprefix(OF_LABELS) for item in items if item.startswith(OF_LABELS)]
    fields = parse_fields(",".join(item for item in items if not item.startswith(OF_LABELS)), usual)
    return fields, parse_fields(",".join(of_labels), fields) if of_labels else None


def parse_fields(text: str, usual: Fields = Fields()) -> Fields:  # frozen
    """Read `key=id,text=query`, the names that differ from the usual ones. Raises InputError: no such field or name."""
    names = [field.name for field in dataclasses.fields(Fields)]
    changes = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in names:
            near = difflib.get_close_matches(name, names, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"--fields: no field {name!r}; {meant}There are {', '.join(names)}.")
        if not equals or not value or name in changes:
            raise InputError(f"--fields: expected {name}=NAME once, got {item!r}. For example: key=id,text=query.")
        changes[name] = value
    return dataclasses.replace(usual, **changes)
