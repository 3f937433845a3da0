"""Interface of an open shard of any file format."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import pyarrow as pa

from schemas.mapped import MappedFile
from schemas.shard_files.ranges import FetchedRanges, Range, Source


class OpenShard(AbstractContextManager["OpenShard"]):
    """An open shard; any number of threads may read its row groups.

    Damaged bytes raise ValueError or an error of Arrow.
    """

    schema_arrow: pa.Schema
    num_row_groups: int
    memory: int  # approximate bytes of memory while the shard is open

    def __init__(self, source: Source) -> None:
        self._source, self.local = source, isinstance(source, MappedFile)

    def ranges(self, group: int, columns: Sequence[str] | None = None) -> list[Range]:
        """Return the byte ranges that `read_row_group` reads; none by default: opening the shard reads all bytes."""
        return []

    def fetch(self, group: int, columns: Sequence[str] | None = None) -> FetchedRanges:
        """Fetch the bytes of `columns` of row group `group`."""
        return FetchedRanges.fetch(self._source, self.ranges(group, columns))

    @abstractmethod
    def read_row_group(
        self, group: int, columns: Sequence[str] | None = None, pieces: FetchedRanges | None = None
    ) -> pa.Table:
        """Read the existing `columns` of row group `group`, from `pieces` if they were fetched before."""

    def close(self) -> None:
        """Close open files; by default there are none."""

    def __exit__(self, *exception: object) -> None:
        self.close()
