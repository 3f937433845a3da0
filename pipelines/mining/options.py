"""What a user may set about mining; everything else follows from the dump."""

from pydantic import BaseModel, ConfigDict, Field

AUTO = "auto"
EXACT = "exact"


class MineOptions(BaseModel):
    """How a negative table is made. None: as the trainer asked in the dump, or from the sizes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int | None = Field(default=None, ge=1, description="K, hard negatives a query")
    index: str | None = Field(default=None, description="auto, exact, or a Faiss factory string")
    block_rows: int | None = Field(default=None, ge=1, description="most vectors in one Faiss index")
    nprobe: int | None = Field(default=None, ge=1, description="inverted lists searched a query")
    tasks_per_block: int = Field(default=1, ge=1, description="work items a block; each builds its index")
    query_batch: int = Field(default=4096, ge=1, description="least queries a search call")
    audit_queries: int = Field(default=1000, ge=0, description="rows also searched exactly, for recall")
    threads: int | None = Field(default=None, ge=1, description="Faiss threads a worker")
    seed: int = Field(default=0, ge=0, description="of index training and of the audited rows")
