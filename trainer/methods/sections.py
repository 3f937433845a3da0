"""Sections of a recipe that every method shares: rows, their order, storage, rates, and records of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from schemas import LABEL_TEXTS
from schemas.errors import InputError
from schemas.options import DEVICES, MOST_RATE, MOST_THREADS, Options
from schemas.sizes import parse_bytes
from trainer.methods import rules
from trainer.methods.rules import FromData
from trainer.schedule import MOST_WEIGHT, SINGLE_ROWS, ClusterSchedule

if TYPE_CHECKING:
    from trainer.stream.sources import RowShare

LEAD = 2  # epochs between a dump and the first use of its table
_RESERVED = {"queries", "vectors"}  # the source without a mix; what lies beside the sources' embeddings in a dump

# Families of metrics at k, by name: "module:function" from Rankings to Contributions.
METRICS = {
    "P": "trainer.evaluation.metrics:precision",
    "nDCG": "trainer.evaluation.metrics:ndcg",
    "R": "trainer.evaluation.metrics:recall",
    "PSP": "trainer.evaluation.metrics:psp",
    "PSnDCG": "trainer.evaluation.metrics:psndcg",
}

# Where the numbers of a run are sent to while it trains, by option of section `logging`: "module:class" of a `Watcher`.
WATCHERS = {
    "tensorboard": "trainer.tracking.tensorboard:TensorBoard",
    "wandb": "trainer.tracking.weights_and_biases:WeightsAndBiases",
    "mlflow": "trainer.tracking.ml_flow:MLflow",
}


class Data(Options):
    """Rows that a run trains on."""

    split: str = Field("train", description="split to train on")
    holdout: float = Field(
        0.0, ge=0, le=0.5, description="share of the split's rows that are left out of training, as split `holdout`"
    )
    share: float = Field(1.0, gt=0, le=1, description="share of the split's rows to train on, of those not left out")
    parts: str | list[str] = Field(
        "", description="of a version of data, the parts to train on: `last N`, a pattern such as 2026-11-*, or a list"
    )
    half_life: float = Field(
        0.0, ge=0, description="of a version, parts after which a row is dealt half as often, the newest once; 0: none"
    )
    replay: float = Field(
        1.0,
        gt=0,
        le=1,
        description="with train.start_from, how often an epoch deals a row that the earlier run had; new ones once",
    )
    label_texts: bool = Field(False, description="label texts are training points too, each with its own label")
    mix: dict[str, Annotated[float, Field(gt=0, le=MOST_WEIGHT)]] = Field(
        default_factory=dict,
        description="in place of split and label_texts, how often an epoch deals each row of the splits named; "
        "`labels` are the label texts. A weight of 1.5 deals all rows once and half of them once more",
    )
    mix_by: Literal["rows", "shares"] = Field(
        "rows",
        description="what the numbers of mix are: how often each row is dealt, or shares of the rows of an epoch, "
        "which then deals each row of the source that is dealt least once",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        description="with mix, T: the share of a source of N rows is its number in mix times N^(1/T), 1 or more; 1: by "
        "size; 0: none",
    )

    @property
    def trained(self) -> RowShare:
        """Rows of `split` to train on."""
        from trainer.stream.sources import RowShare  # the stream needs torch

        return RowShare(0.0, min(self.share, 1 - self.holdout))

    @property
    def held_out(self) -> RowShare:
        """Rows of `split` that are left out."""
        from trainer.stream.sources import RowShare

        return RowShare(1 - self.holdout, 1.0)

    @property
    def by_shares(self) -> bool:
        """True: weights follow from shares."""
        return bool(self.mix_by == "shares" or self.temperature)

    @property
    def by_parts(self) -> bool:
        """True: rows are dealt by the part of a version that they are in."""
        return bool(self.parts or self.half_life or self.replay < 1)

    @model_validator(mode="after")
    def _check(self) -> Data:
        if self.by_parts and (self.mix or self.holdout or self.share < 1):
            raise ValueError(
                "data.parts, data.half_life and data.replay choose rows of one split by their parts: leave out "
                "data.mix, data.holdout and data.share"
            )
        if self.by_shares and not self.mix:
            raise ValueError("data.mix_by and data.temperature need the sources: name them in data.mix")
        if 0 < self.temperature < 1:
            raise ValueError(f"data.temperature = {self.temperature:g}: expected 1 or more, or 0 for none")
        if self.temperature and self.mix_by == "shares":
            raise ValueError("data.temperature makes shares of the sizes: leave out data.mix_by, which states them")
        if not self.mix:
            return self
        if self.holdout or self.share < 1:
            raise ValueError(
                "data.holdout and data.share are of one split: leave them out, or leave out data.mix (a weight in "
                "data.mix below 1 deals a part of a split in each epoch)"
            )
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


class Order(Options):
    """Order of the stream's rows."""

    batch: Annotated[int, FromData(rules.batch)] = Field(
        512, ge=1, le=1 << 24, description="B, queries a step over all ranks"
    )
    streams: int = Field(
        8, ge=1, description="S canonical streams, as many as there are ranks at least; it divides the batch"
    )
    batches: Literal["mixed", "by_source"] = Field(
        "mixed", description="a batch mixes the rows of all sources (splits of data.mix, label texts), or is of one"
    )
    window_groups: int = Field(4, ge=1, le=1 << 20, description="row groups that a stream permutes rows within")
    threads: int = Field(1, ge=0, le=MOST_THREADS, description="threads that read and decode ahead; 0 reads in line")

    @model_validator(mode="after")
    def _check(self) -> Order:
        if self.batch % self.streams:
            raise ValueError(f"order.streams = {self.streams} does not divide order.batch = {self.batch}")
        return self

    @property
    def share(self) -> int:
        """B/S, rows of a batch that come from one stream."""
        return self.batch // self.streams

    @property
    def clusters(self) -> ClusterSchedule:
        """Rows of every epoch that are dealt together: single ones."""
        return SINGLE_ROWS


class Storage(Options):
    """Reading from storage. It changes no order and no number, so a resumed run may set it differently."""

    verify: bool = Field(True, description="checksums of what is read are verified")
    damaged: Literal["stop", "skip"] = Field("stop", description="a row group that does not match them: stop, or skip")
    fetch_threads: int = Field(
        16, ge=0, le=MOST_THREADS, description="requests to a remote store at a time, ahead of use; 0: none"
    )
    cache: str = Field("", description="a local directory of its own for what remote stores gave; empty: none")
    cache_size: str = Field("", description="what the cache may hold, e.g. '50GiB'")

    @property
    def cache_bytes(self) -> int:
        return parse_bytes(self.cache_size) if self.cache_size else 0

    @model_validator(mode="after")
    def _check(self) -> Storage:
        try:
            size = self.cache_bytes
        except InputError as error:
            raise ValueError(f"storage.cache_size = {error}".rstrip(".")) from None
        if self.cache and not size:
            raise ValueError(f"storage.cache = {self.cache!r} needs a limit: set storage.cache_size, e.g. '50GiB'")
        if size and not self.cache:
            raise ValueError("storage.cache_size is the limit of a cache: set storage.cache to a local directory")
        if "://" in self.cache:
            raise ValueError(
                f"storage.cache = {self.cache!r}: a cache is a directory on a local disk, not a URL: name one"
            )
        return self


class Classifier(Options):
    """Vectors w_l in R^D, updated on touched rows only."""

    optimizer: Literal["sgd", "adagrad", "adam"] = Field("adagrad", description="of the vectors, touched rows only")
    lr: Annotated[float, FromData(rules.classifier_rate)] = Field(
        0.1, gt=0, le=MOST_RATE, description="rate of the vectors"
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd, kept by row")
    weight_decay: float = Field(
        0.0, ge=0, lt=1, description="decoupled: a row is multiplied by 1 - lr * weight_decay a step"
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="of the vectors; the narrower ones are rounded stochastically, computed in float32"
    )
    products: Literal["tf32", "bfloat16"] = Field(
        "tf32",
        description="of bfloat16 vectors of a shared pool or of all labels, on a GPU: tf32 rounds queries and slopes "
        "to 11 digits, bfloat16 to 8; sums are float32",
    )
    storage: str = Field(
        "memory",
        description="where vectors and optimizer rows are while training: memory, that of the device; host, main "
        "memory beside a GPU, which gets a step's rows; or a directory on a local disk with room for them, for a file "
        "that is mapped and leaves nothing behind",
    )
    bias: bool = Field(False, description="a last column that x meets with a constant 1")
    initial: Literal["random", "labels"] = Field(
        "random",
        description="the vectors before the first step. random: normal numbers. labels: the untrained encoder's "
        "embeddings of the labels' texts; for a pre-trained encoder, or many labels with few training points",
    )
    initial_scale: Annotated[float, FromData(rules.initial_scale)] = Field(
        0.0, ge=0, description="standard deviation of random initial vectors; length of those from labels"
    )
    initial_bias: Annotated[float, FromData(rules.initial_bias)] = Field(
        0.0, description="bias that each vector begins with"
    )
    normalize: bool = Field(
        False, description="vectors have length 1: at the start, and after a step those that it touches"
    )

    @model_validator(mode="after")
    def _check(self) -> Classifier:
        if self.normalize and (self.initial_scale != 1 or self.bias or self.dtype != "float32"):
            raise ValueError(
                "classifier.normalize keeps vectors at length 1: it needs classifier.initial_scale = 1, "
                "classifier.bias = false and classifier.dtype = 'float32'"
            )
        if self.initial == "labels" and not self.initial_scale:
            raise ValueError("classifier.initial = 'labels' needs classifier.initial_scale, the length of the vectors")
        return self


class Train(Options):
    """Length of a run, its rates and its random numbers."""

    epochs: Annotated[int, FromData(rules.epochs)] = Field(
        20, ge=1, le=1_000_000, description="passes over the training split; with minutes the most that there may be"
    )
    minutes: float = Field(
        0.0,
        ge=0,
        description="end after about so many minutes of training: before each epoch but the first it is decided, and "
        "recorded, how many more fit at the pace of the last, and rates fall to that end; 0: as long as epochs take",
    )
    seed: int = Field(0, ge=0, lt=1 << 63, description="of the order and of all draws")
    warmup: float = Field(0.05, ge=0, lt=1, description="share of all steps with a rising rate")
    decay: Literal["cosine", "linear"] = Field("cosine", description="how rates fall after the warm-up")
    final_lr: float = Field(0.0, ge=0, le=1, description="share of the rate left at the end of the decay")
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
    device: str = Field(
        "auto",
        pattern=DEVICES,
        description="cpu, cuda, cuda:N, or auto: a GPU where there is one; a resumed run may have another",
    )
    graph: bool = Field(
        False,
        description="on a GPU, record steps as CUDA graphs: of a bag of embeddings with binary cross-entropy and own "
        "pools that are planned ahead; other runs say why not, and go on without",
    )
    threads: int = Field(0, ge=0, le=MOST_THREADS, description="torch threads, as --threads says; 0: one a core")
    clip: float = Field(0.0, ge=0, description="greatest norm of the encoder's gradient of a step; 0: any")
    start_from: str = Field(
        "",
        description="a run on an earlier version of the data, whose encoder and vectors, by label id, this one begins "
        "with; epochs, rates and negatives that are not stated are then those of a refresh",
    )
    start_optimizer: bool = Field(False, description="with start_from: take the state of its optimizers too")
    new_labels: Literal["points", "texts", "initial"] = Field(
        "points",
        description="with start_from, where the vectors of new labels begin: as trained ones are to the mean of their "
        "points' embeddings (labels without points: to their text's); all of them so to their texts'; or as in any run",
    )
    encoder_from: str = Field(
        "", description="a run on the same data whose encoder, as its checkpoint has it, this one begins with"
    )
    freeze_encoder: bool = Field(
        False, description="the encoder stays as it begins, and encodes without dropout; only the classifier learns"
    )
    accumulate: int = Field(
        1,
        ge=1,
        le=1 << 20,
        description="encode a batch, or a rank's part of it, in so many parts one after the other: the same step, in "
        "less memory, for a second forward pass",
    )


class Tables(Options):
    """Schedule of tables (ASTRA's tau_s and tau_r), and the policy for late ones."""

    start: int = Field(
        5,
        ge=0,
        description="tau_s: the first epoch with a table; two epochs after its dump, so 2 or more; with "
        "train.start_from also 0, by the vectors of that run",
    )
    every: int = Field(5, ge=1, description="tau_r: epochs between tables")
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
        """Greatest age, in epochs from its dump, of a table that is not stale."""
        return self.max_age or LEAD + self.every - 1

    @model_validator(mode="after")
    def _check(self) -> Tables:
        if 0 < self.max_age < LEAD:
            raise ValueError(
                f"refresh.max_age = {self.max_age}: no table is younger than {LEAD} epochs when it is used: set "
                f"{LEAD} or more, or 0"
            )
        return self


class Checkpoint(Options):
    """Checkpoints of a run."""

    every_epochs: int = Field(1, ge=0, description="0: only the last")
    every_steps: int = Field(0, ge=0, description="also within epochs; 0: not")
    keep: int = Field(2, ge=1, description="newest checkpoints that are kept, besides the best")
    background: bool = Field(
        True, description="written while training goes on, and dumps too, from copies of encoder and changing rows"
    )


class Validation(Options):
    """Scoring of a split while training."""

    split: str = Field(
        "",
        description="a split to score while training; where nothing is stated, the newest part of `val` of a version "
        "that has such a split; empty: none",
    )
    parts: str | list[str] = Field(
        "", description="of a version of data, the parts of the split to score, as data.parts names them; empty: all"
    )
    every_epochs: int = Field(1, ge=1, description="epochs between two scorings")
    queries: int = Field(5000, ge=1, description="its first rows only (shards are pre-shuffled)")
    metric: str = Field(
        "P@1",
        pattern=rf"^({'|'.join(METRICS)})@[1-9]\d{{0,2}}$",
        description="the checkpoint with the best value of it is kept beside the newest",
    )
    patience: int = Field(
        0,
        ge=0,
        description="validations in a row without a better value of `metric` after which the run ends; 0: no limit",
    )


class Logging(Options):
    """Records of a run."""

    every_steps: int = Field(20, ge=1, description="steps between two records in metrics.jsonl")
    ranks_every: int = Field(
        0,
        ge=0,
        description="steps between measurements of the ranks that a step's hard negatives have among all labels by the "
        "present model; 0: none",
    )
    tensorboard: bool = Field(True, description="also write RUN/tensorboard")
    wandb: str = Field("", max_length=128, description="project of Weights & Biases to send numbers to; empty: none")
    mlflow: str = Field("", max_length=256, description="experiment of MLflow to send numbers to; empty: none")
