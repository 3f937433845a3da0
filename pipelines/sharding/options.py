"""What a user may choose about sharding; checked when made, so that nothing starts with a wrong value."""

from dataclasses import asdict, dataclass
from typing import Any, get_args

from pipelines.formats.base import TEXTS
from pipelines.sharding import tokenizer
from schemas.errors import InputError
from schemas.shard_files.shards import Sink

_NOT_RECORDED = ("exchange",)  # what cannot change the data set


@dataclass(frozen=True)
class ShardOptions:
    """Options of `extremis shard`. Raises InputError for a value that cannot be."""

    tokenizer: str = "train:30000"  # train:SIZE, a local directory, or a hub name
    max_tokens: int = 128
    text: str = "title+content"
    shards: int | None = None  # of each split; None: from `shard_bytes`
    shard_bytes: int = 128 << 20  # about so many bytes a shard, by an estimate from rows, keys, texts and labels
    row_group_rows: int | None = None  # None: from the number of rows
    seed: int = 0  # salts the hash that shuffles keys over shards
    propensity_a: float | None = None
    propensity_b: float | None = None
    keep_text: bool = False
    validation_share: float = 0.0  # of the train points, cut out as split `val` by the hash of their keys
    max_reject_share: float = 0.001  # of a table's rows, and of its label mentions; of XC's labels always none
    tokenizer_texts: int = 1_000_000  # texts that train:SIZE learns from, chosen by the hash of their keys
    format: str | None = None  # None: found out
    fields: str | None = None  # what fields are called in data with string keys: key=id,text=query
    sink: Sink = "parquet"  # of the queries
    exchange: str | None = None  # how bulk data goes between stages; None: as suits the runner

    def __post_init__(self) -> None:
        tokenizer.parse_name(self.tokenizer)
        for name, value, known in (("text", self.text, TEXTS), ("sink", self.sink, get_args(Sink))):
            if value not in known:
                raise InputError(f"{name} is one of {', '.join(known)}; got {value!r}.")
        for name, number in (
            ("max_tokens", self.max_tokens),
            ("shards", self.shards),
            ("shard_bytes", self.shard_bytes),
            ("row_group_rows", self.row_group_rows),
            ("tokenizer_texts", self.tokenizer_texts),
        ):
            if number is not None and number < 1:
                raise InputError(f"{name} must be at least 1; got {number}.")
        if not 0 <= self.seed < 1 << 64:
            raise InputError(f"seed must be in [0, 2^64); got {self.seed}.")
        if not 0 <= self.max_reject_share <= 1:
            raise InputError(f"max_reject_share is a share in [0, 1]; got {self.max_reject_share}.")
        if not 0 <= self.validation_share < 1:
            raise InputError(f"validation_share is a share in [0, 1); got {self.validation_share}.")
        if (self.propensity_a is None) != (self.propensity_b is None):
            raise InputError(
                f"propensities need both A and B; got A={self.propensity_a}, B={self.propensity_b}. "
                "Give both (0.55 and 1.5 for most data sets), or neither to store them as unknown."
            )

    def recorded(self, tokenizer_identity: str) -> dict[str, Any]:
        """The options as the manifest keeps them: no path, so that the same input gives the same manifest anywhere."""
        kept = {name: value for name, value in asdict(self).items() if name not in _NOT_RECORDED}
        return {**kept, "tokenizer": tokenizer_identity}
