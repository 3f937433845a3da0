"""Options of the functions, by the names of the command line: `--max-tokens` is `max_tokens`. None is the default.

What they mean, and their defaults, are in `help(extremis.shard)` and `extremis shard --help`: both are made from the
options of the command line, and a test holds these types to them.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from typing_extensions import TypedDict

from extremis.api.call import Progress

Url = str | PathLike[str]  # of a file, a directory, or an object-store prefix
Settings = Mapping[str, Any] | Sequence[str]  # changes of a recipe: {"train.epochs": 5}, or ["train.epochs=5"]
Names = Mapping[str, str] | str  # of fields: {"key": "id"}, or "key=id"
Memory = str  # "8GiB"


class Common(TypedDict, total=False):
    """`progress`: True as on the command line, False for none, or a function that gets every `Event`."""

    progress: Progress


class Beam(Common, total=False):
    """`beam_options`: what the command line has behind `--`."""

    beam_options: Sequence[str]
    start_timeout: float


class Shard(Beam, total=False):
    tokenizer: Url
    max_tokens: int
    text: Literal["title+content", "title"]
    propensity: tuple[float, float]
    shards: int
    shard_bytes: int
    row_group_rows: int
    validation: float
    test: float
    keep_text: bool
    max_reject_share: float
    tokenizer_texts: int
    format: str
    fields: Names
    sink: Literal["parquet", "webdataset"]
    exchange: Literal["files", "shuffle"]
    onto: Url
    part: str
    again: Literal["replace", "keep"]
    labels: Literal["all", "new"]
    seed: int
    overwrite: bool


class Train(Common, total=False):
    from_run: Url
    device: str
    set: Settings
    resume: bool
    metrics_port: int
    grace: float
    metrics_host: str


class Run(Train, Beam, total=False):
    minutes: float


class _FromDump(Beam, total=False):
    epoch: int
    watch: bool
    queries: Url
    for_epoch: int
    out: Url
    memory: Memory
    seed: int
    overwrite: bool


class Mine(_FromDump, total=False):
    device: str
    by: Literal["classifier", "labels"]
    vectors: Url
    width: int
    ranges: int
    skip_top: int
    window: int
    margin: float
    relative_margin: float
    index: str
    target_recall: float
    nprobe: int
    ef_search: int
    refine: int
    block_rows: int
    query_batch: int
    tasks_per_block: int
    threads: int
    audit_queries: int
    keep_index: Url


class Cluster(_FromDump, total=False):
    size: int
    smallest: int
    part_rows: int


class Embed(Beam, total=False):
    device: str
    what: Literal["queries", "labels"]
    split: str
    step: int
    dtype: Literal["float16", "float32"]


class Evaluate(Common, total=False):
    device: str
    split: str
    step: int
    limit: int
    no_filter: bool
    k: Sequence[int]
    zero_shot: bool
    seen_only: bool
    scores: Literal["classifier", "labels", "sum", "fused"]
    baseline: bool


class Fuse(Common, total=False):
    device: str
    by: Literal["weights", "tree"]
    split: str
    step: int
    shortlist: int
    queries: int
    memory: Memory


class Export(Common, total=False):
    device: str
    step: int
    dtype: Literal["float32", "float16"]
    index: str
    target_recall: float
    precision: Sequence[float]
    threshold_split: str
    scores: Literal["classifier", "sum", "fused"]
    onto: Url
    current: bool
    overwrite: bool


class Predict(Common, total=False):
    device: str
    data: Url
    split: str
    k: int
    form: Literal["text", "jsonl", "parquet", "csv"]
    to: Literal["jsonl", "parquet", "trec", "npz", "csv"]
    fields: Names
    text: Literal["title+content", "title"]
    batch: int
    threshold: float
    precision: float
    exact: bool
    no_filter: bool
    safe_cells: bool
    threads: int
    overwrite: bool


class Inspect(Common, total=False):
    verify: bool
    rows: int
    key: str
    run: Url
    split: str


class Report(Common, total=False):
    out: Url
    queries: int
    predictions: bool


class Plan(Common, total=False):
    queries: float
    labels: float
    data: Url
    tokens: float
    label_tokens: float
    labels_per_query: float
    key_bytes: float
    text_bytes: float
    vocabulary: int
    recipe: Url
    set: Settings
    dimension: int
    width: int
    epochs: int
    ranks: int
    workers: int
    engine: Literal["flink", "spark", "dataflow"]
    memory: Memory


class Recipes(Common, total=False):
    set: Settings


class Ablate(Common, total=False):
    table: Literal["5", "6", "7", "8", "dexml-3", "dexml-4", "mips-1", "mips-2", "mips-table-2", "lns-4"]
    recipes: Sequence[str]
    only: Sequence[str]
    set: Settings
    split: str
    retry: bool


class Demo(Common, total=False):
    recipe: Url
    set: Settings
