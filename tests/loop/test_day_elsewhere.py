"""A day on other runners, on an object store, and on two ranks: what it makes on one disk in one process."""

from pathlib import Path

import pytest

from tests.command import call, extremis
from tests.forks import extremis as forked
from tests.forks import tree
from tests.loop.test_day_kill import EXPORT, SETS, SHARD
from tests.loop.test_kill import records
from tests.loop.test_ranks import assert_close, torchrun
from tests.pipelines.test_versions import SEQUENCE, write
from tests.s3 import Bucket

pytestmark = pytest.mark.slow

BUCKET = "days"


def a_day(root: str, raw: Path) -> list[list[str]]:
    """Commands of two days under `root`."""
    return [
        ["shard", f"{raw}/0", f"{root}/data/0", *SHARD[:-2]],
        ["train", "random", f"{root}/data/0", f"{root}/runs/0", *SETS],
        ["export", f"{root}/data/0", f"{root}/runs/0", f"{root}/exports/0", *EXPORT],
        ["shard", f"{raw}/1", f"{root}/data/1", "--onto", f"{root}/data/0", *SHARD],
        ["run", "random", f"{root}/data/1", f"{root}/runs/1", "--from", f"{root}/runs/0", *SETS],
        ["evaluate", f"{root}/data/1", f"{root}/runs/1", "--split", "train"],
        ["export", f"{root}/data/1", f"{root}/runs/1", f"{root}/exports/1", "--onto", f"{root}/exports/", *EXPORT],
    ]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("raw")
    for number in (0, 1):
        write(folder / str(number), SEQUENCE[number])
    return folder


@pytest.fixture(scope="module")
def local(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("local")
    for command in a_day(str(root), raw):
        forked(*command)
    return root


def test_a_version_has_the_same_bytes_on_every_runner(
    raw: Path, local: Path, flags: tuple[str, ...], tmp_path: Path
) -> None:
    for command in (a_day(str(tmp_path), raw)[number] for number in (0, 3)):
        done = call(*command, "--", *flags) if flags else call(*command)
        assert done.status == 0, done.err
    assert tree(tmp_path / "data") == tree(local / "data")


def test_a_day_on_a_store_makes_what_it_makes_on_a_disk(
    env: dict[str, str],
    bucket: Bucket,
    raw: Path,
    local: Path,
    tmp_path: Path,
) -> None:
    root = f"s3://{BUCKET}/days"
    for command in a_day(root, raw):
        extremis(*command, env=env)
    for folder in ("data", "exports"):
        stored = {key: bucket.read(f"days/{folder}/{key}") for key in bucket.keys(f"days/{folder}/")}
        expected = tree(local / folder)
        # The recipe in the second export's manifest names the run that it went on from by its place.
        left = ("commands.json", "1/_manifest.json") if folder == "exports" else ("commands.json",)
        assert {k: v for k, v in stored.items() if not k.endswith(left)} == {
            k: v for k, v in expected.items() if not k.endswith(left)
        }
    (tmp_path / "texts.txt").write_text("text 1\nt3 u9\n")
    answers = []
    for number, place in enumerate((f"{root}/exports", str(local / "exports"))):
        out = tmp_path / f"out-{number}.jsonl"
        assert extremis("predict", place, tmp_path / "texts.txt", out, "--json", env=env).json["export"] == f"{place}/1"
        answers.append(out.read_text())
    assert answers[0] == answers[1]
    for key in bucket.keys("days/data/0/"):
        bucket.remove(f"days/data/0/{key}")
    gone = extremis("evaluate", f"{root}/data/1", f"{root}/runs/1", "--split", "train", env=env, check=False)
    assert gone.status == 2
    assert f"part 0001 ({root}/data/0" in gone.err


def test_two_ranks_go_on_from_a_run_as_one_process_does(local: Path, tmp_path: Path) -> None:
    done = torchrun(2, "train", "random", local / "data/1", tmp_path / "run", "--from", local / "runs/0", *SETS)
    assert done.status == 0, done.err
    extremis("train", "random", local / "data/1", tmp_path / "alone", "--from", local / "runs/0", *SETS)
    assert_close(tmp_path / "run", tmp_path / "alone")
    assert [(r["kind"], r["step"]) for r in records(tmp_path / "run")] == [
        (r["kind"], r["step"]) for r in records(tmp_path / "alone")
    ]
