"""Options of mining; everything else follows from the dump."""

from typing import Literal

from pydantic import Field

from pipelines.common.options import DumpOptions
from schemas.options import DEVICES


class MineOptions(DumpOptions):
    """Options of `extremis mine`. None: as the trainer requests in the dump, or from the sizes."""

    # The vectors to search.
    by: Literal["classifier", "labels"] | None = Field(
        default=None, description="score by w_l or by label embeddings; None: as the trainer requests, or by w_l"
    )
    vectors: str | None = Field(default=None, description="a table of vectors instead of the dump's")
    # The negatives of a row.
    width: int | None = Field(default=None, ge=1, description="K, hard negatives a query (of each label range)")
    ranges: int = Field(default=1, ge=1, description="equal label ranges that contribute K columns each")
    skip_top: int = Field(default=0, ge=0, description="best-ranked negatives that are left out")
    window: int | None = Field(default=None, ge=1, description="negatives come from ranks [skip_top, window)")
    margin: float | None = Field(default=None, ge=0, description="keep scores below the weakest positive's minus this")
    relative_margin: float | None = Field(default=None, ge=0, description="the same, as a share of that score's size")
    # The search.
    index: str | None = Field(default=None, description="auto, exact, or a Faiss factory string")
    nprobe: int | None = Field(default=None, ge=1, description="inverted lists searched a query; None: tuned")
    ef_search: int | None = Field(default=None, ge=1, description="breadth of a graph's search; None: tuned")
    refine: int | None = Field(default=None, ge=1, description="fetch K times this and score exactly; None: tuned")
    target_recall: float = Field(default=0.95, gt=0, le=1, description="what nprobe, ef_search and refine are tuned to")
    block_rows: int | None = Field(default=None, ge=1, description="most vectors in one Faiss index; None: from memory")
    query_batch: int | None = Field(default=None, ge=1, description="queries searched at a time; None: from memory")
    tasks_per_block: int = Field(default=1, ge=1, description="work items a block; each builds its index")
    threads: int | None = Field(default=None, ge=1, description="Faiss threads a worker")
    device: str = Field(default="auto", pattern=DEVICES, description="where exact search runs; each worker opens it")
    audit_queries: int | None = Field(default=None, ge=0, description="rows also searched exactly; None: 200 to 1000")
    # The output.
    keep_index: str | None = Field(default=None, description="keep every block's index under this prefix")
