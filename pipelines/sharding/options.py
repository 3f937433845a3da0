"""What a user may choose about sharding; checked when made, so that nothing starts with a wrong value."""

from dataclasses import asdict, dataclass
from typing import Any

from pipelines.sharding import parse, tokenizer
from schemas.errors import InputError


@dataclass(frozen=True)
class ShardOptions:
    """Options of `extremis shard`. Raises InputError for a value that cannot be."""

    tokenizer: str = "train:30000"  # train:SIZE, a local directory, or a hub name
    max_tokens: int = 128
    text: str = "title+content"
    shards: int | None = None  # of each split; None: from its number of rows
    row_group_rows: int | None = None  # None: from the number of rows
    seed: int = 0  # salts the hash that shuffles keys over shards
    propensity_a: float | None = None
    propensity_b: float | None = None
    keep_text: bool = False
    validation_share: float = 0.0  # of the train points, cut out as split `val` by the hash of their keys
    max_reject_share: float = 0.0  # of the lines of a file; a rejected label always fails

    def __post_init__(self) -> None:
        tokenizer.parse_name(self.tokenizer)
        if self.text not in parse.TEXTS:
            raise InputError(f"text is one of {', '.join(parse.TEXTS)}; got {self.text!r}.")
        for name, value in (
            ("max_tokens", self.max_tokens),
            ("shards", self.shards),
            ("row_group_rows", self.row_group_rows),
        ):
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1; got {value}.")
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
        return {**asdict(self), "tokenizer": tokenizer_identity}
