"""Names of the fields in the forms with string keys, and how data with other names is read."""

import dataclasses
import difflib
from dataclasses import dataclass
from typing import NamedTuple

from pipelines.formats.base import Text
from schemas.errors import InputError


@dataclass(frozen=True)
class Fields:
    """Name of each field in the data. A point: key, text, labels; a label: key, text; a pair: the last three.

    Where a record has `title`, the text is the title and then `text` or `content`; features are optional.
    """

    key: str = "key"
    text: str = "text"
    labels: str = "labels"
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
