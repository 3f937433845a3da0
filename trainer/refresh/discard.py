"""Refreshes of a run that begins anew: forgotten, for its next try may be another."""

from schemas import storage
from schemas.errors import TableError
from schemas.layout import CLUSTERS, RunLayout, epoch_of, numbered
from schemas.manifest import open_manifest, unpublish
from schemas.storage import join


def discard_refreshes(run: RunLayout) -> None:
    """Remove what a run decided and dumped, and the tables made of its dumps. Raises StorageError.

    Tables that somebody made for it of other embeddings stay.
    """
    for root in (run.negatives_root, run.clusters_root):
        for epoch in numbered(root):
            folder = epoch_of(root, epoch)
            for name in storage.list_names(folder):
                if _is_of_a_dump(join(folder, name)):
                    unpublish(join(folder, name))
                    storage.remove(join(folder, name), recursive=True)
    for place in (run.adoptions, run.dumps):
        storage.remove(place, recursive=True)


def _is_of_a_dump(url: str) -> bool:
    try:
        parameters = open_manifest(url).parameters
    except TableError:
        return False
    return parameters.get(CLUSTERS, parameters).get("epoch") is not None
