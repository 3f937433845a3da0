"""Encoders and losses that a recipe chooses by `kind`: their options, and tables of their classes. Loads no PyTorch."""

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from schemas.options import MOST_RATE, Options
from trainer.input_kinds import EncoderInputs, input_names

# What a table has for a kind: options; options with the "module:name" of the class that they configure; or a
# "module:name" alone, of options (a method) or of a class with its options as `section`.
Entry = type[Options] | tuple[type[Options], str] | str
Sizes = tuple[int, int, int]  # sizes of the vocabulary, the sparse features, and a dense vector


def import_name(place: str) -> Any:
    """Import and return the object at `place`, which has the form "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def options_of(table: Mapping[str, Entry], kind: object, key: str) -> Any:
    """Return the option class that `table` has for `kind`, the value of `key`. Raises ValueError for another kind."""
    if not isinstance(kind, str) or kind not in table:
        raise ValueError(f"{key} = {kind!r}: expected one of {', '.join(map(repr, table))}")
    entry = table[kind]
    if isinstance(entry, str):
        named = import_name(entry)
        return getattr(named, "section", named)
    return entry[0] if isinstance(entry, tuple) else entry


class KindSection(Options):
    """Options of an encoder or a loss; `kind` chooses the class that they configure."""

    TABLE: ClassVar[Mapping[str, Entry]]

    kind: str

    @property
    def implementation(self) -> Any:
        """Class that this section configures."""
        entry = self.TABLE[self.kind]
        return import_name(entry[1] if isinstance(entry, tuple) else str(entry))

    def build(self, *facts: Any, **named: Any) -> Any:
        """Build the configured object: a loss, or an encoder from `vocabulary`, `seed`, `features` and `dense`.

        Raises InputError.
        """
        return self.implementation(self, *facts, **named)


class EncoderSection(KindSection):
    """The encoder, which maps text, sparse features or a dense vector to x in R^D."""

    # Options that may differ between an encoder and the encoder that initialises its parameters.
    FREE: ClassVar[set[str]] = {"dropout", "normalize", "scale", "lr", "weight_decay"}

    inputs: EncoderInputs = Field(
        "tokens",
        description=(
            "input of the encoder: token ids, sparse features with values, the dense vector, or a combination of "
            "these; both: token ids and sparse features"
        ),
    )
    dimension: int = Field(
        256,
        ge=1,
        le=1 << 24,
        description="D, the dimension of embeddings; for a transformer, the size of the bottleneck",
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on x")
    normalize: bool = Field(False, description="L2-normalise x")
    scale: float = Field(1.0, gt=0, description="factor by which x is multiplied after normalisation")
    lr: float = Field(
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


class BagSection(EncoderSection):
    """Options of a bag of embeddings."""

    FREE = EncoderSection.FREE | {
        *("optimizer", "dense_lr", "initial_scale", "pretrained", "idf_rows", "feature_dropout")
    }

    kind: Literal["bag"] = "bag"
    optimizer: Literal["sgd", "adagrad", "adam"] = Field(
        "adam", description="optimizer for the embedding rows; a step updates only the rows of features in its batch"
    )
    dense_lr: float = Field(0.001, gt=0, le=MOST_RATE, description="Adam's learning rate for the dense parameters")
    initial_scale: float = Field(1.0, gt=0, description="expected length of a feature's initial vector")
    pretrained: str = Field(
        "",
        description=(
            "model (directory or hub name) that provides initial vectors for the tokens: a static table or a "
            "transformer. DATA must be tokenized with this model's tokenizer. Empty: random vectors"
        ),
    )
    ngrams: int = Field(2, ge=1, le=5, description="maximum length of the hashed n-grams of tokens")
    buckets: int = Field(
        1 << 18, ge=0, le=1 << 31, description="number of hash buckets for n-grams of two or more tokens"
    )
    ngram_weight: float = Field(1.0, gt=0, description="factor for the weights of n-grams of two or more tokens")
    idf: bool = Field(True, description="weight features by inverse document frequency")
    idf_rows: int = Field(1_000_000, ge=1, description="number of training rows used to compute document frequencies")
    feature_idf: bool = Field(False, description="also weight sparse features by inverse document frequency")
    feature_weight: float = Field(1.0, gt=0, description="factor for the values of sparse features, relative to tokens")
    dense_weight: float = Field(1.0, gt=0, description="factor for a row's dense vector, after scaling to length 1")
    unit_features: bool = Field(True, description="scale a row's feature weights to unit L2 norm")
    feature_dropout: float = Field(0.0, ge=0, lt=1, description="fraction of features dropped at random in training")
    residual: bool = Field(False, description="add a residual layer on top: v + relu(Linear(v))")
    hidden: int = Field(
        0,
        ge=0,
        le=1 << 24,
        description="hidden units of the residual layer: v + Linear(relu(Linear(v))); 0: no hidden layer",
    )
    relu: bool = Field(False, description="x = relu(v + bias): a hidden layer of D units over the features")

    @model_validator(mode="after")
    def _check(self) -> "BagSection":
        if self.hidden and not self.residual:
            raise ValueError("encoder.hidden is the width of the residual layer: set encoder.residual = true")
        if self.relu and self.residual:
            raise ValueError("encoder.relu replaces the residual layer: set encoder.residual = false")
        if self.ngrams > 1 and self.buckets == 0:
            raise ValueError("encoder.ngrams > 1 needs encoder.buckets > 0")
        if self.pretrained and "tokens" not in input_names(self.inputs):
            raise ValueError(f"encoder.pretrained needs tokens, but encoder.inputs = {self.inputs!r} reads no tokens")
        return self


class TransformerSection(EncoderSection):
    """Options of a Hugging Face model."""

    FREE = EncoderSection.FREE | {"max_tokens", "precision", "compile"}

    kind: Literal["transformer"] = "transformer"
    model: str = Field("", description="the model: a local directory or hub name")
    pooling: Literal["mean", "cls"] = Field(
        "mean", description="vector of a text: the mean of the last hidden states, or the state of the first token"
    )
    bottleneck: bool = Field(False, description="project the model's output to `dimension`")
    max_tokens: int = Field(128, ge=1, description="maximum number of tokens per text")
    precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description=(
            "number type for matrix products (automatic mixed precision); parameters are float32. auto: bfloat16 on a "
            "GPU, float32 on a CPU"
        ),
    )
    compile: bool = Field(
        False, description="compile the model (torch.compile): the first steps take minutes, later steps can be faster"
    )

    @property
    def token_limit(self) -> int:
        return self.max_tokens

    def at_folder(self, folder: str) -> "TransformerSection":
        return self.model_copy(update={"model": folder})

    @model_validator(mode="after")
    def _check(self) -> "TransformerSection":
        if not self.model:
            raise ValueError("encoder.kind = 'transformer' needs encoder.model (a local directory or a hub name)")
        if self.inputs != "tokens":
            raise ValueError(
                f"encoder.inputs = {self.inputs!r}: a transformer reads token ids only; set encoder.kind = 'bag', "
                "or encoder.inputs = 'tokens'"
            )
        return self


class LossSection(KindSection):
    """The loss over candidates (DEXML, sections 3 and 4); scores are x.w / temperature."""

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


class SoftTopKSection(LossSection):
    """Options of SoftTop-k."""

    kind: Literal["softtopk"] = "softtopk"
    k: float = Field(5.0, gt=0, description="number of labels among which the positives should rank")
    alpha: float = Field(2.0, gt=0, description="steepness of the sigmoid")


class TripletSection(LossSection):
    """Options of the triplet loss."""

    kind: Literal["triplet"] = "triplet"
    margin: float = Field(0.3, ge=0, description="margin by which a positive must score above every negative")
    radius: float = Field(
        0.0,
        ge=0,
        le=2,
        description="for unit vectors: ignore negatives farther than this from the query; 0: use all negatives",
    )

    def check_vectors(self, unit: bool) -> None:
        if self.radius and not (unit and self.temperature == 1):
            raise ValueError(
                f"loss.radius = {self.radius:g} is a distance between unit vectors, which needs loss.temperature = "
                "1, encoder.normalize = true, encoder.scale = 1, and encoded labels or classifier.normalize = true"
            )


ENCODERS: dict[str, Entry] = {  # the default first
    "bag": (BagSection, "trainer.encoders.bag_encoder:BagEncoder"),
    "transformer": (TransformerSection, "trainer.encoders.transformer_encoder:TransformerEncoder"),
}
LOSSES: dict[str, Entry] = {
    "bce": (LossSection, "trainer.one_vs_all:OneVsAll"),  # equation 2 of DEXML
    "softmax": (LossSection, "trainer.losses:SoftmaxCrossEntropy"),  # equation 3
    "infonce": (LossSection, "trainer.losses:InfoNCE"),  # equation 4
    "decoupled": (LossSection, "trainer.losses:DecoupledSoftmax"),  # equation 5
    "softtopk": (SoftTopKSection, "trainer.losses:SoftTopK"),  # equation 6
    "triplet": (TripletSection, "trainer.losses:Triplet"),
}
EncoderSection.TABLE, LossSection.TABLE = ENCODERS, LOSSES
