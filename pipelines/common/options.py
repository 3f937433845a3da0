"""What a user may set about any pipeline that works on a dump."""

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from schemas.errors import InputError
from schemas.sizes import parse_bytes


class DumpOptions(BaseModel):
    """Options by name, checked; each pipeline adds its own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    queries: str | None = Field(
        default=None, description="a table of `extremis embed` instead of the dump's embeddings"
    )
    memory: int = Field(default=4 << 30, ge=1, description="bytes that one worker process may use")
    seed: int = Field(default=0, ge=0, description="of everything that is drawn")
    for_epoch: int | None = Field(default=None, ge=0, description="the first epoch that trains on the table")
    out: str | None = Field(default=None, description="publish under this prefix instead of in the run")
    overwrite: bool = Field(default=False, description="replace a table made with other options")

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        return parse_bytes(value) if isinstance(value, str) else value

    @classmethod
    def of(cls, **chosen: Any) -> Self:
        """Options by name. Raises InputError that names the first that is wrong."""
        try:
            return cls(**chosen)
        except ValidationError as error:
            first = error.errors()[0]
            name = "--" + ".".join(str(part) for part in first["loc"]).replace("_", "-")
            raise InputError(f"{name}: {first['msg']}; got {first['input']!r}.") from None
