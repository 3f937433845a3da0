"""Sections with several kinds, such as encoder and loss: a key selects the kind, and each kind has an option class."""

import importlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from schemas.options import MOST_RATE, Options
from trainer.input_kinds import EncoderInputs
from trainer.methods import rules
from trainer.methods.rules import FromData

# Classes by kind, the default first. An entry is a class with its options in `section`, or an options section with the
# class in BUILT_BY.
ENCODERS = {
    "bag": "trainer.encoders.bag:BagSection",
    "transformer": "trainer.encoders.transformer:TransformerSection",
}
LOSSES = {
    "bce": "trainer.one_vs_all:OneVsAll",  # equation 2 of DEXML
    "softmax": "trainer.losses:SoftmaxCrossEntropy",  # equation 3
    "infonce": "trainer.losses:InfoNCE",  # equation 4
    "decoupled": "trainer.losses:DecoupledSoftmax",  # equation 5
    "softtopk": "trainer.losses:SoftTopK",  # equation 6
    "triplet": "trainer.losses:Triplet",
}
Sizes = tuple[int, int, int]  # sizes of the vocabulary, the sparse features, and a dense vector


def import_name(place: str) -> Any:
    """Import and return the object at `place`, which has the form "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


class OneOfKinds(Options):
    """Base class of options with several kinds.

    A subclass defines the options that all kinds share. For each kind, a further subclass adds the options of that
    kind.

    Values are validated with the class of the selected kind. The module of an encoder or a loss is imported when the
    kind is first used.
    """

    KIND_KEY: ClassVar[str]  # dotted key that names the kind, such as "encoder.kind"
    KINDS: ClassVar[Mapping[str, Any]]  # by kind, the default first: a class of options, or its "module:name"

    @classmethod
    def class_of(cls, kind: object) -> Any:
        """Return the class that `kind` names. Raises ValueError for an unknown kind."""
        if not isinstance(kind, str) or kind not in cls.KINDS:
            raise ValueError(f"{cls.KIND_KEY} = {kind!r}: expected one of {', '.join(map(repr, cls.KINDS))}")
        named = cls.KINDS[kind]
        return import_name(named) if isinstance(named, str) else named

    @classmethod
    def kind_in(cls, values: Mapping[str, Any]) -> Any:
        """Return the kind that `values` select, or the default kind."""
        return values.get(cls.KIND_KEY.rpartition(".")[2], next(iter(cls.KINDS)))

    @classmethod
    def options_of(cls, kind: object) -> "type[Options]":
        """Return the option class of `kind`. Raises ValueError for an unknown kind."""
        named = cls.class_of(kind)
        options: type[Options] = getattr(named, "section", named)
        return options

    @model_validator(mode="wrap")
    @classmethod
    def _validate_by_kind(cls, values: Any, handler: ModelWrapValidatorHandler["OneOfKinds"]) -> Any:
        if isinstance(values, Mapping):
            options = cls.options_of(cls.kind_in(values))
            if options is not cls and issubclass(options, cls):
                return options.model_validate(values)
        return handler(values)


class KindSection(OneOfKinds):
    """A section with a key `kind`, which also selects the class that the section configures."""

    BUILT_BY: ClassVar[str] = ""  # "module:name" of the configured class, if KINDS names the section

    kind: str

    @property
    def implementation(self) -> Any:
        """Class that this section configures."""
        return import_name(self.BUILT_BY) if self.BUILT_BY else self.class_of(self.kind)

    def build(self, *facts: Any, **named: Any) -> Any:
        """Build the configured object: a loss, or an encoder from `vocabulary`, `seed`, `features` and `dense`.

        Raises InputError.
        """
        return self.implementation(self, *facts, **named)


class EncoderSection(KindSection):
    """The encoder, which maps text, sparse features or a dense vector to x in R^D."""

    KIND_KEY = "encoder.kind"
    KINDS = ENCODERS
    # Options that may differ between an encoder and the encoder that initialises its parameters.
    FREE: ClassVar[set[str]] = {"dropout", "normalize", "scale", "lr", "weight_decay"}

    inputs: EncoderInputs = Field(
        "tokens",
        description=(
            "input of the encoder: token ids, sparse features with values, the dense vector, or a combination of "
            "these; both: token ids and sparse features"
        ),
    )
    dimension: Annotated[int, FromData(rules.dimension)] = Field(
        256,
        ge=1,
        le=1 << 24,
        description="D, the dimension of embeddings; for a transformer, the size of the bottleneck",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on x")
    normalize: bool = Field(False, description="L2-normalise x")
    scale: float = Field(1.0, gt=0, description="factor by which x is multiplied after normalisation")
    lr: Annotated[float, FromData(rules.encoder_rate)] = Field(
        0.01, gt=0, le=MOST_RATE, description="learning rate of the encoder; for a bag, the rate of its embedding rows"
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "decoupled weight decay of all parameters except biases and norms; a row of a bag decays only in steps "
            "that touch the row"
        ),
    )

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens that the encoder reads per row; None: all tokens."""
        return None

    def at_folder(self, folder: str) -> "EncoderSection":
        """Return this section for the copy of the encoder that `Encoder.write` has written to `folder`."""
        return self

    def differences(self, other: "EncoderSection") -> list[str]:
        """Return the options that prevent this encoder from using the parameters of `other`."""
        options, others = self.model_dump(exclude=self.FREE), other.model_dump()
        return [
            f"encoder.{name} is {others[name]!r} in that run, {value!r} in this run"
            for name, value in options.items()
            if name in others and value != others[name]
        ]


class LossSection(KindSection):
    """The loss over candidates (DEXML, sections 3 and 4); scores are x.w / temperature."""

    KIND_KEY = "loss.kind"
    KINDS = LOSSES

    kind: str = "bce"
    temperature: float = Field(1.0, gt=0, description="tau: scores are divided by tau")
    chunk: int = Field(
        0,
        ge=0,
        description=(
            "number of labels that are scored at once; each pass over the labels recomputes the scores. 0: keep all "
            "scores of the rank in memory, [B, L / G]"
        ),
    )

    def check_vectors(self, unit: bool) -> None:
        """Raise ValueError if the options do not suit the vectors; `unit`: all vectors have length 1."""
