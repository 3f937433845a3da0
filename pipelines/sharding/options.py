"""Options of sharding."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from pipelines.formats.base import Text
from pipelines.sharding import tokenizer
from schemas.layout import check_name
from schemas.options import Options
from schemas.shard_files.shards import Sink

_NOT_RECORDED = {"exchange", "onto", "part", "again", "labels"}  # without effect, or recorded with the version


class ShardOptions(Options):
    """Options of `extremis shard`."""

    tokenizer: str = Field(default="train:30000", description="train:SIZE, a local directory, or a hub name")
    max_tokens: int | None = Field(default=None, ge=1, description="tokens of a text, at most; None: from the texts")
    text: Text = Field(default="title+content", description="parts of a record that make its text")
    shards: int | None = Field(default=None, ge=1, description="shards of each split; None: from `shard_bytes`")
    shard_bytes: int = Field(default=128 << 20, ge=1, description="about so many bytes a shard, by an estimate")
    row_group_rows: int | None = Field(default=None, ge=1, description="None: from the number of rows")
    seed: int = Field(default=0, ge=0, lt=1 << 64, description="salts the hash that shuffles keys over shards")
    propensity_a: float | None = None
    propensity_b: float | None = None
    keep_text: bool = Field(default=False, description="store the queries' text, too")
    validation_share: float = Field(default=0.0, ge=0, lt=1, description="of train, cut out as split `val` by key")
    test_share: float = Field(default=0.0, ge=0, lt=1, description="of train, cut out as split `test` by key")
    max_reject_share: float = Field(
        default=0.001, ge=0, le=1, description="of a table's rows, and of its label mentions; none of XC's labels"
    )
    tokenizer_texts: int = Field(default=200_000, ge=1, description="texts that train:SIZE learns from, by key")
    format: str | None = Field(default=None, description="the input form; None: recognised")
    fields: str | None = Field(default=None, description="names of fields in data with string keys: key=id,text=query")
    sink: Sink = Field(default="parquet", description="files of the queries")
    exchange: Literal["files", "shuffle"] | None = Field(
        default=None, description="way of bulk data between stages; None: as suits the runner"
    )

    onto: str | None = Field(default=None, description="a data set that this one adds to, and names")
    part: str | None = Field(default=None, description="name of what is added; None: the number of the version")
    again: Literal["replace", "keep"] = Field(
        default="replace", description="of points whose key comes again: the older one goes, or both stay"
    )
    labels: Literal["all", "new"] | None = Field(
        default=None, description="what the input's labels are: all that there are from now on, or those that are new"
    )

    @field_validator("tokenizer")
    @classmethod
    def _names_a_tokenizer(cls, name: str) -> str:
        tokenizer.parse_name(name)
        return name

    @field_validator("part")
    @classmethod
    def _names_a_part(cls, name: str | None) -> str | None:
        return name if name is None else check_name("--part", name)

    @model_validator(mode="after")
    def _both_propensities(self) -> Self:
        if (self.propensity_a is None) != (self.propensity_b is None):
            raise ValueError(
                f"propensities need both A and B; got A={self.propensity_a}, B={self.propensity_b}. "
                "Give both (0.55 and 1.5 for most data sets), or neither to store them as unknown"
            )
        return self

    @model_validator(mode="after")
    def _leaves_train(self) -> Self:
        if self.validation_share + self.test_share >= 1:
            raise ValueError(
                f"validation_share = {self.validation_share:g} and test_share = {self.test_share:g} leave no train"
            )
        return self

    @model_validator(mode="after")
    def _goes_on(self) -> Self:
        if self.onto is None and (self.labels or self.again != "replace"):
            raise ValueError("--labels and --again are about a version: name the data set that it adds to with --onto")
        return self

    def recorded(self, tokenizer_identity: str) -> dict[str, Any]:
        """Return the options as the manifest keeps them, without paths: the same input gives the same manifest."""
        unstated = {"test_share"} if not self.test_share else set()  # data sets of earlier versions have no such option
        return {**self.model_dump(exclude=_NOT_RECORDED | unstated), "tokenizer": tokenizer_identity}
