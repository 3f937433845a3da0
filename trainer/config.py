"""A recipe: frozen, typed, validated, saved with what it made. One TOML file a method, changed by `--set a.b=c`."""

import difflib
import importlib.metadata
import importlib.resources
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from schemas import storage
from schemas.errors import InputError
from schemas.manifest import code_version
from schemas.sizes import parse_bytes
from trainer.doubling import ROWS, Doubling

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


LABEL_TEXTS = "labels"  # the source of label texts; in a mix, too
MOST_WEIGHT = 1000  # of a source in a mix
LEAD = 2  # epochs between a dump and the first use of its table
_RESERVED = {"queries", "vectors"}  # the source without a mix; what lies beside the sources' embeddings in a dump


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Data(Section):
    """Which rows are trained on."""

    split: str = "train"
    label_texts: bool = Field(False, description="label texts are training points too, each with its own label")
    mix: dict[str, Annotated[float, Field(gt=0, le=MOST_WEIGHT)]] = Field(
        default_factory=dict,
        description="in place of split and label_texts, how often an epoch deals each row of the splits named; "
        "`labels` are the label texts. A weight of 1.5 deals all rows once and half of them once more",
    )

    @model_validator(mode="after")
    def _mixed(self) -> "Data":
        if not self.mix:
            return self
        for name in _RESERVED & self.mix.keys():
            raise ValueError(f"data.mix.{name}: a source of this name cannot be mixed; give the split another name")
        if self.split not in ("train", *self.mix):
            raise ValueError(
                f"data.split = {self.split!r} is not in data.mix, which names every source: add {self.split} = 1.0 "
                "to it, or leave data.split out"
            )
        if self.label_texts and LABEL_TEXTS not in self.mix:
            raise ValueError(
                "data.label_texts = true, but data.mix, which names every source, is without label texts: add "
                f"{LABEL_TEXTS} = 1.0 to it, or set data.label_texts = false"
            )
        return self


class Order(Section):
    """The stream's order (DESIGN section 5)."""

    batch: int = Field(512, ge=1, description="B, queries a step over all ranks")
    streams: int = Field(8, ge=1, description="S canonical streams; ranks divide it, and it divides the batch")
    window_groups: int = Field(4, ge=1, description="row groups that a stream permutes rows within")
    threads: int = Field(1, ge=0, description="threads that read and decode ahead; 0 reads in line")
    tail: Literal["keep", "drop"] = Field("keep", description="the last batch of an epoch: shorter, or left out")
    cluster: int = Field(
        1,
        ge=1,
        description="C, queries of a cluster (NGAME): a batch is batch / C random clusters of queries that lie near "
        "each other, by tables of `extremis cluster`; divides batch / streams. 1: a batch is random queries",
    )
    cluster_doubles_every: int = Field(
        0, ge=0, description="epochs after which C doubles, again and again up to batch / streams; 0: never"
    )

    @model_validator(mode="after")
    def _divides(self) -> "Order":
        if self.batch % self.streams:
            raise ValueError(f"order.streams = {self.streams} does not divide order.batch = {self.batch}")
        if self.share % self.cluster:
            raise ValueError(
                f"order.cluster = {self.cluster} does not divide order.batch / order.streams = {self.share}, which is "
                "what a stream gives to a batch: lower order.streams or order.cluster"
            )
        return self

    @property
    def share(self) -> int:
        """B/S, what a stream gives to a batch."""
        return self.batch // self.streams

    @property
    def clusters(self) -> Doubling:
        """C of every epoch."""
        return Doubling(self.cluster, self.cluster_doubles_every)


class Storage(Section):
    """How the stream reads storage. It changes no order and no number, so a resumed run may have it otherwise."""

    verify: bool = Field(True, description="checksums of what is read are verified")
    damaged: Literal["stop", "skip"] = Field("stop", description="a row group that does not match them: stop, or skip")
    fetch_threads: int = Field(16, ge=0, description="requests to a remote store at a time, ahead of use; 0: none")
    cache: str = Field("", description="a local directory of its own for what remote stores gave; empty: none")
    cache_size: str = Field("", description="what the cache may hold, e.g. '50GiB'")

    @property
    def cache_bytes(self) -> int:
        return parse_bytes(self.cache_size) if self.cache_size else 0

    @model_validator(mode="after")
    def _complete(self) -> "Storage":
        try:
            size = self.cache_bytes
        except InputError as error:
            raise ValueError(f"storage.cache_size = {error}".rstrip(".")) from None
        if self.cache and not size:
            raise ValueError(f"storage.cache = {self.cache!r} needs a limit: set storage.cache_size, e.g. '50GiB'")
        if size and not self.cache:
            raise ValueError("storage.cache_size is the limit of a cache: set storage.cache to a local directory")
        if "://" in self.cache:
            raise ValueError(f"storage.cache = {self.cache!r}: a cache is a directory on a local disk, not a URL")
        return self


class Encoder(Section):
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


class Classifier(Section):
    """Vectors w_l in R^D, updated on touched rows only."""

    optimizer: Literal["sgd", "adagrad", "adam"] = "adagrad"
    lr: float = Field(0.1, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, description="decoupled: a row is multiplied by 1 - lr * weight_decay a step")
    decay: Literal["touched", "lazy"] = Field(
        "touched",
        description="touched: in the steps that touch the row. lazy: in every step, caught up when the row is next "
        "touched or read, as if the whole matrix had been decayed each time",
    )
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


class Head(Section):
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


class Hashing(Section):
    """Negatives from hash tables over the classifier's vectors (LNS)."""

    hard: int = Field(0, ge=0, description="labels a query, at most; 0: none from here")
    query: Literal["embedding", "label"] = Field(
        "embedding", description="what is hashed: x, or the vector of one positive that is drawn each step"
    )
    family: Literal["simhash", "dwta"] = "dwta"
    bits: int = Field(6, ge=1, le=15, description="K functions to a code")
    tables: int = Field(50, ge=1, description="L hash tables")
    width: int = Field(2, ge=2, description="coordinates of a bin of dwta; a table has width ** bits buckets")
    capacity: int = Field(128, ge=1, description="labels that a bucket keeps")
    policy: Literal["reservoir", "fifo"] = Field(
        "reservoir", description="which they are: a uniform sample, or the newest"
    )
    every: int = Field(50, ge=1, description="steps until touched rows are hashed again for the first time")
    growth: float = Field(1.1, ge=1, description="of the steps from one time to the next")


class Negatives(Section):
    """Which labels a query is scored against, besides its positives."""

    random: int = Field(3200, ge=0, description="k_r labels drawn uniformly with replacement from [0, L)")
    pool: Literal["shared", "own", "all", "batch"] = Field(
        "shared",
        description="one pool a batch, one a query, every label (no sampling), or with head.kind = 'label-encoder' the "
        "positives and hard negatives of the whole batch",
    )
    chunk: int = Field(4096, ge=1, description="labels scored at a time when pool = 'all'")
    hard: int = Field(0, ge=0, description="k_h hard negatives a query, out of the table's K")
    width: int = Field(0, ge=0, description="K of the mined table; 0: the same as hard")
    warmup: int = Field(
        0, ge=0, description="random negatives in epochs that have no table yet; 0: random + hard (Algorithm 1, step 8)"
    )
    reweight: bool = Field(
        True,
        description="weight random negatives by 1 / (k_r q_l), which makes the loss unbiased; q_l = 1 / L if uniform",
    )
    curriculum: bool = Field(
        False,
        description="from the first epoch with hard negatives on, their number grows from none to `hard` in the last, "
        "and that of random ones goes from those before to `random`",
    )
    frequency_share: float = Field(
        0.0, ge=0, le=1, description="share of the random draws that go by training frequency, not uniformly"
    )
    frequency_power: float = Field(
        1.0, gt=0, description="these draw a label with n training points by (n + 1) ** power"
    )
    in_batch: int = Field(0, ge=0, description="other queries' positives a query, those with the highest scores")
    lsh: Hashing = Hashing()
    start: int = Field(0, ge=0, description="the first epoch with negatives from in_batch and lsh")
    cache: int = Field(
        0,
        ge=0,
        description="of pool = 'batch': labels drawn uniformly whose embeddings of a while ago are negatives too, "
        "without a gradient of their own (Lindgren et al., 2021); 0: none",
    )
    cache_steps: int = Field(32, ge=1, description="steps until every embedding in the cache has been made anew")

    @property
    def table_width(self) -> int:
        return self.width or self.hard

    @property
    def found(self) -> int:
        """Negatives a query that are found with the model as it is at the step, at most."""
        return self.in_batch + self.lsh.hard

    @model_validator(mode="after")
    def _possible(self) -> "Negatives":
        if self.width and self.width < self.hard:
            raise ValueError(f"negatives.width = {self.width} is below negatives.hard = {self.hard}")
        if self.pool in ("shared", "own") and self.random + self.hard + self.found == 0:
            raise ValueError("no negatives at all: set negatives.random, negatives.hard or negatives.pool = 'all'")
        if self.pool == "all" and self.hard + self.found:
            raise ValueError(
                "negatives.pool = 'all' scores every label already: set negatives.hard, in_batch and lsh.hard to 0"
            )
        if self.curriculum and not self.hard:
            raise ValueError("negatives.curriculum goes over to hard negatives: it needs negatives.hard > 0")
        if self.warmup and not self.hard + self.found:
            raise ValueError("negatives.warmup is for epochs before the first hard negatives: set negatives.hard > 0")
        if self.start and not self.found:
            raise ValueError("negatives.start is for in_batch and lsh: set one of them, or leave it out")
        if self.cache and self.pool != "batch":
            raise ValueError(
                f"negatives.cache = {self.cache} is for labels that are encoded, beside those of the batch: set "
                "negatives.pool = 'batch', or leave it out"
            )
        if self.lsh.family == "dwta" and self.lsh.width**self.lsh.bits > 1 << 15:
            raise ValueError("negatives.lsh.width ** bits is above 32768 buckets a table: lower one of them")
        return self


class Loss(Section):
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


class Refresh(Section):
    """When hard-negative tables are made and used (ASTRA's tau_s and tau_r), and what happens when they are not."""

    source: Literal["table", "in-trainer"] = Field(
        "table", description="tables mined beside the training, or an index of stale vectors within the trainer"
    )
    start: int = Field(5, ge=0, description="tau_s: the first epoch with hard negatives; two epochs after its dump")
    every: int = Field(5, ge=1, description="tau_r: epochs between tables")
    every_steps: int = Field(1000, ge=1, description="steps between the indexes of 'in-trainer'")
    rebuild_steps: int = Field(
        0,
        ge=0,
        description="of 'in-trainer': an index is built beside the training and used so many steps after its copy of "
        "the vectors was made; 0: training waits for it",
    )
    by: Literal["classifier", "labels"] = Field(
        "classifier", description="nearest by classifier vectors (w-hard) or by label embeddings (theta-hard)"
    )
    index: str = Field(
        "auto",
        description="'exact', 'auto', a Faiss factory string, or with source = 'in-trainer' 'mips': spherical k-means "
        "with the square root of L clusters, 64 of them searched",
    )
    stale: Literal["warn", "wait", "random-only", "stop"] = Field(
        "warn",
        description="when the newest table is older than max_age, or there is none: say so and go on with it, wait for "
        "a younger one, go on without hard negatives, or stop",
    )
    max_age: int = Field(
        0, ge=0, description="epochs from a table's dump to its use; 0: up to every + 1, so that none may be late"
    )
    wait_seconds: float = Field(600.0, gt=0, description="how long 'wait' waits before it goes on as 'warn'")

    @property
    def oldest(self) -> int:
        """Epochs from its dump at which a table is not stale yet."""
        return self.max_age or LEAD + self.every - 1

    @model_validator(mode="before")
    @classmethod
    def _before_there_were_policies(cls, body: Any) -> Any:
        """`late = "continue"` and `"wait"` of earlier recipes and runs."""
        if not isinstance(body, dict) or "late" not in body:
            return body
        known = {"continue": "warn", "wait": "wait"}
        late = body["late"]
        if late not in known or body.get("stale", known[late]) != known[late]:
            raise ValueError(f"refresh.late = {late!r}: it is refresh.stale now, one of warn, wait, random-only, stop")
        return {**{name: value for name, value in body.items() if name != "late"}, "stale": known[late]}

    @model_validator(mode="after")
    def _possible(self) -> "Refresh":
        if self.source == "table" and self.start < LEAD:
            raise ValueError(
                f"refresh.start = {self.start}: a table is used {LEAD} epochs after its dump at the earliest"
            )
        if 0 < self.max_age < LEAD:
            raise ValueError(
                f"refresh.max_age = {self.max_age}: no table is younger than {LEAD} epochs when it is used"
            )
        if self.index == "mips" and self.source == "table":
            raise ValueError("refresh.index = 'mips' is the trainer's own: set refresh.source = 'in-trainer'")
        if self.rebuild_steps >= self.every_steps:
            raise ValueError(
                f"refresh.rebuild_steps = {self.rebuild_steps} is not below refresh.every_steps = {self.every_steps}: "
                "the next index would be due before this one is used"
            )
        if self.source == "in-trainer" and self.by == "labels":
            raise ValueError("refresh.by = 'labels' is for tables: the trainer's own index holds classifier vectors")
        return self


class Train(Section):
    """How long, how fast, from which random numbers."""

    epochs: int = Field(20, ge=1, description="passes over the training split; with minutes the most that there may be")
    minutes: float = Field(
        0.0,
        ge=0,
        description="end after about so many minutes of training: before each epoch but the first it is decided, and "
        "recorded, how many more fit at the pace of the last, and rates fall to that end; 0: as long as epochs take",
    )
    seed: int = Field(0, ge=0)
    warmup: float = Field(0.05, ge=0, lt=1, description="share of all steps with a rising rate")
    final_lr: float = Field(0.0, ge=0, le=1, description="share of the rate left at the end of the cosine decay")
    positive_weight: float = Field(
        0.0,
        ge=0,
        le=1,
        description="exponent of the inverse propensity that weighs positives; 0, or A and B unknown: all the same",
    )
    positive_ratio: float = Field(
        1.0,
        gt=0,
        description="of bce: weight of every positive over a negative's, the eta+ / eta- with which the hardest "
        "negatives alone train from scratch (MIPS-s, section 3.1: 50)",
    )
    threads: int = Field(0, ge=0, description="torch threads; 0: torch's own choice")
    clip: float = Field(0.0, ge=0, description="greatest norm of the encoder's gradient of a step; 0: any")
    encoder_from: str = Field(
        "", description="a run on the same data whose encoder, as its newest checkpoint has it, this one begins with"
    )
    freeze_encoder: bool = Field(
        False, description="the encoder stays as it begins, and encodes without dropout; only the classifier learns"
    )
    accumulate: int = Field(
        1,
        ge=1,
        description="encode a batch, or a rank's part of it, in so many parts one after the other: the same step, in "
        "less memory, for a second forward pass",
    )


class Checkpoint(Section):
    every_epochs: int = Field(1, ge=0, description="0: only the last")
    every_steps: int = Field(0, ge=0, description="also within epochs; 0: not")
    keep: int = Field(2, ge=1)
    background: bool = Field(
        True, description="written while training goes on, from a copy of the encoder and of the rows that change"
    )


class Validation(Section):
    split: str = Field("", description="a split to score while training; empty: none")
    every_epochs: int = Field(1, ge=1)
    queries: int = Field(5000, ge=1, description="its first rows only (shards are pre-shuffled)")
    metric: str = Field(
        "P@1",
        pattern=r"^(P|nDCG|R|PSP|PSnDCG)@[1-9]\d{0,2}$",
        description="the checkpoint with the best value of it is kept beside the newest",
    )


class Logging(Section):
    every_steps: int = Field(20, ge=1)
    ranks_every: int = Field(
        0,
        ge=0,
        description="steps between looks at the ranks that a step's hard negatives have among all labels by the model "
        "as it is; 0: none",
    )
    tensorboard: bool = True


class Recipe(Section):
    """Everything that decides a run's numbers, besides DATA."""

    method: str = "astra"
    data: Data = Data()
    order: Order = Order()
    storage: Storage = Storage()
    encoder: Encoder = Encoder()
    head: Head = Head()
    classifier: Classifier = Classifier()
    negatives: Negatives = Negatives()
    loss: Loss = Loss()
    refresh: Refresh = Refresh()
    train: Train = Train()
    checkpoint: Checkpoint = Checkpoint()
    validation: Validation = Validation()
    logging: Logging = Logging()

    @model_validator(mode="after")
    def _scored(self) -> "Recipe":
        head, pool = self.head.kind, self.negatives.pool
        known = ("all", "batch") if head == "label-encoder" else ("shared", "own", "all")
        if pool not in known:
            raise ValueError(
                f"negatives.pool = {pool!r} is not of head.kind = {head!r}: set negatives.pool to one of "
                + ", ".join(map(repr, known))
            )
        if head == "label-encoder" and (self.indexes or self.negatives.found):
            raise ValueError(
                "refresh.source = 'in-trainer', negatives.in_batch and negatives.lsh look at a classifier's vectors: "
                "leave them out for head.kind = 'label-encoder', whose hard negatives come from a table"
            )
        if head == "label-encoder" and self.logging.ranks_every:
            raise ValueError(
                f"logging.ranks_every = {self.logging.ranks_every} ranks labels by a classifier's vectors: leave it "
                "out for head.kind = 'label-encoder', which encodes those of the step alone"
            )
        if head == "label-encoder" and self.train.accumulate > 1:
            raise ValueError(
                f"train.accumulate = {self.train.accumulate} divides the batch of a classifier: for head.kind = "
                "'label-encoder' leave it out and set head.query_batch"
            )
        return self

    @model_validator(mode="after")
    def _weighed(self) -> "Recipe":
        if self.train.positive_ratio != 1 and self.loss.kind != "bce":
            raise ValueError(
                f"train.positive_ratio = {self.train.positive_ratio:g} weighs the positive part of loss.kind = 'bce': "
                f"leave it out for {self.loss.kind!r}, whose positives and negatives are in one term"
            )
        return self

    @model_validator(mode="after")
    def _drawn(self) -> "Recipe":
        encodes, encoder = self.head.kind == "label-encoder", self.encoder
        if self.train.freeze_encoder and encodes:
            raise ValueError(
                "train.freeze_encoder leaves head.kind = 'label-encoder' nothing to learn: set head.kind = 'classifier'"
            )
        if self.head.positives and not encodes:
            raise ValueError("head.positives saves encoding labels: leave it out, or set head.kind = 'label-encoder'")
        if self.head.positives and self.negatives.cache:
            raise ValueError(
                "negatives.cache would take positives that are not drawn for negatives: set one of them to 0"
            )
        unit = encodes and encoder.normalize and encoder.scale == 1 and self.loss.temperature == 1
        if self.loss.radius and not (self.loss.kind == "triplet" and unit):
            raise ValueError(
                f"loss.radius = {self.loss.radius:g} is a distance of unit vectors: it needs loss.kind = 'triplet', "
                "loss.temperature = 1, head.kind = 'label-encoder', encoder.normalize = true and encoder.scale = 1"
            )
        return self

    @model_validator(mode="after")
    def _timed(self) -> "Recipe":
        if self.train.minutes and self.negatives.curriculum:
            raise ValueError(
                f"train.minutes = {self.train.minutes:g} leaves the number of epochs open, and negatives.curriculum "
                "goes by it: set one of them"
            )
        return self

    @model_validator(mode="after")
    def _clustered(self) -> "Recipe":
        if not self.clusters:
            return self
        if self.negatives.hard:
            raise ValueError(
                f"order.cluster makes in-batch negatives hard, and a table's rows are in another order: set "
                f"negatives.hard = 0 (it is {self.negatives.hard}), or order.cluster = 1 and no doubling"
            )
        if self.data.mix or self.data.label_texts:
            raise ValueError(
                "order.cluster deals the clusters of one split: leave out data.mix and data.label_texts, or set "
                "order.cluster = 1 and no doubling"
            )
        return self

    @model_validator(mode="after")
    def _dealt(self) -> "Recipe":
        thin = [f"{name} = {weight:g}" for name, weight in self.data.mix.items() if weight < 1]
        if self.negatives.hard and thin:
            raise ValueError(
                f"data.mix: {', '.join(thin)} is below 1, so an epoch whose embeddings are mined would leave rows out: "
                "multiply all weights until none is below 1 (and divide train.epochs), or set negatives.hard = 0"
            )
        if self.refresh.by == "labels" and not (self.data.label_texts or LABEL_TEXTS in self.data.mix):
            raise ValueError(
                "refresh.by = 'labels' mines by the embeddings of label texts, which only a run that trains on them "
                "has: set data.label_texts = true"
            )
        return self

    @property
    def clusters(self) -> bool:
        """Whether queries are dealt by clusters, for which tables are made and used as those of negatives are."""
        return self.order.clusters != ROWS

    @property
    def indexes(self) -> bool:
        """Whether hard negatives come from an index within the trainer."""
        return self.negatives.hard > 0 and self.refresh.source == "in-trainer"

    def uses_table(self, epoch: int) -> bool:
        """Whether `epoch` trains on a table of hard negatives, or of clusters, as far as the schedule goes.

        Clusters may be there before: they can be made of any embeddings, and need no model of the run.
        """
        if self.clusters:
            return True
        return self.negatives.hard > 0 and not self.indexes and epoch >= self.refresh.start

    def table_epochs(self) -> list[int]:
        """Epochs from which a new table is used: start, start + every, ... within the run."""
        if not self.clusters and (not self.negatives.hard or self.indexes):
            return []
        return list(range(self.refresh.start, self.train.epochs, self.refresh.every))


def load_recipe(source: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe `source` (a name under recipes/ or a URL of a TOML file) with `section.key=value` overrides.

    A recipe may say `extends = "astra"` and state only what differs.
    Raises InputError: no such recipe, not TOML, an unknown key (names the nearest known one), a value out of range.
    """
    body = _body_of(source)
    for override in overrides:
        _override(body, override)
    return validate(body, source)


def validate(body: Mapping[str, Any], source: str) -> Recipe:
    """`body` as a Recipe. Raises InputError with one line a fault."""
    try:
        return Recipe.model_validate(body)
    except ValidationError as error:
        faults = "; ".join(_explain(fault) for fault in error.errors())
        raise InputError(f"recipe {source}: {faults}.") from None


def dump_config(recipe: Recipe, **facts: Mapping[str, Any]) -> bytes:
    """The resolved recipe, the versions it ran with, and further tables of `facts`, as TOML."""
    versions = {"extremis": code_version(), "python": sys.version.split()[0]}
    for name in ("torch", "numpy", "pyarrow", "transformers", "faiss-cpu", "apache-beam"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    body = {"recipe": recipe.model_dump(mode="json"), "versions": versions, **facts}
    return tomli_w.dumps(body).encode()


def load_config(url: str) -> dict[str, Any]:
    """A run's config.toml: `recipe`, `versions`, `data`. Raises InputError when no run is there."""
    try:
        data = storage.read_bytes(url)
    except FileNotFoundError:
        raise InputError(f"{url}: no run here. Start one with `extremis run` or `extremis train`.") from None
    return _parse(data.decode(errors="replace"), url)


def recipe_names() -> list[str]:
    """Names of the recipes that ship with Extremis."""
    folder = importlib.resources.files("recipes")
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def _body_of(source: str, seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The recipe's TOML laid over the recipe that it `extends`."""
    if source in seen:
        raise InputError(f"recipe {source}: extends itself ({' -> '.join([*seen, source])}).")
    body = _parse(_text_of(source), source)
    base = body.pop("extends", None)
    return body if base is None else _laid_over(_body_of(str(base), (*seen, source)), body)


def _laid_over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        under = merged.get(key)
        merged[key] = _laid_over(under, value) if isinstance(value, dict) and isinstance(under, dict) else value
    return merged


def _text_of(source: str) -> str:
    if source in recipe_names():
        return importlib.resources.files("recipes").joinpath(f"{source}.toml").read_text()
    if not source.endswith(".toml"):
        near = difflib.get_close_matches(source, recipe_names(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"no recipe {source!r}: expected one of {', '.join(recipe_names())}, or a path that ends in .toml.{hint}"
        )
    try:
        return storage.read_bytes(source).decode()
    except FileNotFoundError:
        raise InputError(f"recipe {source}: no such file.") from None
    except UnicodeDecodeError as error:
        raise InputError(f"recipe {source}: not UTF-8 text ({error}).") from None


def _parse(text: str, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}.") from None


def _override(body: dict[str, Any], override: str) -> None:
    path, equals, value = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {override!r}: expected section.key=value, for example train.epochs=10.")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value  # a bare word is a string
    for key in keys[:-1]:
        body = body.setdefault(key, {})
        if not isinstance(body, dict):
            raise InputError(f"--set {override!r}: {key!r} is a value, not a section.")
    body[keys[-1]] = parsed


def _explain(fault: Any) -> str:
    path = [str(part) for part in fault["loc"]]
    where = ".".join(path)
    if fault["type"] == "extra_forbidden":
        known = _keys_at(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.5)
        hint = f", did you mean {near[0]!r}?" if near else f", known: {', '.join(known)}"
        return f"unknown key {where!r}{hint}"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return message
    return f"{where}: {message.lower()}, got {fault['input']!r}"


def _keys_at(path: list[str]) -> list[str]:
    model: type[BaseModel] = Recipe
    for part in path:
        annotation = model.model_fields[part].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)
