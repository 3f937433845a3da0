"""The frozen text model that computed the dense vectors of a data set, as recorded in manifests."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from schemas.errors import TableError

DENSE, DENSE_MODEL = "dense", "dense_model"  # parameters of DATA and of exports: the dimension d, and the model


class TextEmbedder(NamedTuple):
    """Specification of an embedder: a model's name for `TextFiles`, the digest of its files, a dtype, and a prompt."""

    name: str
    digest: str
    compute: str
    prompt: str


@dataclass(frozen=True)
class DenseModel:
    """Model that computed the dense vectors; `queries` and `labels`: the prompts for query texts and label texts."""

    name: str
    digest: str
    queries: str
    labels: str
    compute: str

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any], url: str) -> "DenseModel | None":
        """Read the model from the manifest at `url`; None if the user supplied the vectors. Raises TableError."""
        stated = parameters.get(DENSE_MODEL)
        if stated is None:
            return None
        names = {field.name for field in fields(cls)}
        if not isinstance(stated, Mapping) or {*stated} != names or not {*map(type, stated.values())} <= {str}:
            raise TableError(f"{url}: the parameter {DENSE_MODEL!r} lacks {', '.join(sorted(names))}.")
        return cls(**stated)

    def as_json(self) -> dict[str, str]:
        """Return the fields for a manifest."""
        return asdict(self)

    def identity(self) -> dict[str, str]:
        """Return the fields that determine the vectors: all fields except the name."""
        return {name: value for name, value in self.as_json().items() if name != "name"}

    def embedder(self, what: str) -> TextEmbedder:
        """Return the embedder for the texts of `what`, which is queries or labels."""
        return TextEmbedder(self.name, self.digest, self.compute, getattr(self, what))
