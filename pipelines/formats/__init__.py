"""Input formats of `extremis shard`, and detection of the format of a source."""

import importlib
from dataclasses import replace

from pipelines.formats.base import Format, list_files, parse_fields_by_table, say_names
from pipelines.formats.keyed import Keyed
from pipelines.options import FORMATS
from schemas import storage
from schemas.errors import InputError, option


def choose(source: str, name: str | None = None, fields: str | None = None, encoding: str | None = None) -> Format:
    """Return the format called `name`, or the format that matches the file names at `source`.

    fields: names of fields in the data, as in `key=id,text=query`; None: the usual names. encoding: of files of text.
    Raises InputError, for example if `source` matches two formats.
    """
    form = by_name(name) if name is not None else _recognise(source)
    if not isinstance(form, Keyed):
        if fields is None and encoding is None:
            return form
        raise InputError(
            f"{option('encoding' if fields is None else 'fields')} works only with formats that have named fields; "
            f"{source} is read as {form.name}, which has fixed names."
        )
    named, of_labels = parse_fields_by_table(fields or "", form.fields)
    return replace(form, fields=named, label_fields=of_labels, encoding=encoding)


def _recognise(source: str) -> Format:
    names = list_files(source)[1]
    forms = [by_name(name) for name in FORMATS]
    similar = [form for form in forms if form.recognises(source, names)]
    if len(similar) == 1:
        return similar[0]
    if similar:
        several = " and ".join(form.name for form in similar)
        raise InputError(f"{source}: looks like {several}; found: {say_names(names)}. Give {option('format')}.")
    known = "".join(f"\n  {form.name}: {form.expects}" for form in forms)
    present = "one file with an unknown extension" if not names and storage.exists(source) else say_names(names)
    hint = ""
    if any(name.partition(".gz")[0].endswith((".txt", ".md")) for name in [*names, source]):
        hint = " The labels of the texts are missing: write each text with its label or labels, as in train.csv with "
        hint += "the header text,label."
    raise InputError(f"{source}: no known input format here; found: {present}.{hint} Expected one of:{known}")


def by_name(name: str) -> Format:
    """Return the format called `name`. Raises InputError."""
    if name not in FORMATS:
        raise InputError(f"unknown input format {name!r}; known formats: {', '.join(FORMATS)}.")
    module, _, attribute = FORMATS[name].partition(":")
    form: Format = getattr(importlib.import_module(module), attribute)
    return form
