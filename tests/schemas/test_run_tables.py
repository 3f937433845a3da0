"""Tables of a run: finished ones, newest first."""

from schemas import storage
from schemas.layout import RunLayout
from schemas.manifest import Manifest, publish
from schemas.table import run_tables

RUN = RunLayout("memory://run-tables")


def test_finished_tables_come_newest_first() -> None:
    for epoch, name in ((2, "queries"), (10, "labels"), (10, "queries"), (4, "labels")):
        publish(RUN.negatives(epoch, name), Manifest(kind="negatives"))
    storage.write_bytes(f"{RUN.negatives(12, 'queries')}/part-00000-of-00001.parquet", b"of a miner at work")
    storage.write_bytes(f"{RUN.negatives_root}/epoch-0010/.claim", b"")
    found = [(epoch, source) for epoch, source, _ in run_tables(RUN)]
    assert found == [(10, "labels"), (10, "queries"), (4, "labels"), (2, "queries")]
    assert [(each.epoch, each.table.url) for each in run_tables(RUN, "queries", before=10)] == [
        (2, RUN.negatives(2, "queries"))
    ]
    assert not list(run_tables(RunLayout("memory://no-run")))
