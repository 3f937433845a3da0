"""Sections of a recipe that choose a class by `kind`; each class states the options of its own kind."""

import importlib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pydantic import ModelWrapValidatorHandler, model_validator

from schemas.options import Options


def import_name(place: str) -> Any:
    """Import the module of `place`, "module:name", and return what has the name there."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


class KindSection(Options):
    """Base of such a section: a subclass names KINDS and has their common options, its subclasses those of one kind.

    The former validates values as the section of their kind. A kind's module is imported at its first use.
    """

    NAME: ClassVar[str]  # of the section, "encoder"
    KINDS: ClassVar[Mapping[str, str]]  # "module:Class" by kind, the default first; Class.section states the options

    kind: str

    @classmethod
    def class_of(cls, kind: object) -> Any:
        """Return the class that `kind` names. Raises ValueError: an unknown kind."""
        if not isinstance(kind, str) or kind not in cls.KINDS:
            raise ValueError(f"{cls.NAME}.kind = {kind!r}: expected one of {', '.join(map(repr, cls.KINDS))}")
        return import_name(cls.KINDS[kind])

    @classmethod
    def kind_in(cls, values: Mapping[str, Any]) -> Any:
        """Return the kind that `values` name, or the default."""
        return values.get("kind", next(iter(cls.KINDS)))

    @classmethod
    def section_of(cls, values: Mapping[str, Any]) -> "type[KindSection]":
        """Return the class of the section that `values` are of. Raises ValueError: an unknown kind."""
        section: type[KindSection] = cls.class_of(cls.kind_in(values)).section
        return section

    @classmethod
    def kinds_with(cls, key: str) -> list[str]:
        """Return the kinds that have the option `key`."""
        return [kind for kind in cls.KINDS if key in cls.class_of(kind).section.model_fields]

    @classmethod
    def without_foreign(cls, values: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
        """Return `values` without those of `keys` that are options of other kinds alone."""
        try:
            options = cls.section_of(values).model_fields
        except ValueError:  # told by validation
            return dict(values)
        foreign = {key for key in keys if key not in options and cls.kinds_with(key)}
        return {key: value for key, value in values.items() if key not in foreign}

    @property
    def implementation(self) -> Any:
        """The class that this section configures."""
        return self.class_of(self.kind)

    @model_validator(mode="wrap")
    @classmethod
    def _validate_by_kind(cls, values: Any, handler: ModelWrapValidatorHandler["KindSection"]) -> "KindSection":
        if isinstance(values, Mapping):
            section = cls.section_of(values)
            if section is not cls and issubclass(section, cls):
                return section.model_validate(values)
        return handler(values)
