"""Real processes under `torchrun`: their parts are the global batches, and a kill -9 loses and repeats nothing."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.errors import InputError
from schemas.layout import RunLayout
from schemas.manifest import open_manifest
from tests.builders import SmallData, build_data, build_negatives
from tests.command import ROOT, environment
from tests.laws import concatenate
from tests.rank import RECIPE, Reading, batches_of, digest_of
from trainer.refresh.adoption import adopt
from trainer.stream import JoinedStream, open_sources, ranks_of_environment

EPOCHS = 3


@pytest.fixture
def reading(tmp_path: Path) -> Reading:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "epochs").write_text(str(EPOCHS))
    return Reading(str(tmp_path / "data"), str(tmp_path / "run"), str(tmp_path / "out"), save_every=3)


@pytest.fixture
def data(reading: Reading) -> SmallData:
    """A data set with a table for epoch 2."""
    data = build_data(reading.data, rows={"train": 150})
    for name, points in (("queries", data.points["train"]), ("labels", data.label_points)):
        table = open_manifest(data.layout.labels if name == "labels" else data.layout.queries("train"))
        build_negatives(RunLayout(reading.run).negatives(2, name), table, points.positives, data.labels, 3)
    return data


def torchrun(reading: Reading, folder: Path) -> int:
    place = reading.write(folder / "reading.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=0"]
    done = subprocess.run(
        [*command, "-m", "tests.rank", place],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        timeout=200,
        check=False,
    )
    return done.returncode


@pytest.mark.slow
def test_two_ranks_of_which_one_is_killed_read_the_global_batches(
    reading: Reading, data: SmallData, tmp_path: Path
) -> None:
    assert torchrun(replace(reading, kill=(1, 2, 2)), tmp_path) != 0
    out = Path(reading.out)
    killed, _ = batches_of(out, 1)
    assert max(killed) == (2, 1)
    assert torchrun(reading, tmp_path) == 0
    dealt = [batches_of(out, rank) for rank in range(2)]
    assert dealt[1][1] == 2  # the killed rank read again what came after its last state, to the same bytes
    expected: list[dict[tuple[int, int], str]] = [{}, {}]
    for epoch in range(EPOCHS):
        _, sources = adopt(RunLayout(reading.run), RECIPE, open_sources(data.layout, "train", True), epoch, print)
        assert (sources[0].negatives is not None) == (epoch == 2)
        options = {"batch": reading.batch, "streams": reading.streams, "window_groups": 2}
        whole, *parts = (JoinedStream(sources, data.labels, **options, **of) for of in ({}, rank(0), rank(1)))
        for stream in (whole, *parts):
            stream.set_epoch(epoch)
        for batch, *of_ranks in zip(whole, *parts, strict=True):
            assert digest_of(concatenate(of_ranks)) == digest_of(batch)
            for digests, part in zip(expected, of_ranks, strict=True):
                digests[epoch, batch.step] = digest_of(part)
    assert [digests for digests, _ in dealt] == expected


def rank(number: int) -> dict[str, int]:
    return {"rank": number, "ranks": 2}


def test_ranks_are_what_the_launcher_says() -> None:
    assert ranks_of_environment({}) == (0, 1)
    assert ranks_of_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}) == (3, 4)


@pytest.mark.parametrize(
    ("rank", "ranks"), [("0", None), (None, "2"), ("2", "2"), ("-1", "2"), ("", ""), ("one", "2"), ("0", "0")]
)
def test_half_an_environment_is_refused(rank: str | None, ranks: str | None) -> None:
    environment = {name: value for name, value in (("RANK", rank), ("WORLD_SIZE", ranks)) if value is not None}
    with pytest.raises(InputError, match=r"RANK = .*expected both, with 0 <= RANK < WORLD_SIZE.*torchrun"):
        ranks_of_environment(environment)
