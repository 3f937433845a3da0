"""Sections of a recipe that all methods share, such as data, order, storage, classifier, training and validation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from schemas import LABEL_TEXTS
from schemas.errors import InputError
from schemas.options import DEVICES, MOST_RATE, MOST_THREADS, Options, key
from schemas.sizes import parse_bytes
from trainer.schedule import MOST_WEIGHT, SINGLE_ROWS, ClusterSchedule

if TYPE_CHECKING:
    from schemas.shares import RowShare

LEAD = 2  # epochs between a dump and the first use of its table
_RESERVED = {"queries", "vectors"}  # name of the source without a mix; a folder next to the embeddings in a dump

# Families of metrics at k, by name: "module:function" from Rankings to Contributions.
METRICS = {
    "P": "trainer.evaluation.metrics:precision",
    "nDCG": "trainer.evaluation.metrics:ndcg",
    "nDCG-all": "trainer.evaluation.metrics:ndcg_all",
    "R": "trainer.evaluation.metrics:recall",
    "F1": "trainer.evaluation.metrics:f1",
    "PSP": "trainer.evaluation.metrics:psp",
    "PSnDCG": "trainer.evaluation.metrics:psndcg",
}

# Receivers of a run's numbers during training, by option of section `logging`: "module:class" of a `Watcher`.
WATCHERS = {
    "tensorboard": "trainer.tracking:open_tensorboard",
    "wandb": "trainer.tracking:WeightsAndBiases",
    "mlflow": "trainer.tracking:MLflow",
}


class Data(Options):
    """Rows that a run trains on."""

    split: str = key("train", "split to train on")
    holdout: float = key(
        0.0,
        "fraction of the rows, by the hash of the key, that is held out of training, as split `holdout`",
        ge=0,
        le=0.5,
    )
    share: float = key(1.0, "fraction of the rows to train on; rows that are held out are never used", gt=0, le=1)
    parts: str | list[str] = key(
        "", "parts of a data version to train on: `last N`, a pattern such as 2026-11-*, or a list"
    )
    replay: float = key(
        1.0,
        "with train.start_from: how often an epoch uses each row that the earlier run was trained on; new rows are "
        "used once",
        gt=0,
        le=1,
    )
    label_texts: bool = key(False, "also train on the labels' texts: each text is a training point with its own label")
    mix: dict[str, Annotated[float, Field(gt=0, le=MOST_WEIGHT)]] = key(
        {},
        "weights by split name, instead of split and label_texts: a weight is the number of times that an epoch uses "
        "each row of the split; `labels` stands for the label texts. With a weight of 1.5, all rows are used once, and "
        "half of the rows a second time",
    )
    mix_by: Literal["rows", "shares"] = key(
        "rows",
        "meaning of the numbers in mix. rows: how often each row is used; shares: the proportions of an epoch's rows "
        "that come from the sources, where each row of the least used source is used once",
    )

    @property
    def training_rows(self) -> RowShare:
        """Rows of `split` to train on."""
        from schemas.shares import RowShare  # imported late, so that a typo in a recipe is reported quickly

        return RowShare(0.0, min(self.share, 1 - self.holdout))

    @property
    def held_out_rows(self) -> RowShare:
        """Rows of `split` that are held out."""
        from schemas.shares import RowShare

        return RowShare(1 - self.holdout, 1.0)

    @property
    def by_parts(self) -> bool:
        """Whether the part of a data version that contains a row determines how often the row is used."""
        return bool(self.parts or self.replay < 1)

    @model_validator(mode="after")
    def _check(self) -> Data:
        if self.by_parts and self.mix:
            raise ValueError("data.parts and data.replay choose rows of a single split: leave out data.mix")
        if self.mix_by == "shares" and not self.mix:
            raise ValueError("data.mix_by needs sources: set data.mix, which names the sources")
        if not self.mix:
            return self
        if self.holdout or self.share < 1:
            raise ValueError(
                "data.holdout and data.share work on a single split: leave them out, or leave out data.mix (a weight "
                "below 1 in data.mix uses part of a split in each epoch)"
            )
        for name in _RESERVED & self.mix.keys():
            raise ValueError(f"data.mix.{name}: this name is reserved; give the split another name")
        if self.split not in ("train", *self.mix):
            raise ValueError(
                f"data.split = {self.split!r} is not in data.mix, which must name every source: add {self.split} = 1.0 "
                "to data.mix, or leave data.split out"
            )
        if self.label_texts and LABEL_TEXTS not in self.mix:
            raise ValueError(
                f"data.label_texts = true, but data.mix does not name the label texts: add {LABEL_TEXTS} = 1.0 to "
                "data.mix, or set data.label_texts = false"
            )
        return self


class Order(Options):
    """Order of the stream's rows."""

    batch: int = key(512, "B, the number of queries in a step, over all ranks", ge=1, le=1 << 24)
    streams: int = key(8, "S, the number of canonical streams, at least one for each rank; must divide the batch", ge=1)
    batches: Literal["mixed", "by_source"] = key(
        "mixed",
        "whether a batch mixes rows from all sources (splits in data.mix, label texts), or takes all rows from a "
        "single source",
    )
    window_groups: int = key(4, "number of row groups whose rows a stream shuffles together", ge=1, le=1 << 20)
    threads: int = key(1, "threads that read and decode ahead; 0: no extra thread", ge=0, le=MOST_THREADS)

    @model_validator(mode="after")
    def _check(self) -> Order:
        if self.batch % self.streams:
            raise ValueError(f"order.streams = {self.streams} does not divide order.batch = {self.batch}")
        return self

    @property
    def rows_per_stream(self) -> int:
        """B/S, the number of rows that each stream contributes to a batch."""
        return self.batch // self.streams

    @property
    def clusters(self) -> ClusterSchedule:
        """Cluster size of every epoch; without clusters, rows are dealt one by one."""
        return SINGLE_ROWS


class Storage(Options):
    """Options for reading from storage. They do not affect order or results, so a resumed run may change them."""

    verify: bool = key(True, "verify checksums of everything that is read")
    damaged: Literal["stop", "skip"] = key("stop", "what to do with a damaged row group: stop, or skip it")
    fetch_threads: int = key(
        16, "number of parallel requests to a remote store that fetch rows in advance; 0: none", ge=0, le=MOST_THREADS
    )
    cache: str = key("", "an empty local directory that caches remote shards; '': no cache")
    cache_size: str = key("", "maximum size of the cache, e.g. '50GiB'")

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
            raise ValueError(f"storage.cache = {self.cache!r}: expected a directory on a local disk, got a URL")
        return self


class Classifier(Options):
    """Label vectors w_l in R^D; a step updates only the vectors of labels that it scores."""

    optimizer: Literal["sgd", "adagrad", "adam"] = key(
        "adagrad", "optimizer for the label vectors; a step updates only the vectors of labels that it scores"
    )
    lr: float = key(0.1, "learning rate of the label vectors", gt=0, le=MOST_RATE)
    momentum: float = key(0.0, "momentum of sgd, stored per row", ge=0, lt=1)
    weight_decay: float = key(
        0.0, "decoupled weight decay: each step multiplies a row by 1 - lr * weight_decay", ge=0, lt=1
    )
    dtype: Literal["float32", "bfloat16"] = key(
        "float32",
        "data type of the label vectors; computation is in float32, and bfloat16 vectors are rounded stochastically",
    )
    products: Literal["tf32", "bfloat16"] = key(
        "tf32",
        "data type of matrix products with a shared pool or all labels, on a GPU with bfloat16 label vectors. tf32 "
        "rounds queries and the gradients of scores to 11 significant bits, bfloat16 to 8; sums are in float32",
    )
    storage: str = key(
        "memory",
        "where label vectors and optimizer state are stored: memory (of the device); host (main memory; a GPU gets "
        "only the rows of a step); or a directory on a local disk with enough space for a memory-mapped file, which is"
        " removed at the end",
    )
    bias: bool = key(False, "add a bias for each label")
    initial: Literal["random", "labels"] = key(
        "random",
        "label vectors before the first step. random: drawn from a normal distribution. labels: embeddings of the "
        "labels' texts from the untrained encoder, which help if the encoder is pre-trained, or if labels have few "
        "training points",
    )
    initial_scale: float = key(
        0.0, "standard deviation of random initial vectors, or length of initial vectors from label texts", ge=0
    )
    initial_bias: float = key(0.0, "initial bias of each label")
    normalize: bool = key(False, "keep label vectors at length 1, at the start and after each step")

    @model_validator(mode="after")
    def _check(self) -> Classifier:
        if self.normalize and (self.initial_scale != 1 or self.bias or self.dtype != "float32"):
            raise ValueError(
                "classifier.normalize keeps vectors at length 1: it needs classifier.initial_scale = 1, "
                "classifier.bias = false and classifier.dtype = 'float32'"
            )
        if self.initial == "labels" and not self.initial_scale:
            raise ValueError(
                "classifier.initial = 'labels' needs classifier.initial_scale, the length of the initial vectors"
            )
        return self


class Train(Options):
    """Length, rates and random seed of a run."""

    epochs: int = key(
        20, "number of passes over the training split; with train.minutes, the maximum", ge=1, le=1_000_000
    )
    minutes: float = key(
        0.0,
        "end training after about this many minutes; 0: no limit. Before each epoch except the first, the trainer "
        "decides and records how many more epochs fit, and learning rates fall toward the end of the last epoch",
        ge=0,
    )
    seed: int = key(0, "random seed of the order and of all draws", ge=0, lt=1 << 63)
    warmup: float = key(0.05, "fraction of all steps during which the learning rate rises", ge=0, lt=1)
    decay: Literal["cosine", "linear"] = key("cosine", "how the learning rate falls after the warm-up")
    final_lr: float = key(0.0, "final learning rate, as a fraction of the learning rate", ge=0, le=1)
    positive_weight: float = key(
        0.0,
        "weight each positive by its inverse propensity to this power; with 0, or without propensity constants, all "
        "positives have the same weight",
        ge=0,
        le=1,
    )
    positive_ratio: float = key(
        1.0,
        "with bce: weight of a positive relative to a negative (eta+ / eta- in MIPS-s, section 3.1, which uses 50). A "
        "high ratio makes it possible to train from scratch with hard negatives alone",
        gt=0,
    )
    device: str = key(
        "auto",
        "cpu, cuda, cuda:N, or auto, which uses a GPU if the machine has one; a resumed run can use another device",
        pattern=DEVICES,
    )
    threads: int = key(0, "number of PyTorch threads; 0: one thread per core", ge=0, le=MOST_THREADS)
    clip: float = key(0.0, "maximum norm of the encoder's gradient; 0: no limit", ge=0)
    start_from: str = key(
        "",
        "a run on an earlier version of the data: training starts from the encoder and label vectors of that run. "
        "Epochs, learning rates and negatives that are not set are then chosen for a refresh",
    )
    start_optimizer: bool = key(
        False,
        "with start_from: also start from the optimizer state of that run, unless it is of a different optimizer; a "
        "refresh of a classifier with fewer than two passes over older rows does so by default",
    )
    new_labels: Literal["points", "texts", "initial"] = key(
        "points",
        "with start_from, the initial vectors of new labels. points: from the mean embedding of the label's training "
        "points, or from its text if it has no points; texts: from its text; initial: as in a run from scratch",
    )
    encoder_from: str = key(
        "", "a run on the same data: training starts from the encoder in the checkpoint of that run"
    )
    freeze_encoder: bool = key(False, "keep the encoder fixed, without dropout; only the classifier learns")
    accumulate: int = key(
        1,
        "encode the batch of a rank in this many parts, one after another: the step gives the same result with less "
        "memory, but needs a second forward pass",
        ge=1,
        le=1 << 20,
    )


class TableSchedule(Options):
    """Schedule of tables (ASTRA's tau_s and tau_r), and the policy for late tables."""

    start: int = key(
        5,
        "tau_s: the first epoch with a table. At least 2, because a table is used two epochs after its dump; with "
        "train.start_from, 0 is also possible, for a table mined from the vectors of the earlier run",
        ge=0,
    )
    every: int = key(5, "tau_r: epochs between tables", ge=1)
    stale: Literal["warn", "wait", "random-only", "stop"] = key(
        "warn",
        "what to do if the newest table is missing or older than max_age: warn and continue, wait for a newer table, "
        "continue with random negatives only, or stop",
    )
    max_age: int = key(
        0,
        "maximum number of epochs between the dump of a table and its use; 0: every + 1, so no table may be late",
        ge=0,
    )
    wait_seconds: float = key(
        600.0, "maximum number of seconds to wait with stale = 'wait'; after that, a run continues as with 'warn'", gt=0
    )

    keep: int = key(
        0,
        "newest tables to keep; a dump or an older table is removed once no checkpoint, resumed run or miner needs it. "
        "0: keep all",
        ge=0,
    )

    @property
    def oldest(self) -> int:
        """Maximum number of epochs after its dump before a table is stale."""
        return self.max_age or LEAD + self.every - 1

    @model_validator(mode="after")
    def _check(self) -> TableSchedule:
        if 0 < self.max_age < LEAD:
            raise ValueError(
                f"refresh.max_age = {self.max_age}, but every table is at least {LEAD} epochs old when it is used: set "
                f"{LEAD} or more, or 0"
            )
        return self


class Checkpoint(Options):
    """Checkpoints of a run."""

    every_epochs: int = key(1, "epochs between two checkpoints; 0: only the last checkpoint", ge=0)
    every_steps: int = key(0, "also save a checkpoint after this many steps; 0: only at the end of epochs", ge=0)
    keep: int = key(2, "number of newest checkpoints to keep, in addition to the best", ge=1)
    background: bool = key(True, "write checkpoints and dumps in the background, while training continues")


class Validation(Options):
    """Scoring of a split during training."""

    split: str = key(
        "",
        "the split to score during training; default: the newest part of the split `val`, if a data version has that "
        "split; '': none",
    )
    parts: str | list[str] = key("", "parts of the split to score, as in data.parts; empty: all")
    every_epochs: int = key(1, "epochs between two validations", ge=1)
    queries: int = key(5000, "number of rows to score, from the start of the split (shards are shuffled)", ge=1)
    metric: str = key(
        "P@1",
        "the metric that selects the best checkpoint, which is kept in addition to the newest",
        pattern=rf"^({'|'.join(METRICS)})@[1-9]\d{{0,2}}$",
    )
    patience: int = key(0, "end the run after this many validations without improvement of `metric`; 0: never", ge=0)


class Logging(Options):
    """Records of a run."""

    every_steps: int = key(20, "steps between two records in metrics.jsonl", ge=1)
    ranks_every: int = key(
        0, "number of steps between measurements that rank the hard negatives among all labels; 0: no measurement", ge=0
    )
    tensorboard: bool | Literal["auto"] = key("auto", "also write RUN/tensorboard; auto: if tensorboard is installed")
    wandb: str = key("", "project in Weights & Biases that gets the metrics; empty: none", max_length=128)
    mlflow: str = key("", "experiment in MLflow that gets the metrics; empty: none", max_length=256)
