"""What the forms with string keys call their fields, and how data that calls them otherwise is read."""

import dataclasses
import difflib
from dataclasses import dataclass

from schemas.errors import InputError


@dataclass(frozen=True)
class Fields:
    """The name of each field in the data. A point: key, text, labels; a label: key, text; a pair: the last three.

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
        return self.title, self.text, self.content


def parse_fields(text: str, usual: Fields = Fields()) -> Fields:  # frozen
    """`key=id,text=query`: the names that differ from the usual ones. Raises InputError: no such field, or no name."""
    known = [field.name for field in dataclasses.fields(Fields)]
    changes = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, given = (part.strip() for part in item.partition("="))
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise InputError(f"--fields: no field {name!r}; {meant}There are {', '.join(known)}.")
        if not equals or not given or name in changes:
            raise InputError(f"--fields: expected {name}=NAME once, got {item!r}. For example: key=id,text=query.")
        changes[name] = given
    return dataclasses.replace(usual, **changes)
