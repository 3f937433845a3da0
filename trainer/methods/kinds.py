"""Encoders and losses that a recipe chooses by `kind`: their options, and tables of their classes. Loads no PyTorch."""

import importlib
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from schemas.options import MOST_RATE, Options, key
from trainer.input_kinds import EncoderInputs, input_names
from trainer.modules import opened

# What a table has for a kind: options; options with the "module:name" of the class that they configure; or a
# "module:name" alone, of options (a method) or of a class with its options as `section`.
Entry = type[Options] | tuple[type[Options], str] | str
Sizes = tuple[int, int, int]  # sizes of the vocabulary, the sparse features, and a dense vector


def import_name(place: str) -> Any:
    """Import and return the object at `place`, which has the form "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def entry_of(table: Mapping[str, Entry], kind: object, key: str) -> Entry:
    """Return what `table` has for `kind`, the value of `key`, or what a person has named so. Raises ValueError."""
    if isinstance(kind, str) and (entry := table.get(kind) or opened(kind)):
        return entry
    raise ValueError(f"{key} = {kind!r}: expected one of {', '.join(map(repr, table))}")


def options_of(table: Mapping[str, Entry], kind: object, key: str) -> Any:
    """Return the option class of `kind`, the value of `key`. Raises ValueError for an unknown kind."""
    entry = entry_of(table, kind, key)
    named = import_name(entry) if isinstance(entry, str) else entry
    return named[0] if isinstance(named, tuple) else getattr(named, "section", named)


class KindSection(Options):
    """Options of an encoder or a loss; `kind` chooses the class that they configure."""

    TABLE: ClassVar[Mapping[str, Entry]]

    kind: str

    @property
    def implementation(self) -> Any:
        """Class that this section configures."""
        entry = entry_of(self.TABLE, self.kind, "kind")
        return entry if isinstance(entry, type) else import_name(entry[1] if isinstance(entry, tuple) else entry)

    def build(self, *facts: Any, **named: Any) -> Any:
        """Build a loss, or an encoder from `vocabulary`, `seed`, `features` and `dense`. Raises InputError."""
        return self.implementation(self, *facts, **named)


class EncoderSection(KindSection):
    """The encoder, which maps text, sparse features or a dense vector to x in R^D."""

    # Options that may differ between an encoder and the encoder that initialises its parameters.
    FREE: ClassVar[set[str]] = {"dropout", "normalize", "scale", "lr", "weight_decay"}

    inputs: EncoderInputs = key(
        "tokens",
        "input of the encoder: token ids, sparse features with values, the dense vector, or a combination of these; "
        "both: token ids and sparse features",
    )
    dimension: int = key(
        256, "D, the dimension of embeddings; for a transformer, the size of the bottleneck", ge=1, le=1 << 24
    )
    dropout: float = key(0.0, "dropout on x", ge=0, lt=1)
    normalize: bool = key(False, "L2-normalise x")
    scale: float = key(1.0, "factor by which x is multiplied after normalisation", gt=0)
    lr: float = key(0.01, "learning rate of the encoder; for a bag, the rate of its embedding rows", gt=0, le=MOST_RATE)
    weight_decay: float = key(
        0.0,
        "decoupled weight decay of all parameters except biases and norms; a row of a bag decays only in steps that "
        "touch the row",
        ge=0,
        lt=1,
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

    FREE = EncoderSection.FREE | {"optimizer", "dense_lr", "initial_scale", "pretrained", "idf_rows", "feature_dropout"}

    kind: Literal["bag"] = "bag"
    optimizer: Literal["sgd", "adagrad", "adam"] = key(
        "adam", "optimizer for the embedding rows; a step updates only the rows of features in its batch"
    )
    dense_lr: float = key(0.001, "Adam's learning rate for the dense parameters", gt=0, le=MOST_RATE)
    initial_scale: float = key(1.0, "expected length of a feature's initial vector", gt=0)
    pretrained: str = key(
        "",
        "model (directory or hub name) that provides initial vectors for the tokens: a static table or a transformer. "
        "DATA must be tokenized with this model's tokenizer. Empty: random vectors",
    )
    ngrams: int = key(2, "maximum length of the hashed n-grams of tokens", ge=1, le=5)
    buckets: int = key(1 << 18, "number of hash buckets for n-grams of two or more tokens", ge=0, le=1 << 31)
    ngram_weight: float = key(1.0, "factor for the weights of n-grams of two or more tokens", gt=0)
    idf: bool = key(True, "weight features by inverse document frequency")
    idf_rows: int = key(1_000_000, "number of training rows used to compute document frequencies", ge=1)
    feature_idf: bool = key(False, "also weight sparse features by inverse document frequency")
    feature_weight: float = key(1.0, "factor for the values of sparse features, relative to tokens", gt=0)
    dense_weight: float = key(1.0, "factor for a row's dense vector, after scaling to length 1", gt=0)
    unit_features: bool = key(True, "scale a row's feature weights to unit L2 norm")
    feature_dropout: float = key(0.0, "fraction of features dropped at random in training", ge=0, lt=1)
    residual: bool = key(False, "add a residual layer on top: v + relu(Linear(v))")
    hidden: int = key(
        0, "hidden units of the residual layer: v + Linear(relu(Linear(v))); 0: no hidden layer", ge=0, le=1 << 24
    )
    relu: bool = key(False, "x = relu(v + bias): a hidden layer of D units over the features")

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
    model: str = key("", "the model: a local directory or hub name")
    pooling: Literal["mean", "cls"] = key(
        "mean", "vector of a text: the mean of the last hidden states, or the state of the first token"
    )
    bottleneck: bool = key(False, "project the model's output to `dimension`")
    max_tokens: int = key(128, "maximum number of tokens per text", ge=1)
    precision: Literal["auto", "float32", "bfloat16"] = key(
        "auto",
        "number type for matrix products (automatic mixed precision); parameters are float32. auto: bfloat16 on a GPU,"
        " float32 on a CPU",
    )
    compile: bool = key(
        False, "compile the model (torch.compile): the first steps take minutes, later steps can be faster"
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
    temperature: float = key(1.0, "tau: scores are divided by tau", gt=0)
    chunk: int = key(
        0,
        "number of labels that are scored at once; each pass over the labels recomputes the scores. 0: keep all scores"
        " of the rank in memory, [B, L / G]",
        ge=0,
    )

    def check_vectors(self, unit: bool) -> None:
        """Raise ValueError if the options do not suit the vectors; `unit`: all vectors have length 1."""


class SoftTopKSection(LossSection):
    """Options of SoftTop-k."""

    kind: Literal["softtopk"] = "softtopk"
    k: float = key(5.0, "number of labels among which the positives should rank", gt=0)
    alpha: float = key(2.0, "steepness of the sigmoid", gt=0)


class TripletSection(LossSection):
    """Options of the triplet loss."""

    kind: Literal["triplet"] = "triplet"
    margin: float = key(0.3, "margin by which a positive must score above every negative", ge=0)
    radius: float = key(
        0.0, "for unit vectors: ignore negatives farther than this from the query; 0: use all negatives", ge=0, le=2
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
