"""Views: shards of other tables as a table has them, with ids of its own and patches over rows and columns."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

_LONGEST = 4096  # characters of a place


def _require_place(place: str) -> str:
    if not place or len(place) > _LONGEST or "\0" in place or "\\" in place:
        raise ValueError(f"{place[:60]!r} is no place of a table")
    return place


Place = Annotated[str, AfterValidator(_require_place)]  # relative to the table that names it, or a URL


class Patch(BaseModel):
    """A small Parquet file that lies over a shard."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: Place
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class View(BaseModel):
    """Shard of the table `table`, whose file has `rows` rows in row groups of `row_group_rows`.

    `first`: id of its first row here; ids count up by one. `gone`: positions in the file (`row`) of rows left out.
    `columns`: columns in place of the file's, or besides, for all its rows. `changed`: positions (`row`) of rows, and
    columns in place of theirs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    table: Place
    part: str
    first: int = Field(ge=0)
    rows: int = Field(ge=0)
    row_group_rows: int = Field(ge=1)
    gone: Patch | None = None
    columns: Patch | None = None
    changed: Patch | None = None

    @property
    def patches(self) -> tuple[Patch, ...]:
        """All patches."""
        return tuple(patch for patch in (self.gone, self.columns, self.changed) if patch is not None)
