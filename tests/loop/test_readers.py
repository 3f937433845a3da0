"""Who may read a place but not write there gets the results of its owner, and leaves nothing."""

import contextlib
import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import Mock

import pytest

import extremis
from schemas.errors import StorageError
from tests.command import call, refused

COMMANDS = {
    "evaluate": ("evaluate", "{}/data", "{}/run"),
    "report": ("report", "{}/data", "{}/run", "--queries", "5"),
    "inspect": ("inspect", "{}/run", "--verify"),
    "status": ("status", "{}/run"),
    "predict": ("predict", "{}/exports", "--data", "{}/data", "OUT.jsonl"),
    "explain": ("explain", "{}/exports/two", "a ship in a storm", "LABEL"),
    "export": ("export", "{}/data", "{}/run", "OUT"),
    "embed": ("embed", "{}/data", "{}/run", "OUT"),
    "tuples": ("tuples", "{}/mined", "OUT.jsonl", "--data", "{}/data", "--keys"),
    "mine": ("mine", "{}/data", "{}/mined", "--out", "OUT"),
    "train": ("train", "random", "{}/data", "OUT", "--set", "train.epochs=1", "--from", "{}/run"),
}
SLOW = "export", "mine", "train"
KEPT = {"evaluate": "run/evaluations/test-step-00000050.json", "report": "run/report.html"}
NOT_KEPT = "not kept, because this user may not write there; keep it elsewhere with --out"


@dataclass(frozen=True)
class Shared:
    """Outputs at `place`, which their owner may change; until the block of `as_reader` ends, this process may not."""

    place: str
    files: Callable[[], Mapping[str, bytes]]
    as_reader: Callable[[], AbstractContextManager[object]]


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def read_only(outputs: Path) -> Iterator[None]:
    """Withdraw the right to write from the folders, and from root the capability to do without (CAP_DAC_OVERRIDE)."""
    libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    had, sets[0] = sets[0], sets[0] & ~(1 << 1)
    subprocess.run(["chmod", "-R", "a-w", outputs], check=True)
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = had
        assert libc.capset(header, sets) == 0
        subprocess.run(["chmod", "-R", "u+w", outputs], check=True)


def in_a_folder(outputs: Path) -> Iterator[Shared]:
    yield Shared(str(outputs), lambda: files_below(outputs), lambda: read_only(outputs))


def on_versitygw(outputs: Path) -> Iterator[Shared]:
    pytest.importorskip("s3fs")
    from tests.s3 import READER, Bucket, reached, serve

    with serve(outputs.with_name("log"), "versitygw") as port, reached(url := f"http://127.0.0.1:{port}"):
        bucket = Bucket(("127.0.0.1", port), "shared")
        bucket.put_folder(outputs, "")
        bucket.let_read()
        yield Shared("s3://shared", lambda: bucket.objects(""), lambda: reached(url, READER))


@pytest.fixture(scope="module", params=[in_a_folder, pytest.param(on_versitygw, marks=pytest.mark.s3server)])
def shared(
    request: pytest.FixtureRequest, data: Path, mined: Path, exports: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shared]:
    outputs = tmp_path_factory.mktemp("shared") / "outputs"
    for name, source in {"data": data, "mined": mined, "run": exports.with_name("run"), "exports": exports}.items():
        shutil.copytree(source, outputs / name, ignore=shutil.ignore_patterns("evaluations", "report.html"))
    yield from request.param(outputs)


@pytest.fixture(autouse=True)
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR, where a report goes that cannot be kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in COMMANDS])
def test_a_reader_sees_what_the_owner_sees(name: str, shared: Shared, pages: Path) -> None:
    label = extremis.load(f"{shared.place}/exports/two").labels[0]
    words = [word.replace("{}", shared.place).replace("LABEL", label.key) for word in COMMANDS[name]]
    before = shared.files()
    with shared.as_reader():
        theirs = call(*(word.replace("OUT", str(pages / "a")) for word in words))
    assert (theirs.status, shared.files()) == (0, before), theirs.err
    assert theirs.err.count(NOT_KEPT) == (name in KEPT)
    ours = call(*(word.replace("OUT", str(pages / "b")) for word in words))
    assert (ours.status, ours.out) == (0, theirs.out)
    assert all(file.read_bytes() == file.with_stem("b").read_bytes() for file in pages.glob("a.*"))
    changed = {path for path, content in shared.files().items() if before.get(path) != content}
    assert changed >= {KEPT[name]} if name in KEPT else not changed
    if name == "report":
        (page,) = pages.glob("extremis-report-*/report.html")
        assert page.read_bytes() == shared.files()[KEPT[name]]
        assert f"{page}: " in theirs.err


def test_an_evaluation_is_kept_in_the_run_or_elsewhere_or_not(shared: Shared, tmp_path: Path) -> None:
    words = ["evaluate", f"{shared.place}/data", f"{shared.place}/mined"]
    before = shared.files()
    answers = [call(*words, *more) for more in (["--no-save"], ["--no-save", "--out", str(tmp_path / "kept")])]
    assert shared.files() == before
    answers.append(call(*words))
    assert len({(done.status, done.out) for done in answers}) == 1
    elsewhere, kept = files_below(tmp_path / "kept"), shared.files()
    assert len(elsewhere) == 2
    assert elsewhere == {path: kept.get(f"mined/evaluations/{path}") for path in elsewhere}
    assert len(kept) == len(before) + 2
    refused(call(*words, "--out", f"{shared.place}/mined/x"), "which the command reads")


def test_results_are_shown_before_an_error(shared: Shared, monkeypatch: pytest.MonkeyPatch) -> None:
    """Storage that is away is an error, and so is a place that was asked for and may not be written."""
    words = ["evaluate", f"{shared.place}/data", f"{shared.place}/run"]
    shown = call(*words, "--no-save").out
    assert "labels given" in shown
    with shared.as_reader():
        for asked in (["--labels", f"{shared.place}/labels.csv"], ["--out", f"{shared.place}/out"]):
            done = call(*words, *asked)
            assert done.out == shown
            refused(done, "could not write", status=4)
        done = call("report", *words[1:], "--no-predictions", "--queries", "0", "--out", f"{shared.place}/page.html")
        refused(done, "could not write", status=4)
        assert "open it in a browser" in done.err
        result = extremis.evaluate(*words[1:], progress=(lines := list[object]()).append)
        assert result.more["record"] is None
        assert str(lines[-1]).endswith(NOT_KEPT.replace("--out", "out"))
    monkeypatch.setattr("extremis.evaluation.write_json", Mock(side_effect=StorageError("no answer")))
    done = call(*words)
    assert done.out == shown
    refused(done, "no answer", status=3)
