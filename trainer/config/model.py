"""What is trained: encoder, classifier or label-encoder head, and the loss."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.options import Options


class Encoder(Options):
    """Text or sparse features to x in R^D: a bag of embeddings, or a Hugging Face model."""

    kind: Literal["bag", "transformer"] = "bag"
    inputs: Literal["tokens", "features", "both"] = Field(
        "tokens", description="what is read of a row: its token ids, its sparse features with values, or both"
    )
    dimension: int = Field(256, ge=1, description="D; for a transformer the bottleneck, 0 < D")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout on x")
    normalize: bool = Field(False, description="L2-normalise x")
    scale: float = Field(1.0, gt=0, description="x is multiplied by it after normalising")
    lr: float = Field(0.01, gt=0)
    weight_decay: float = Field(0.0, ge=0, description="of the dense parameters (decoupled)")
    # bag
    optimizer: Literal["sgd", "adagrad", "adam"] = Field("adam", description="of the embedding rows, touched rows only")
    dense_lr: float = Field(0.001, gt=0, description="Adam's rate for the dense parameters of a bag")
    initial_scale: float = Field(1.0, gt=0, description="expected norm of a feature's initial vector")
    ngrams: int = Field(2, ge=1, le=5, description="hashed n-grams of tokens up to this length")
    buckets: int = Field(1 << 18, ge=0, description="hash buckets for n-grams of two and more tokens")
    ngram_weight: float = Field(1.0, gt=0, description="factor on the weights of n-grams of two and more tokens")
    idf: bool = Field(True, description="weight features by inverse document frequency")
    idf_rows: int = Field(1_000_000, ge=1, description="training rows that document frequencies are counted on")
    feature_idf: bool = Field(False, description="weight sparse features by inverse document frequency too")
    feature_weight: float = Field(1.0, gt=0, description="factor on the values of sparse features, beside tokens")
    unit_features: bool = Field(True, description="scale a row's feature weights to unit L2 norm")
    feature_dropout: float = Field(0.0, ge=0, lt=1, description="share of features dropped in training")
    residual: bool = Field(False, description="a residual layer on top: v + relu(Linear(v))")
    hidden: int = Field(0, ge=0, description="units within the residual layer: v + Linear(relu(Linear(v))); 0: without")
    # transformer
    model: str = Field("", description="local directory or hub name")
    pooling: Literal["mean", "cls"] = "mean"
    bottleneck: bool = Field(False, description="project the model's output to `dimension`")
    max_tokens: int = Field(128, ge=1)
    precision: Literal["float32", "bfloat16"] = Field(
        "float32", description="of a transformer's products (automatic mixed precision); its parameters are float32"
    )

    @model_validator(mode="after")
    def _complete(self) -> "Encoder":
        if self.kind == "transformer" and not self.model:
            raise ValueError("encoder.kind = 'transformer' needs encoder.model (a local directory or a hub name)")
        if self.hidden and not self.residual:
            raise ValueError("encoder.hidden is the width of the residual layer: set encoder.residual = true")
        if self.kind == "transformer" and self.inputs != "tokens":
            raise ValueError(
                f"encoder.inputs = {self.inputs!r}: a transformer reads token ids only; set encoder.kind = 'bag', "
                "or encoder.inputs = 'tokens'"
            )
        if self.kind == "bag" and self.precision != "float32":
            raise ValueError(f"encoder.precision = {self.precision!r}: a bag's sums are float32; leave it out")
        if self.kind == "bag" and self.ngrams > 1 and self.buckets == 0:
            raise ValueError("encoder.ngrams > 1 needs encoder.buckets > 0")
        return self


class Classifier(Options):
    """Vectors w_l in R^D, updated on touched rows only."""

    optimizer: Literal["sgd", "adagrad", "adam"] = "adagrad"
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, description="decoupled: a row is multiplied by 1 - lr * weight_decay a step")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of the vectors; the narrower ones are rounded stochastically, computed in float32"
    )
    storage: str = Field(
        "memory",
        description="where vectors and optimizer rows are while training: memory, or a directory on a local disk with "
        "room for them, for a file that is mapped and leaves nothing behind",
    )
    bias: bool = Field(False, description="a last column that x meets with a constant 1")
    initial: Literal["random", "labels"] = Field(
        "random",
        description="the vectors before the first step. random: normal numbers. labels: the untrained encoder's "
        "embeddings of the labels' texts; for a pre-trained encoder, or many labels with few training points",
    )
    initial_scale: float = Field(
        0.0, ge=0, description="standard deviation of random initial vectors; length of those from labels"
    )
    initial_bias: float = 0.0

    @model_validator(mode="after")
    def _complete(self) -> "Classifier":
        if self.initial == "labels" and not self.initial_scale:
            raise ValueError("classifier.initial = 'labels' needs classifier.initial_scale, the length of the vectors")
        return self


class Head(Options):
    """What a label is: a vector of a classifier, or its text through an encoder (DEXML)."""

    kind: Literal["classifier", "label-encoder"] = "classifier"
    shared: bool = Field(True, description="of label-encoder: labels go through the encoder of the queries")
    label_batch: int = Field(
        1024, ge=1, description="eta: labels encoded at a time; more of them in a step are encoded twice"
    )
    query_batch: int = Field(0, ge=0, description="queries encoded at a time; 0: those of a rank at once")
    positives: int = Field(
        0,
        ge=0,
        description="of label-encoder: positives a query, drawn anew each step, that it learns and brings to the pool; "
        "0: all",
    )


class Loss(Options):
    """What is minimised, over whatever candidates (DEXML, sections 3 and 4); scores are x.w / temperature."""

    kind: Literal["bce", "softmax", "infonce", "decoupled", "softtopk", "triplet"] = Field(
        "bce",
        description="one-vs-all BCE (2), SoftmaxCE (3), InfoNCE (4), DecoupledSoftmax (5), SoftTop-k (6), or triplets",
    )
    temperature: float = Field(1.0, gt=0, description="tau: scores are divided by it")
    k: float = Field(5.0, gt=0, description="of softtopk: how many labels are to be ranked first")
    alpha: float = Field(2.0, gt=0, description="of softtopk: the steepness of its sigmoid")
    margin: float = Field(0.3, ge=0, description="of triplet: how far a positive is to be above every negative")
    radius: float = Field(
        0.0,
        ge=0,
        le=2,
        description="of triplet over unit vectors: negatives farther than this from the query count nothing; 0: all do",
    )
    chunk: int = Field(
        0,
        ge=0,
        description="labels scored at a time, anew in every pass; 0: all scores of the rank are kept, [B, L / G]",
    )
