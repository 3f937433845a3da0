"""What a finished run keeps of its miner: finished tables, and whatever another miner is still at work on."""

import math
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from extremis.retention import STAGING, find_unneeded, remove
from schemas import storage
from schemas.layout import MANIFEST, RunLayout, epoch_folder, staging
from schemas.manifest import Manifest, is_published, publish, write_file
from schemas.owners import building
from schemas.storage import join
from tests.owners import held_elsewhere


def build_and_die(out: str, table: str | None) -> None:
    """Be killed while the tables below `out` are built; `table` is one that is published."""
    with building(out, "mined") as build:
        storage.write_bytes(join(build.url, "part"), b"half")
        if table is not None:
            publish(table, Manifest(kind="negatives", shards=(write_file(table, "a", b"b"),)))
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("kind", ["negatives", "clusters"])
def test_finished_tables_stay_and_what_is_at_work(tmp_path: Path, kind: str) -> None:
    run = RunLayout(str(tmp_path))
    root = {"negatives": run.negatives_root, "clusters": run.clusters_root}[kind]
    of_epoch = [join(epoch_folder(root, epoch), *(["queries"] if kind == "clusters" else [])) for epoch in range(3)]
    table = of_epoch[0] if kind == "clusters" else join(of_epoch[0], "queries")
    for out, finished in zip(of_epoch[:2], (table, None), strict=True):
        process = multiprocessing.get_context("fork").Process(target=build_and_die, args=(out, finished))
        process.start()
        process.join()
        assert storage.list_names(staging(out))
    storage.write_bytes(join(staging(of_epoch[2]), "part"), b"more to come")
    with held_elsewhere(of_epoch[2]):
        remove(each for each in find_unneeded(run.root, older_than=-math.inf) if each.kind == STAGING)
        assert storage.list_names(staging(of_epoch[2])) == ["part"]
    assert is_published(table)
    files = [path for path in Path(root, "epoch-0000").rglob("*") if path.is_file()]
    assert sorted(files) == [Path(table, MANIFEST), Path(table, "a")]
    assert [Path(out).exists() for out in of_epoch] == [True, False, True]
