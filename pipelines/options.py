"""Options of the pipelines: their types, defaults, bounds and meanings.

The description of a field is the help of the option; each front end writes a {parameter} in its own way.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import ConfigDict, Field, field_validator, model_validator

from schemas.errors import InputError, option
from schemas.options import Device, Encoding, Fields, Options, Place, Shown, Sink, Size, Url, key

if TYPE_CHECKING:
    from typing_extensions import Self

Text = Literal["title+content", "title"]
Again = Literal["replace", "merge", "keep"]
SameKey = Literal["filter", "keep"]
# Options that do not affect the content, or are recorded with the version or by their content.
_NOT_RECORDED = {"onto", "part", "again", "labels", "embed"}

# Input formats as "module:name", in the order in which they are tried; a format is imported when it is first used.
FORMATS = {
    "xc": "pipelines.formats.xc:XC_RAW",
    "xc-sparse": "pipelines.formats.xc:XC_SPARSE",
    "xc-single": "pipelines.formats.xc:XC_SINGLE",
    "xc-text": "pipelines.formats.xc:XC_TEXT",
    "jsonl": "pipelines.formats.keyed:JSON_LINES",
    "parquet": "pipelines.formats.keyed:PARQUET_FILES",
    "csv": "pipelines.formats.keyed:CSV_FILES",
    "datasets": "pipelines.formats.keyed:DATASETS",
    "beir": "pipelines.formats.keyed:BEIR",
    "attentionxml": "pipelines.formats.keyed:ATTENTION_XML",
}
MIN_SHARDS = 4  # shards of small data, so that every reader gets some


_unset = functools.partial(key, None)  # a field whose default is None
_positive = functools.partial(key, None, ge=1)


class ShardOptions(Options):
    """Options of `extremis shard`."""

    model_config = ConfigDict(populate_by_name=True)

    tokenizer: Annotated[Place, Shown(place=True)] = Field(
        "train:30000", description="Tokenizer: train:SIZE (trains a tokenizer on the data), a directory, or a hub name."
    )
    max_tokens: int | None = _positive(
        "Maximum number of tokens of a text. Default: 128, or up to 512 if texts are longer."
    )
    text: Text = Field("title+content", description="Fields that make up a text, if records have a title.")
    shards: int | None = _positive("Number of shards of each split. Default: from {shard_bytes}.")
    shard_bytes: int = Field(128 << 20, ge=1, description="Approximate bytes per shard.")
    row_group_rows: int | None = _positive("Rows per row group. Default: from the number of rows.")
    seed: int = Field(0, ge=0, lt=1 << 64, description="Seed for the order of rows.")
    propensity_a: float | None = None
    propensity_b: float | None = None
    embed: Annotated[Place, Shown("MODEL", place=True)] | None = _unset(
        "Text model (directory or hub name) whose vectors are stored with the tokens."
    )
    keep_text: bool = Field(False, description="Store the texts of the queries, too.")
    validation_share: float = Field(
        0.0, ge=0, lt=1, alias="validation", description="Fraction of train that becomes the split val."
    )
    test_share: float = Field(
        0.0, ge=0, lt=1, alias="test", description="Fraction of train that becomes the split test."
    )
    group: Literal["off", "equal", "near"] = Field(
        "off", description="Hold out rows together that have the same text (equal), or the same set of words (near)."
    )
    max_reject_share: float = Field(
        0.001,
        ge=0,
        le=1,
        description="Largest allowed fraction of rejected rows and label mentions. XC formats allow no rejected label.",
    )
    tokenizer_texts: int = Field(
        200_000, ge=1, description="Number of texts that the tokenizer of train:SIZE is trained on, chosen by key hash."
    )
    format: Annotated[str, Shown("FORM", lambda: FORMATS)] | None = _unset("Format of INPUT{names}. Default: detected.")
    fields: Fields | None = _unset("Names of the fields in INPUT, e.g. key=id,text=query.")
    encoding: Encoding | None = _unset("Encoding of files of text, e.g. cp1252. Default: utf-8, or from a utf-16 mark.")
    unlabelled: Literal["reject", "skip"] = Field(
        "reject", description="Rows without a label: count towards {max_reject_share} (reject), or are left out (skip)."
    )
    same_key: SameKey | None = _unset(
        "A label with the key of a query that is not a positive of the query: never a negative or a prediction of the "
        "query (filter), or like other labels (keep). Default: filter for beir, else keep."
    )
    sink: Sink = Field("parquet", description="File format of the queries{names}. Parquet is smaller and faster.")
    onto: Annotated[Place, Shown("DATA1", place=True)] | None = _unset(
        "Make DATA a new version of DATA1. DATA contains the new rows and refers to the files of DATA1."
    )
    part: Annotated[str, Shown("NAME")] | None = _unset(
        "Name of the added part, e.g. a date. Default: the version's number."
    )
    again: Again = Field(
        "replace",
        description="With {onto}, if the key of a point exists already: replace the older point, merge its labels into "
        "the new point, or keep both points.",
    )
    labels: Literal["all", "new"] | None = _unset(
        "With {onto}, whether INPUT lists all labels (other labels are retired), or only new and changed labels. "
        "Default: all, unless more than half of the labels would be retired."
    )

    @field_validator("tokenizer")
    @classmethod
    def _names_a_tokenizer(cls, name: str) -> str:
        vocabulary_size(name)
        return name

    @field_validator("part")
    @classmethod
    def _names_a_part(cls, name: str | None) -> str | None:
        from schemas.layout import check_name  # help loads no storage

        return name if name is None else check_name(option("part"), name)

    @model_validator(mode="after")
    def _both_propensities(self) -> "Self":
        if (self.propensity_a is None) != (self.propensity_b is None):
            got, expected = f"A={self.propensity_a}, B={self.propensity_b}", "both A and B, or neither"
            raise InputError(
                parameter="propensity", got=got, expected=expected, remedy="Most data sets use 0.55 and 1.5."
            )
        return self

    @model_validator(mode="after")
    def _leaves_train(self) -> "Self":
        if self.validation_share + self.test_share >= 1:
            expected = f"less than 1 together with {option('test', self.test_share)}, so that rows are left in train"
            raise InputError(parameter="validation", got=f"{self.validation_share:g}", expected=expected)
        if self.group != "off" and not self.validation_share + self.test_share:
            expected = f"off, because no rows are held out without {option('validation')} or {option('test')}"
            raise InputError(parameter="group", got=self.group, expected=expected)
        return self

    @model_validator(mode="after")
    def _goes_on(self) -> "Self":
        if self.onto is None and (self.labels or self.again != "replace"):
            expected = f"the earlier version, because of {option('labels')} or {option('again')}"
            raise InputError(parameter="onto", got="none", expected=expected)
        return self

    def recorded(self, tokenizer_identity: str, embed: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the options for the manifest, without paths, so that the same input gives the same manifest.

        embed: properties of the model for dense vectors, except its name.
        """
        stated = {} if embed is None else {"embed": dict(embed)}
        return {**self.model_dump(exclude=_NOT_RECORDED), "tokenizer": tokenizer_identity, **stated}


def vocabulary_size(name: str) -> int | None:
    """Return the vocabulary size of `train:SIZE`; None for a directory or hub name. Raises InputError."""
    if not name.startswith("train:"):
        return None
    size = name.removeprefix("train:")
    if not size.isascii() or not size.isdigit() or not 100 <= int(size) < 1 << 31:
        expected = "train:SIZE with a vocabulary of at least 100, as in train:30000"
        raise InputError(parameter="tokenizer", got=repr(name), expected=expected)
    return int(size)


class DumpOptions(Options):
    """Options that mining and clustering share."""

    HEADING: ClassVar[str] = "What to read and write"
    queries: Url | None = _unset("Query embeddings from `extremis embed`, instead of the dump.")
    seed: int = Field(0, ge=0, description="Seed for all random choices.")
    for_epoch: int | None = _unset("First epoch that trains on the table. Default: from the dump.", ge=0)
    out: Url | None = _unset("Publish the table at URL instead of in RUN.")
    overwrite: bool = Field(False, description="Replace a table that was built with other options.")

    def for_workers(self, place: Callable[[str], str]) -> "Self":
        """Return these options, in which each URL that is sent to workers is replaced by `place(url)`."""
        places = ("queries", "out", "vectors", "positives", "query_texts", "document_texts")
        urls = {name: getattr(self, name, None) for name in places}
        return self.model_copy(update={name: place(url) for name, url in urls.items() if url is not None})


class MemoryOptions(Options):
    """Options for the memory of a worker."""

    HEADING: ClassVar[str] = "Resources"
    memory: Size = Field(
        4 << 30, ge=1, description="Memory of one worker process. Default: 4GiB, or 2, 1 or 0.5 where it may use less."
    )


class TextOptions(Options):
    """Options for the texts of labels."""

    HEADING: ClassVar[str] = "Filters"
    equal_texts: Literal["off", "equal", "near"] = Field(
        "equal",
        description="Also exclude labels with the same text as a positive (equal), or the same set of words (near).",
    )


class MarginOptions(Options):
    """Options for the margin between negatives and a row's positives."""

    HEADING: ClassVar[str] = "Filters"
    margin: float | None = _unset("Keep negatives that score below the lowest positive score minus this margin.", ge=0)
    relative_margin: float | None = _unset("The same margin, as a fraction of the positive's score.", ge=0)


class FilterOptions(TextOptions, MarginOptions):
    """Options that choose the negatives of a row among the labels that the search finds."""

    HEADING: ClassVar[str] = "Filters"
    skip_top: int = Field(0, ge=0, description="Number of top-ranked negatives to leave out.")
    window: int | None = _positive("Take negatives from the ranks [{skip_top}, {window}).")
    max_score: float | None = _unset("Keep negatives that score at most this.")
    min_score: float | None = _unset("Keep negatives that score at least this.")
    sample: Literal["top", "uniform", "softmax"] = Field(
        "top", description="How to choose K of the ranks of {window}: the best K, or K at random (uniform or softmax)."
    )
    temperature: float | None = _unset("Temperature of {sample} softmax. Default: 1.", ge=1e-6)


class SearchOptions(Options):
    """Options of the search for nearest vectors."""

    HEADING: ClassVar[str] = "Search"
    index: str | None = _unset("exact, auto, or a Faiss factory string. Default: from the recipe.")
    target_recall: float = Field(0.95, gt=0, le=1, description="Recall that the parameters of an index are tuned to.")
    nprobe: int | None = _positive("Inverted lists searched per query. Default: tuned.")
    ef_search: int | None = _positive("Breadth of an HNSW search. Default: tuned.")
    refine: int | None = _positive("Candidates to score exactly, as a multiple of K. Default: tuned.")
    audit_queries: int | None = _unset(
        "Rows that are also searched exactly, to measure recall. Default: 200 to 1000.", ge=0
    )


class WorkOptions(MemoryOptions):
    """Options for the work of a search: its blocks, threads and device."""

    HEADING: ClassVar[str] = "Resources"
    block_rows: int | None = _positive("Vectors in one index at a time. Default: from {memory}.")
    query_batch: int | None = _positive("Queries searched at a time. Default: from {memory}.")
    tasks_per_block: int = Field(
        1, ge=1, description="Work items per group of blocks; each item builds or reads the group's indexes."
    )
    threads: int | None = _positive("Faiss threads per worker. Default: all cores.")
    device: Device = Field("auto", description="Device for exact search, which each worker opens.")


class MineOptions(DumpOptions, FilterOptions, SearchOptions, WorkOptions):
    """Options of `extremis mine`. None: use the trainer's request in the dump, or a default based on the sizes."""

    HEADING: ClassVar[str] = "What to mine"
    by: Literal["classifier", "labels", "points"] | None = _unset(
        "Vectors to search: label vectors of the classifier, embeddings of the labels' texts, or other points."
    )
    vectors: Url | None = _unset("Label vectors from `extremis embed --what labels`, instead of the dump.")
    width: int | None = _positive("K, hard negatives per query. Default: from the recipe; 50 for arrays.")
    ranges: int = Field(
        1, ge=1, description="Number of equal label ranges, each with its own K negatives (one range per rank)."
    )

    @model_validator(mode="after")
    def _agree(self) -> "Self":
        if self.min_score is not None and self.max_score is not None and self.min_score > self.max_score:
            expected = f"at most {option('max_score', self.max_score)}, so that a label can be a negative"
            raise InputError(parameter="min_score", got=f"{self.min_score:g}", expected=expected)
        if self.sample != "top" and self.window is None:
            expected = f"the number of ranks that {option('sample', self.sample)} draws from"
            raise InputError(parameter="window", got="none", expected=expected, remedy=f"Give {option('window', 'W')}.")
        if self.temperature is not None and self.sample != "softmax":
            expected = f"none, because only {option('sample', 'softmax')} has a temperature"
            raise InputError(parameter="temperature", got=f"{self.temperature:g}", expected=expected)
        return self


class MergeOptions(TextOptions):
    """Options of `extremis merge`."""

    by: Literal["turns", "score"] = Field(
        "turns", description="Order of a row's negatives: taken from the tables in turns, or by score."
    )
    width: int | None = _positive("K, negatives per row. Default: the largest K of the tables.")


class TeachOptions(MarginOptions):
    """Options of `extremis teach`."""

    width: int | None = _positive("K, negatives per row. Default: the K of the table.")
    label: str | None = _unset("Name of the output to use as the score, if the teacher has several outputs.")
    batch: int = Field(64, ge=1, description="Pairs that are scored at once.")


class ArrayOptions(MineOptions):
    """Options of `extremis mine` for vectors in files."""

    HEADING: ClassVar[str] = "Vectors in files"
    positives: Url | None = _unset(
        "Positive (query, document) pairs, by key or row number: CSV, TSV, Parquet, qrels. Or DATA, if the vectors are "
        "those of DATA's training queries and labels: DATA's stream can then join the table."
    )
    metric: Literal["inner", "cosine"] | None = _unset(
        "Inner product, or cosine, which scales vectors to length 1. Default: inner."
    )
    fields: Fields | None = _unset(
        "Names of columns, e.g. key=id,vector=emb,text=body; labels.key=id applies to the documents only."
    )
    same_key: SameKey | None = _unset(
        "A document with the key of a query, unless it is a positive: never a negative (filter), or like others (keep, "
        "the default)."
    )
    query_texts: Url | None = _unset(
        "Parquet or Arrow file with keys and texts of QUERIES in the same row order, if QUERIES has no columns."
    )
    document_texts: Url | None = _unset(
        "Parquet or Arrow file with keys and texts of VECTORS in the same row order, if VECTORS has no columns."
    )


class ClusterOptions(DumpOptions, MemoryOptions):
    """Options of `extremis cluster`. None: use the trainer's request in the dump, or a default based on the sizes."""

    size: int | None = _unset("C, queries per cluster. Default: from the recipe.", ge=2)
    smallest: int | None = _positive("Smallest size that clusters can be halved to. Default: from the recipe.")
    part_rows: int | None = _positive("Number of queries that are clustered together. Default: from {memory}.")


class EmbedOptions(Options):
    """Options of `extremis embed` with a checkpoint."""

    what: Literal["queries", "labels"] = Field("queries", description="Texts to embed.")
    split: str = Field("test", description="Split of the queries.")
    step: int | None = _unset("Step of the checkpoint. Default: the best on validation, else the newest.", ge=0)
    dtype: Literal["float16", "float32"] = Field("float16", description="Number type of the embeddings.")
    batch: int = Field(1024, ge=1, description="Rows that are encoded at once.")


class EmbedTextsOptions(Options):
    """Options of `extremis embed` with any text model; `what` selects the labels or the queries of DATA."""

    what: Literal["queries", "labels", "documents"] | None = _unset(
        "Texts to embed; determines the prompt if the model has prompts. Default: queries of DATA."
    )
    prompt: str | None = _unset("Prompt for all texts: the name of one of the model's prompts, or the prompt itself.")
    fields: Fields | None = _unset("Names of the fields in INPUT, e.g. key=id,text=query.")
    encoding: Encoding | None = cast("Any", ShardOptions.model_fields["encoding"])
    split: str = cast("Any", EmbedOptions.model_fields["split"])
    dtype: Literal["float16", "float32"] = cast("Any", EmbedOptions.model_fields["dtype"])
    compute: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="Number type of matrix products. auto: bfloat16 if the processor supports it."
    )
    threads: int | None = _positive("Threads per worker. Default: all cores.")


def default_shards(rows: int, estimated_bytes: float, shard_bytes: int) -> int:
    """Return the number of shards of about `shard_bytes`: at least 4 for small data, so that every reader gets one."""
    return max(min(MIN_SHARDS, rows), -(-int(estimated_bytes) // shard_bytes), 1)


def shard_worker_bytes(shard_bytes: float) -> int:
    """Estimate the memory of a worker that decodes, sorts and encodes shards: it holds three copies of one."""
    return (300 << 20) + int(3 * shard_bytes)


def default_row_group_rows(rows: int) -> int:
    """Return the number of rows per row group; it is lower for small data, to have many row groups to permute."""
    return 1024 if rows < 1_000_000 else 8192
