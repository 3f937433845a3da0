"""Removal of refreshes that nobody will use: all of a run that begins anew, unfinished tables of one that has ended."""

from schemas import storage
from schemas.errors import TableError
from schemas.layout import CLUSTERS, RunLayout, epoch_of, numbered
from schemas.manifest import unpublish
from schemas.owners.build import clean_up
from schemas.storage import join
from schemas.table import Table


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


def discard_unfinished_tables(run: RunLayout) -> None:
    """Remove the parts of tables whose miners ended before they were finished. Raises StorageError."""
    # Negative tables of one dump have one owner together.
    outputs = [(epoch_of(run.negatives_root, epoch), "mined") for epoch in numbered(run.negatives_root)]
    outputs += [(run.clusters(epoch, "queries"), "clustered") for epoch in numbered(run.clusters_root)]
    for out, doing in outputs:
        clean_up(out, doing)
        if not storage.list_names(out):
            storage.remove(out, recursive=True)


def _is_of_a_dump(url: str) -> bool:
    try:
        parameters = Table.open(url).parameters
    except TableError:
        return False
    return parameters.get(CLUSTERS, parameters).get("epoch") is not None
