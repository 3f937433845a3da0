"""Options of clustering; everything else follows from the dump."""

from pydantic import Field

from pipelines.common.options import DumpOptions


class ClusterOptions(DumpOptions):
    """Options of `extremis cluster`. None: as the trainer requests in the dump, or from the sizes."""

    size: int | None = Field(default=None, ge=2, description="C, queries of a cluster, at most")
    smallest: int | None = Field(default=None, ge=1, description="clusters can be dealt in halves down to so many")
    part_rows: int | None = Field(default=None, ge=1, description="queries clustered in one piece; None: from memory")
