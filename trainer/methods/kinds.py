"""Options of several kinds, such as encoders and losses: a key names the kind, and the kind's class has the options."""

import importlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, ModelWrapValidatorHandler, model_validator

from schemas.options import MOST_RATE, Options
from trainer.input_kinds import Read
from trainer.methods import rules
from trainer.methods.rules import FromData

# Classes by kind, the default first: a class whose `section` has the options of the kind, or an options section whose
# BUILT_BY names the class.
ENCODERS = {
    "bag": "trainer.encoders.bag:BagSection",
    "transformer": "trainer.encoders.transformer:TransformerSection",
}
LOSSES = {
    "bce": "trainer.losses.binary:OneVsAll",  # equation 2 of DEXML
    "softmax": "trainer.losses.contrastive:SoftmaxCrossEntropy",  # 3
    "infonce": "trainer.losses.contrastive:InfoNCE",  # 4
    "decoupled": "trainer.losses.contrastive:DecoupledSoftmax",  # 5
    "softtopk": "trainer.losses.soft_top_k:SoftTopK",  # 6
    "triplet": "trainer.losses.triplet:Triplet",
}
Sizes = tuple[int, int, int]  # sizes of the vocabulary, the sparse features, and a dense vector


def import_name(place: str) -> Any:
    """Import the module of `place`, "module:name", and return the object `name`."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


class OneOfKinds(Options):
    """Base of options with several kinds: a subclass has the shared options, its subclasses the options of one kind.

    The subclass validates values with the class of their kind. The module of an encoder or a loss is imported at its
    first use.
    """

    PLACE: ClassVar[str]  # dotted key that names the kind, such as "encoder.kind"
    KINDS: ClassVar[Mapping[str, Any]]  # by kind, the default first: a class of options, or a place of a class

    @classmethod
    def class_of(cls, kind: object) -> Any:
        """Return the class that `kind` names. Raises ValueError: an unknown kind."""
        if not isinstance(kind, str) or kind not in cls.KINDS:
            raise ValueError(f"{cls.PLACE} = {kind!r}: expected one of {', '.join(map(repr, cls.KINDS))}")
        named = cls.KINDS[kind]
        return import_name(named) if isinstance(named, str) else named

    @classmethod
    def kind_in(cls, values: Mapping[str, Any]) -> Any:
        """Return the kind that `values` name, or the default."""
        return values.get(cls.PLACE.rpartition(".")[2], next(iter(cls.KINDS)))

    @classmethod
    def options_of(cls, kind: object) -> "type[Options]":
        """Return the class of the options of `kind`. Raises ValueError: an unknown kind."""
        named = cls.class_of(kind)
        options: type[Options] = getattr(named, "section", named)
        return options

    @classmethod
    def renewed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return `values` under present keys."""
        return values

    @model_validator(mode="wrap")
    @classmethod
    def _validate_by_kind(cls, values: Any, handler: ModelWrapValidatorHandler["OneOfKinds"]) -> Any:
        if isinstance(values, Mapping):
            values = cls.renewed(values)
            options = cls.options_of(cls.kind_in(values))
            if options is not cls and issubclass(options, cls):
                return options.model_validate(values)
        return handler(values)


class KindSection(OneOfKinds):
    """A section whose key `kind` also selects the configured class."""

    BUILT_BY: ClassVar[str] = ""  # place of the configured class, if KINDS names the section

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
    """The encoder of text, sparse features or a dense vector to x in R^D."""

    PLACE = "encoder.kind"
    KINDS = ENCODERS
    # By the format of an export, the default first: a class whose `open` reads the encoder's files.
    SERVED_BY: ClassVar[dict[str, str]] = {"torch": "trainer.encoders.served:ServedByTorch"}
    # Options that may differ between an encoder and the encoder that initialises its parameters.
    FREE: ClassVar[set[str]] = {"dropout", "normalize", "scale", "lr", "weight_decay"}

    inputs: Read = Field(
        "tokens",
        description=(
            "the input of the encoder: token ids, sparse features with values, both, the dense vector, or the dense "
            "vector with the others"
        ),
    )
    dimension: Annotated[int, FromData(rules.dimension)] = Field(
        256,
        ge=1,
        le=1 << 24,
        description="D, the dimension of embeddings; for a transformer the size of the bottleneck",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on x")
    normalize: bool = Field(False, description="L2-normalise x")
    scale: float = Field(1.0, gt=0, description="factor for x after normalising")
    lr: Annotated[float, FromData(rules.encoder_rate)] = Field(
        0.01, gt=0, le=MOST_RATE, description="learning rate of the encoder; for a bag, of its embedding rows"
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        lt=1,
        description=(
            "decoupled weight decay; not for biases and norms; for the rows of a bag, in steps that touch the row"
        ),
    )

    @property
    def token_limit(self) -> int | None:
        """Maximum number of tokens that the encoder reads of a row; None: all."""
        return None

    def at_folder(self, folder: str) -> "EncoderSection":
        """Return the section of the same encoder with files at `folder`, which `Encoder.write` has written."""
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

    PLACE = "loss.kind"
    KINDS = LOSSES

    kind: str = "bce"
    temperature: float = Field(1.0, gt=0, description="tau: divides the scores")
    chunk: int = Field(
        0,
        ge=0,
        description="labels that are scored at once, again in every pass; 0: keep all scores of the rank, [B, L / G]",
    )

    def check_vectors(self, unit: bool) -> None:
        """Raise ValueError for options that do not fit the vectors; `unit`: all vectors have length 1."""
