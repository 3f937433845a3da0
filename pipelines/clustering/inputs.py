"""Inputs of one clustering: query embeddings, and the queries that they embed, in whatever order these are."""

from dataclasses import dataclass

from pipelines.common.vectors import Source, open_source
from pipelines.options import ClusterOptions
from schemas.errors import InputError, TableError
from schemas.layout import CLUSTERS, DataLayout, RunLayout, numbered
from schemas.manifest import is_published
from schemas.table import Table

SOURCE = "queries"  # of a run: one split, which is what clusters are made of


@dataclass(frozen=True)
class ClusterInputs:
    """`source`: the rows to be reordered and their embeddings. `origin`: the digest of DATA's own table of them.

    `epoch` is the dump's, None without one; `out` is where the table goes.
    """

    source: Source
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
        """Parents by digest; `order` is the table in another cluster order whose rows these are, where there is one."""
        rows, embeddings = self.source.queries.digest, self.source.embeddings.digest
        return {SOURCE: self.origin, "embeddings": embeddings, **({} if rows == self.origin else {"order": rows})}


def open_clustering(data: str, run: str, epoch: int | None, options: ClusterOptions) -> ClusterInputs:
    """Open the dump of `epoch` (the newest by default), or the options' embeddings, with the rows that they embed.

    Raises InputError: no dump where one is needed, or nowhere to publish; TableError: unfinished, damaged, made from
    other data, or not aligned with its queries.
    """
    layout, queries, out = RunLayout(run), options.queries, options.out
    if queries is not None and epoch is not None:
        raise InputError(f"--epoch {epoch}: with --queries nothing is read from a dump. Leave one out.")
    if queries is None:
        epoch = _newest(run) if epoch is None else epoch
        queries = layout.embeddings(epoch, SOURCE)
    embeddings = Table.open(queries, "embeddings")
    rows, origin = _rows_of(data, layout, embeddings)
    use_from = options.for_epoch
    if use_from is None and epoch is not None:
        use_from = int(embeddings.parameters.get("use_from", epoch + 2))
    if out is None and use_from is None:
        raise InputError("--queries: say where the table goes, with --for-epoch E or --out URL.")
    out = out or layout.clusters(use_from or 0, SOURCE)
    return ClusterInputs(open_source(SOURCE, rows, embeddings), origin, epoch, use_from, out)


def dumps_for_clusters(run: str) -> dict[int, str]:
    """Map epoch to digest of the embeddings, for every dump of `run` that is to be clustered, oldest first."""
    layout = RunLayout(run)
    digests: dict[int, str] = {}
    for epoch in numbered(layout.dumps):
        embeddings = Table.find(layout.embeddings(epoch, SOURCE), "embeddings")
        if embeddings is not None and CLUSTERS in embeddings.parameters:
            digests[epoch] = embeddings.digest
    return digests


def _newest(run: str) -> int:
    layout = RunLayout(run)
    epochs = [epoch for epoch in numbered(layout.dumps) if is_published(layout.embeddings(epoch, SOURCE))]
    if not epochs:
        raise InputError(
            f"{layout.dumps}: no embeddings of queries to cluster. A run with order.cluster > 1 writes the first at "
            "the end of the epoch two before refresh.start; is the path of the run right? Or give --queries URL, by "
            "`extremis embed DATA RUN URL --split train`."
        )
    return epochs[-1]


def _rows_of(data: str, layout: RunLayout, embeddings: Table) -> tuple[Table, str]:
    """Return the rows of `embeddings`, DATA's or the run's in cluster order; and the digest of DATA's.

    Raises TableError where they are neither.
    """
    rows = Table.open(DataLayout(data).queries(str(embeddings.parameters.get("split", "train"))), "queries")
    embedded = embeddings.parents.get("queries")
    if embedded == rows.digest:
        return rows, rows.digest
    for number in reversed(numbered(layout.clusters_root)):
        clustered = Table.find(layout.clusters(number, SOURCE), "queries")
        if clustered and clustered.digest == embedded and clustered.parents.get("queries") == rows.digest:
            return clustered, rows.digest
    raise TableError(
        f"{embeddings.url}: embeddings of other queries (digest {str(embedded)[:12]}…) than {rows.url} (digest "
        f"{rows.digest[:12]}…) or any table under {layout.clusters_root}. Point at the data and the run "
        "that they were made from."
    )
