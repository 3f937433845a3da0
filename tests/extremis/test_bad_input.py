"""Wrong use and bad input: one message (what, where, got, expected, what to do), and nothing at the target."""

import gzip
import json
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from extremis import load
from schemas.errors import TableError
from tests.command import call, extremis, refused, sets
from tests.forks import extremis as forked
from tests.pipelines.raw import point, read_lines, write_lines, write_tiny

SHARD = ("--tokenizer", "train:300", "--shards", "2")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "raw")


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    assert call("shard", write_tiny(folder / "raw"), folder / "data", *SHARD).status == 0
    return folder / "data"


@pytest.fixture(scope="module")
def run(tiny_data: Path) -> Path:
    """A finished run without tables."""
    run = tiny_data.parent / "run"
    assert call("train", "astra", tiny_data, run, *sets("train.epochs=1", "order.batch=16")).status == 0
    return run


def visible(place: Path) -> list[str]:
    """Files below `place`: a refused command leaves none."""
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def change(folder: Path, name: str, number: int, line: object) -> None:
    """Line `number` (from 0) of a gzip file becomes `line`."""
    lines = read_lines(folder / name)
    lines[number] = line
    write_lines(folder / name, lines)


def spoil(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def cut(folder: Path) -> None:
    whole = (folder / "trn.json.gz").read_bytes()
    (folder / "trn.json.gz").write_bytes(whole[: len(whole) // 2])


def without(field: str) -> Callable[[Path], None]:
    return lambda folder: change(folder, "trn.json.gz", 4, {k: v for k, v in point(4, 7).items() if k != field})


def with_labels(*target: int) -> Callable[[Path], None]:
    return lambda folder: change(folder, "tst.json.gz", 2, {**point(2, 7), "target_ind": list(target)})


BAD_FILES: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "not gzip": (
        spoil("trn.json.gz", b'{"title": "plain"}\n'),
        ("raw/trn.json.gz: not a gzip file", "The file name indicates gzip", "compress"),
    ),
    "cut off": (cut, ("raw/trn.json.gz: incomplete", "bytes", "Copy the file again")),
    "not JSON": (
        lambda folder: change(folder, "trn.json.gz", 3, b'{"title": '),
        ("trn.json.gz, line 4: not JSON", '{"title": ', "1 of 30 rows", "Fix these", "--max-reject-share"),
    ),
    "a field missing": (without("title"), ("trn.json.gz, line 5: the field 'title' is missing", "'uid'", "Fix")),
    "no target_ind": (without("target_ind"), ("trn.json.gz, line 5: the field 'target_ind' is missing", "Fix")),
    "target_ind beyond the labels": (
        with_labels(1, 7),
        ("tst.json.gz, line 3: label 7 does not exist", "the labels are 0 to 6", "Fix"),
    ),
    "a point without labels": (with_labels(), ("tst.json.gz, line 3: the point 'p2' has no labels", "Fix")),
    "an empty file": (spoil("tst.json.gz", b""), ("raw/tst.json.gz", "the file is empty", "Copy the file again")),
    "no lines": (spoil("trn.json.gz", gzip.compress(b"")), ("raw/trn.json.gz: the file is empty", "Copy the file")),
    "a filter row that is not there": (
        spoil("filter_labels_test.txt", b"3 1\n15 1\n"),
        ("filter_labels_test.txt, line 2: row 15 does not exist", "rows 0 to 14", "another split?"),
    ),
    "a filter label that is not there": (
        spoil("filter_labels_test.txt", b"3 1\n4 7\n"),
        ("filter_labels_test.txt, line 2: label 7 does not exist", "the labels are 0 to 6", "another data set?"),
    ),
    "no labels file": (lambda folder: (folder / "lbl.json.gz").unlink(), ("raw: no lbl.json.gz", "found: trn.json.gz")),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_raw_files(tiny: Path, tmp_path: Path, case: str) -> None:
    damage, words = BAD_FILES[case]
    damage(tiny)
    refused(call("shard", tiny, tmp_path / "data", *SHARD), *words)
    assert visible(tmp_path / "data") == []


@pytest.mark.parametrize(
    "case",
    [
        "cut off",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("not JSON", "a filter row that is not there")),
    ],
)
def test_raw_files_in_a_process_of_its_own_then_mended(tiny: Path, tmp_path: Path, case: str) -> None:
    damage, words = BAD_FILES[case]
    good, data = shutil.copytree(tiny, tmp_path / "good"), tmp_path / "data"
    damage(tiny)
    done = forked("shard", tiny, data, *SHARD, check=False)
    refused(done, *words)
    assert done.out == ""
    assert visible(data) == []
    assert call("shard", good, data, *SHARD).status == 0
    assert call("inspect", data, "--verify").status == 0


class TestRecipes:
    def test_unknown_propensities_are_said_and_never_guessed(self, tiny_data: Path, tmp_path: Path) -> None:
        losses = []
        for number, weight in enumerate((0.0, 0.5)):
            settings = sets(f"train.positive_weight={weight}", "train.epochs=1")
            done = call("train", "astra", tiny_data, tmp_path / str(number), *settings, "--json")
            assert done.status == 0, done.err
            assert ("has no propensity constants" in done.err) == (weight > 0)
            losses.append(done.json["epochs"][0]["loss"])
        assert losses[0] == losses[1]


class TestDataAndRun:
    def test_a_run_made_from_other_data(self, tiny: Path, run: Path, tmp_path: Path) -> None:
        other = tmp_path / "other"
        assert call("shard", tiny, other, *SHARD, "--seed", "5").status == 0
        before = visible(run)
        for done in (
            call("evaluate", other, run),
            call("embed", other, run, tmp_path / "out"),
            call("train", "astra", other, run, *sets("train.epochs=1", "order.batch=16"), "--resume"),
        ):
            refused(done, str(run), str(other), "on different data", "Give the data that the run was trained on")
        assert visible(run) == before
        assert not (tmp_path / "out").exists()

    def test_a_run_is_there_already(self, tiny_data: Path, run: Path) -> None:
        before = visible(run)
        refused(call("run", "astra", tiny_data, run), f"{run}: a run exists here already", "--resume", "another RUN")
        assert visible(run) == before

    def test_unfinished_data(self, tiny_data: Path, run: Path, tmp_path: Path) -> None:
        half = shutil.copytree(tiny_data, tmp_path / "half")
        (half / "_manifest.json").unlink()
        for arguments in (
            ("train", "astra", half, tmp_path / "run"),
            ("run", "astra", half, tmp_path / "run"),
            ("evaluate", half, run),
            ("embed", half, run, tmp_path / "out"),
            ("inspect", half),
        ):
            refused(call(*arguments), f"{half}: unfinished table", "no _manifest.json", "Run that command again")
        assert not (tmp_path / "run").exists()
        assert not (tmp_path / "out").exists()

    def test_no_data(self, tmp_path: Path) -> None:
        nowhere = tmp_path / "nowhere"
        refused(call("train", "astra", nowhere, tmp_path / "run"), f"{nowhere}: no table here", "Is the path right")
        assert visible(tmp_path) == []

    def test_a_run_in_the_place_of_an_export_or_of_data(self, tiny_data: Path, run: Path, tmp_path: Path) -> None:
        remedy = f"{run}: expected an export, got a run. Run `extremis export DATA {run} exported/`"
        refused(call("predict", run, tmp_path / "x.csv", "--data", tiny_data), remedy)
        with pytest.raises(TableError, match=re.escape(remedy)):
            load(run)
        refused(call("evaluate", run, tiny_data), f"{run}: expected DATA, got a run")

    def test_a_split_that_is_not_there(self, tiny_data: Path, run: Path, tmp_path: Path) -> None:
        words = (f"{tiny_data}: no split 'dev'", "known splits: test, train")
        refused(call("evaluate", tiny_data, run, "--split", "dev"), *words)
        refused(call("embed", tiny_data, run, tmp_path / "out", "--split", "dev"), *words)

    def test_a_damaged_shard(self, tiny_data: Path, run: Path, tmp_path: Path) -> None:
        data = shutil.copytree(tiny_data, tmp_path / "data")
        shard = next((data / "queries" / "test").glob("part-*"))
        shard.write_bytes(shard.read_bytes()[:-5])
        refused(call("evaluate", data, run), shard.name, "damaged", "expected", "Make the table again")
        refused(call("inspect", data / "queries" / "test", "--verify"), shard.name, "damaged")

    def test_another_format_version(self, tiny_data: Path, tmp_path: Path) -> None:
        data = shutil.copytree(tiny_data, tmp_path / "data")
        place = data / "labels" / "_manifest.json"
        place.write_text(json.dumps({**json.loads(place.read_text()), "version": 99}))
        refused(call("train", "astra", data, tmp_path / "run"), str(place), "format version 99", "reads 2", "again")

    def test_data_that_holds_something_else(self, tiny: Path, tiny_data: Path) -> None:
        before = visible(tiny_data)
        done = call("shard", tiny, tiny_data, *SHARD, "--seed", "3")
        refused(done, str(tiny_data), "seed was 0, now it is 3", "--overwrite")
        assert visible(tiny_data) == before

    def test_nothing_to_mine(self, tiny_data: Path, run: Path) -> None:
        refused(call("mine", tiny_data, run), f"{run}/dumps", "no complete dump to mine")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("shard", "raw"), "DATA"),
        (("evaluat", "a", "b"), "evaluat"),
        (("shard", "raw", "data", "--propensity", "0.5"), "two numbers A,B"),
        (("shard", "raw", "data", "--shards", "0"), "--shards"),
        (("shard", "raw", "data", "--", "--runer=Flink"), "Did you mean --runner?"),
        (("inspect", "nosuch://bucket/table"), "nosuch"),
        (("shard", "raw", "data", "--part", "a b"), "--part 'a b': a name consists of"),
        (("shard", "raw", "data", "--part", "../a", "--onto", "other"), "--part '../a': a name consists of"),
        (("export", "data", "run", "exports/a b", "--current"), "'a b': a name consists of"),
        (("ablate", "data", "out", "--recipes", "astra,x/...toml"), "--recipes '..': a name consists of"),
    ],
)
def test_wrong_use(arguments: tuple[str, ...], word: str) -> None:
    done = call(*arguments)
    assert done.status == 2
    assert word in done.err
    assert "Traceback" not in done.err


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mounts a disk of so many KiB; skips where that is not allowed."""
    mounted = []

    def mount(kib: int) -> Path:
        place = tmp_path / f"disk-{kib}"
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", place], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"cannot mount a small disk: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", place], check=True)


class TestFullDisk:
    WORDS = ("could not write", "No space left on device", "free some space and run the same command again")

    @pytest.mark.slow
    def test_shard(self, raw: Path, disk: Callable[[int], Path]) -> None:
        small, data = disk(96), "data"
        arguments = ("shard", raw, small / data, "--tokenizer", "train:1000")
        refused(extremis(*arguments, check=False), str(small / data), *self.WORDS, status=6)
        assert visible(small) == []
        _grow(small)
        extremis(*arguments)
        assert call("inspect", small / data).status == 0

    @pytest.mark.slow
    def test_train(self, tiny_data: Path, run: Path, disk: Callable[[int], Path]) -> None:
        small = disk(67)  # the room that is asked for beforehand is there, all that is written has none
        arguments = ("train", "astra", tiny_data, small / "run", *sets("train.epochs=1", "order.batch=16"))
        refused(extremis(*arguments, check=False), str(small), *self.WORDS, status=6)
        for manifest in small.rglob("_manifest.json"):  # a checkpoint that had room is whole
            assert call("inspect", manifest.parent, "--verify").status == 0
        assert not list(small.rglob(".tmp-*"))
        _grow(small)
        extremis(*arguments, "--resume")
        newest = max((run / "checkpoints").iterdir())
        again = small / "run" / newest.relative_to(run)
        assert (again / "_manifest.json").read_bytes() == (newest / "_manifest.json").read_bytes()

    def test_embed(self, tiny_data: Path, run: Path, disk: Callable[[int], Path]) -> None:
        small = disk(4)
        refused(call("embed", tiny_data, run, small / "out"), str(small), *self.WORDS, status=6)
        assert not list(small.rglob("_manifest.json"))
        _grow(small)
        assert call("embed", tiny_data, run, small / "out").status == 0

    def test_a_limit_on_a_files_size_where_nothing_can_be_mounted(self, raw: Path, tmp_path: Path) -> None:
        """The other way of a write to stop half-way, which needs no privilege."""
        done = extremis(
            *("shard", raw, tmp_path / "data", "--tokenizer", "train:1000"),
            check=False,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        )
        refused(done, str(tmp_path / "data"), "could not write", "File too large", status=6)
        assert visible(tmp_path) == []


def _grow(place: Path) -> None:
    subprocess.run(["mount", "-o", "remount,size=64m", place], check=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_no_permission(tiny: Path, tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    refused(call("shard", tiny, closed / "data", *SHARD), str(closed), "Permission denied", status=4)
