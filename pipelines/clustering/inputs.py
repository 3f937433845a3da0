"""Inputs of one clustering run: query embeddings, and the table of these queries in DATA's order or cluster order."""

from dataclasses import dataclass

from pipelines.common.vectors import EmbeddedSource, open_source
from pipelines.options import ClusterOptions
from schemas.errors import InputError, TableError
from schemas.layout import CLUSTERS, DataLayout, RunLayout, list_numbers
from schemas.manifest import is_published
from schemas.table import Table

SOURCE = "queries"  # a run clusters one split only


@dataclass(frozen=True)
class ClusterInputs:
    """`source`: the rows to be reordered and their embeddings. `origin`: the digest of DATA's table of these rows.

    `epoch`: the epoch of the dump, or None. `out`: the URL of the table.
    """

    source: EmbeddedSource
    origin: str
    epoch: int | None
    use_from: int | None
    out: str

    @property
    def name(self) -> str:
        """Name of the dump in messages."""
        return f"epoch {self.epoch}" if self.epoch is not None else "embeddings"

    @property
    def requested(self) -> dict[str, int]:
        """The sizes that the trainer requests: `size` and `smallest`."""
        sizes: dict[str, int] = self.source.embeddings.parameters.get(CLUSTERS, {})
        return sizes

    @property
    def parents(self) -> dict[str, str]:
        """Digests of the parent tables; `order` is an earlier table in cluster order, if the rows come from it."""
        rows, embeddings = self.source.queries.digest, self.source.embeddings.digest
        return {SOURCE: self.origin, "embeddings": embeddings, **({} if rows == self.origin else {"order": rows})}


def open_clustering(data: str, run: str, epoch: int | None, options: ClusterOptions) -> ClusterInputs:
    """Open the dump of `epoch` (the newest by default), or the embeddings in `options`, and the table of the queries.

    Raises InputError if there is no dump or no location for the new table; TableError if the embeddings are unfinished,
    damaged, computed from other data, or not aligned with the queries.
    """
    layout, queries, out = RunLayout(run), options.queries, options.out
    if queries is not None and epoch is not None:
        raise InputError(
            f"--epoch {epoch} chooses a dump, but --queries replaces the dump. Leave out --epoch or --queries."
        )
    if queries is None:
        epoch = _newest(run) if epoch is None else epoch
        queries = layout.embeddings(epoch, SOURCE)
    embeddings = Table.open(queries, "embeddings")
    rows, origin = _rows_of(data, layout, embeddings)
    use_from = options.for_epoch
    if use_from is None and epoch is not None:
        use_from = int(embeddings.parameters.get("use_from", epoch + 2))
    if out is None and use_from is None:
        raise InputError("--queries needs a location for the table: give --for-epoch E or --out URL.")
    out = out or layout.clusters(use_from or 0, SOURCE)
    return ClusterInputs(open_source(SOURCE, rows, embeddings), origin, epoch, use_from, out)


def dumps_for_clusters(run: str) -> dict[int, str]:
    """Map the epoch of every dump of `run` that requests clusters to the digest of its embeddings, oldest first."""
    layout = RunLayout(run)
    digests: dict[int, str] = {}
    for epoch in list_numbers(layout.dumps):
        embeddings = Table.find(layout.embeddings(epoch, SOURCE), "embeddings")
        if embeddings is not None and CLUSTERS in embeddings.parameters:
            digests[epoch] = embeddings.digest
    return digests


def _newest(run: str) -> int:
    layout = RunLayout(run)
    epochs = [epoch for epoch in list_numbers(layout.dumps) if is_published(layout.embeddings(epoch, SOURCE))]
    if not epochs:
        raise InputError(
            f"{layout.dumps}: no query embeddings to cluster. A run with order.cluster > 1 writes the first embeddings "
            "two epochs before refresh.start. Check the path of the run, or make embeddings with `extremis embed "
            "DATA RUN URL --split train`, and give --queries URL."
        )
    return epochs[-1]


def _rows_of(data: str, layout: RunLayout, embeddings: Table) -> tuple[Table, str]:
    """Return the table of the embedded rows (DATA's, or the run's in cluster order) and the digest of DATA's table.

    Raises TableError if the embeddings belong to neither table.
    """
    rows = Table.open(DataLayout(data).queries(str(embeddings.parameters.get("split", "train"))), "queries")
    embedded = embeddings.parents.get("queries")
    if embedded == rows.digest:
        return rows, rows.digest
    for number in reversed(list_numbers(layout.clusters_root)):
        clustered = Table.find(layout.clusters(number, SOURCE), "queries")
        if clustered and clustered.digest == embedded and clustered.parents.get("queries") == rows.digest:
            return clustered, rows.digest
    raise TableError(
        f"{embeddings.url}: these embeddings belong to queries with digest {str(embedded)[:12]}…, but {rows.url} has "
        f"digest {rows.digest[:12]}…, and no table under {layout.clusters_root} matches. Give the data and the run "
        "that the embeddings were computed from."
    )
