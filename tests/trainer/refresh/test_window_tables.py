"""Tables of hard negatives of a window: one a part, mined of the window's rows alone, and joined row by row."""

from pathlib import Path

import numpy as np
import pytest

from pipelines.mine import MineOptions, mine
from schemas.errors import InputError
from schemas.layout import DataLayout, RunLayout
from schemas.shard_files.parquet import matrix_column
from schemas.table import Table
from tests.pipelines.test_versions import SEQUENCE, make, rows_of
from tests.training import silent, train, with_sections
from trainer.checkpoints import latest_checkpoint
from trainer.loop import EpochReport, Trainer
from trainer.setup import require_whole_epochs

WINDOW: dict[str, dict] = {
    "data": {"parts": "last 2", "label_texts": True},
    "order": {"batch": 4, "streams": 2, "window_groups": 2, "threads": 0},
    "encoder": {"dimension": 4, "buckets": 64, "dropout": 0.0},
    "negatives": {"random": 6, "hard": 3},
    "refresh": {"start": 2, "every": 1, "stale": "stop"},
    "train": {"epochs": 3},
    "logging": {"tensorboard": False},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make(tmp_path_factory.mktemp("tables"), SEQUENCE)[-1]


def test_parts_of_a_window_have_tables_of_their_own(data: str, tmp_path: Path) -> None:
    run, layout = str(tmp_path / "run"), DataLayout(data)

    def on_epoch(report: EpochReport) -> None:
        if report.epoch == 0:
            trainer.context.writer.wait()  # the dump, which is written while training goes on
            mine(data, run, 0, MineOptions(index="exact", audit_queries=0))

    trainer = Trainer.start(data, run, with_sections(WINDOW, {}), silent)
    train(trainer, on_epoch=on_epoch)
    names = [source.name for source in trainer.context.sources]
    assert names == ["queries-0002", "queries-0003", "labels"]
    points = {row["query_id"]: row for row in rows_of(layout.queries("train"))}
    part = Table.open(layout.queries("train")).parts[0]
    seen = []
    vectors = np.concatenate([matrix_column(rows, "vector") for rows in all_rows(RunLayout(run).vectors(0))])
    for name in names[:2]:
        tables = [all_rows(url) for url in (RunLayout(run).negatives(2, name), RunLayout(run).embeddings(0, name))]
        for negatives, embedded in zip(*tables, strict=True):
            ids = negatives["query_id"].to_pylist()
            assert embedded["query_id"].to_pylist() == ids
            scores = matrix_column(embedded, "vector").astype(np.float32) @ vectors.T
            for row, hard, score in zip(ids, matrix_column(negatives, "label_ids"), scores, strict=True):
                score[points[row]["label_ids"]] = -np.inf
                assert set(hard[hard >= 0].tolist()) == {*np.argsort(-score)[:3].tolist()}
            seen += ids
    assert seen == list(range(part.rows, len(points)))
    assert latest_checkpoint(RunLayout(run)) is not None


def all_rows(url: str) -> list:
    return list(Table.open(url).batches())


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"data": {"replay": 0.5}}, "leaves rows out of an epoch"),
        ({"method": "ngame", "order": {"cluster": 2}, "data": {"label_texts": False}}, "all rows of a split"),
    ],
)
def test_what_leaves_rows_out_has_no_tables(sections: dict[str, dict], message: str) -> None:
    with pytest.raises(InputError, match=message):
        require_whole_epochs(with_sections(WINDOW, sections))
