"""Options of every pipeline that works on a dump."""

from collections.abc import Callable
from typing import Any, Self

from pydantic import Field, field_validator

from schemas.options import Options
from schemas.sizes import parse_bytes


class DumpOptions(Options):
    """Options that mining and clustering share."""

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

    def for_workers(self, place: Callable[[str], str]) -> Self:
        """Return these options with `place` of each URL that workers get."""
        urls = {name: getattr(self, name, None) for name in ("queries", "out", "vectors", "keep_index")}
        return self.model_copy(update={name: place(url) for name, url in urls.items() if url is not None})
