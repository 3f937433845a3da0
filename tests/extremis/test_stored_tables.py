"""Tables of an earlier release (commit eaa79f8's format, with `manifest.json`): they open, and are read as before.

`stored/` has a data set, a version onto it, a run on the first with a checkpoint, and its export.
"""

import shutil
from pathlib import Path

import pytest

import extremis
from pipelines.shard import shard
from schemas.layout import DataLayout
from schemas.table import Table
from schemas.version import open_data
from tests.command import call
from tests.pipelines.test_versions import OPTIONS, SEQUENCE, contents, rows_of, write

STORED = Path(__file__).parent / "stored"
P_AT_1 = 41.67
ANSWER = [("l1", -0.36348), ("l5", -0.57871), ("l3", -1.36615)]  # of "t3 u9", by the release that wrote the export


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(STORED, tmp_path_factory.mktemp("earlier") / "stored"))


def test_they_are_read_and_nothing_is_written(stored: Path) -> None:
    before = contents(str(stored))
    for data in ("data0", "data1"):
        assert open_data(str(stored / data))[0].digest == Table.open(str(stored / data), "data").digest
        assert call("inspect", stored / data, "--verify").status == 0
    assert [part.rows for part in Table.open(str(stored / "data1/queries/train")).parts] == [8, 12]
    assert call("data", "list", stored, "--json").json["versions"][1]["fault"] is None
    assert call("inspect", stored / "run").status == 0
    answer = extremis.load(stored / "export").predict(["t3 u9"], k=3)[0]
    assert [(label.key, pytest.approx(label.score, abs=1e-4)) for label in answer.labels] == ANSWER
    assert contents(str(stored)) == before


def test_a_run_is_evaluated(stored: Path, tmp_path: Path) -> None:
    run = shutil.copytree(stored / "run", tmp_path / "run")
    done = call("evaluate", stored / "data0", run, "--split", "train", "--json")
    assert done.json["metrics"]["P@1"] == pytest.approx(P_AT_1, abs=0.01)


def test_a_version_goes_on_from_them_as_from_new_ones(stored: Path, tmp_path: Path) -> None:
    made = []
    for root in (stored, tmp_path):
        data = [str(root / f"data{number}") for number in range(3)]
        for number in range(3):
            if not Path(data[number]).exists():
                raw = write(root / f"raw{number}", SEQUENCE[number])
                onto = data[number - 1] if number else None
                shard(raw, data[number], OPTIONS.model_copy(update={"onto": onto}))
        layout = DataLayout(data[2])
        made.append([rows_of(layout.queries("train")), rows_of(layout.labels)])
    assert made[0] == made[1]
