"""What every section of a recipe is: frozen, and without keys that it does not know."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")
