"""Section `storage`: how the stream reads storage."""

from typing import Literal

from pydantic import Field, model_validator

from schemas.errors import InputError
from schemas.options import MOST_THREADS, Options
from schemas.sizes import parse_bytes


class Storage(Options):
    """Reading from storage. It changes no order and no number, so a resumed run may set it differently."""

    verify: bool = Field(True, description="checksums of what is read are verified")
    damaged: Literal["stop", "skip"] = Field("stop", description="a row group that does not match them: stop, or skip")
    fetch_threads: int = Field(
        16, ge=0, le=MOST_THREADS, description="requests to a remote store at a time, ahead of use; 0: none"
    )
    cache: str = Field("", description="a local directory of its own for what remote stores gave; empty: none")
    cache_size: str = Field("", description="what the cache may hold, e.g. '50GiB'")

    @property
    def cache_bytes(self) -> int:
        return parse_bytes(self.cache_size) if self.cache_size else 0

    @model_validator(mode="after")
    def _check(self) -> "Storage":
        try:
            size = self.cache_bytes
        except InputError as error:
            raise ValueError(f"storage.cache_size = {error}".rstrip(".")) from None
        if self.cache and not size:
            raise ValueError(f"storage.cache = {self.cache!r} needs a limit: set storage.cache_size, e.g. '50GiB'")
        if size and not self.cache:
            raise ValueError("storage.cache_size is the limit of a cache: set storage.cache to a local directory")
        if "://" in self.cache:
            raise ValueError(
                f"storage.cache = {self.cache!r}: a cache is a directory on a local disk, not a URL: name one"
            )
        return self
