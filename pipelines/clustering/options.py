"""What a user may set about clustering; everything else follows from the dump."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from schemas.errors import InputError
from schemas.sizes import parse_bytes

DEFAULT_MEMORY = 4 << 30


class ClusterOptions(BaseModel):
    """How queries are clustered. None: as the trainer asked in the dump, or from the sizes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int | None = Field(default=None, ge=2, description="C, queries of a cluster, at most")
    smallest: int | None = Field(default=None, ge=1, description="clusters can be dealt in halves down to so many")
    queries: str | None = Field(default=None, description="a table of `extremis embed` instead of the dump's")
    for_epoch: int | None = Field(default=None, ge=0, description="the first epoch that trains on the table")
    out: str | None = Field(default=None, description="publish at this prefix instead of the run's clusters")
    memory: int = Field(default=DEFAULT_MEMORY, ge=1, description="bytes that one worker process may use")
    part_rows: int | None = Field(default=None, ge=1, description="queries clustered in one piece; None: from memory")
    seed: int = Field(default=0, ge=0)
    overwrite: bool = Field(default=False, description="replace a table made with other options")

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value

    @classmethod
    def of(cls, **chosen: Any) -> "ClusterOptions":
        """Options by name. Raises InputError that names the first that is wrong."""
        try:
            return cls(**chosen)
        except ValidationError as error:
            first = error.errors()[0]
            name = "--" + ".".join(str(part) for part in first["loc"]).replace("_", "-")
            raise InputError(f"{name}: {first['msg']}; got {first['input']!r}.") from None
