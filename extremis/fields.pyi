"""Keyword arguments that functions take from models of the pipelines, for editors."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

from scoring.decision import Decision

class ArrayFields(TypedDict, total=False):
    memory: int | str
    block_rows: int | None
    query_batch: int | None
    tasks_per_block: int
    threads: int | None
    device: str
    index: str | None
    target_recall: float
    nprobe: int | None
    ef_search: int | None
    refine: int | None
    audit_queries: int | None
    margin: float | None
    relative_margin: float | None
    equal_texts: Literal["off", "equal", "near"]
    skip_top: int
    window: int | None
    max_score: float | None
    min_score: float | None
    sample: Literal["top", "uniform", "softmax"]
    temperature: float | None
    queries: str | PathLike[str] | None
    seed: int
    for_epoch: int | None
    out: str | PathLike[str] | None
    overwrite: bool
    by: Literal["classifier", "labels", "points"] | None
    vectors: str | PathLike[str] | None
    width: int | None
    ranges: int
    positives: str | PathLike[str] | None
    metric: Literal["inner", "cosine"] | None
    fields: str | Mapping[str, str] | None
    same_key: Literal["filter", "keep"] | None
    query_texts: str | PathLike[str] | None
    document_texts: str | PathLike[str] | None

class ClusterFields(TypedDict, total=False):
    memory: int | str
    queries: str | PathLike[str] | None
    seed: int
    for_epoch: int | None
    out: str | PathLike[str] | None
    overwrite: bool
    size: int | None
    smallest: int | None
    part_rows: int | None

class EmbedTextsFields(TypedDict, total=False):
    what: Literal["queries", "labels", "documents"] | None
    prompt: str | None
    fields: str | Mapping[str, str] | None
    encoding: str | None
    split: str
    dtype: Literal["float16", "float32"]
    compute: Literal["auto", "float32", "bfloat16"]
    threads: int | None

class MergeFields(TypedDict, total=False):
    equal_texts: Literal["off", "equal", "near"]
    by: Literal["turns", "score"]
    width: int | None

class ShardFields(TypedDict, total=False):
    tokenizer: str | PathLike[str]
    max_tokens: int | None
    text: Literal["title+content", "title"]
    shards: int | None
    shard_bytes: int
    row_group_rows: int | None
    seed: int
    embed: str | PathLike[str] | None
    keep_text: bool
    validation: float
    test: float
    group: Literal["off", "equal", "near"]
    max_reject_share: float
    tokenizer_texts: int
    format: str | None
    fields: str | Mapping[str, str] | None
    encoding: str | None
    unlabelled: Literal["reject", "skip"]
    same_key: Literal["filter", "keep"] | None
    sink: str
    onto: str | PathLike[str] | None
    part: str | None
    again: Literal["replace", "merge", "keep"]
    labels: Literal["all", "new"] | None

class TeachFields(TypedDict, total=False):
    margin: float | None
    relative_margin: float | None
    width: int | None
    label: str | None
    batch: int

class TrainFields(TypedDict, total=False):
    set: Mapping[str, object] | Sequence[str]
    from_run: str | PathLike[str] | None
    device: str | None
    threads: int | None
    resume: bool
    grace: float
    metrics_port: int | None
    metrics_host: str

class DecisionFields(TypedDict, total=False):
    max_labels: int | None
    min_probability: float | None
    precision: float | None
    at_least: int
    allowed: Sequence[str] | None
    never: Sequence[str]
    decision: str | PathLike[str] | Mapping[str, object] | Decision | None

class EvaluateFields(DecisionFields, total=False):
    step: int | str | None
    device: str
    split: str
    limit: int | None
    no_filter: bool
    k: Sequence[int]
    zero_shot: bool
    seen_only: bool
    scores: Literal["classifier", "labels", "sum", "fused"] | None
    baseline: bool
    calibrate: bool
    labels: str | PathLike[str] | None
    overwrite: bool
    out: str | PathLike[str] | None
    save: bool

class ExportFields(DecisionFields, total=False):
    step: int | str | None
    device: str
    dtype: Literal["float32", "float16"]
    form: Literal["auto", "torch", "onnx", "onnx-int8"]
    index: str
    purpose: Literal["serving", "batch"]
    target_recall: float
    calibration_split: str | None
    scores: Literal["classifier", "sum", "fused"] | None
    license: str | None
    language: Sequence[str]
    onto: str | PathLike[str] | None
    overwrite: bool

class FitFields(TypedDict, total=False):
    step: int | str | None
    device: str
    split: str | None
    shortlist: int
    queries: int

class TupleFields(TypedDict, total=False):
    form: Literal["triplets", "tuples", "pairs", "lists", "tevatron", "flagembedding"]
    negatives: int | None
    keys: bool
    each_positive: bool
    scores: Literal["search", "teacher"] | None
    seed: int
