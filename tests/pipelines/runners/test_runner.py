"""One law for every runner that runs here: the same results, and a worker's error as the worker raised it."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from pipelines.flow import Flow
from pipelines.runners.beam import BeamRunner, find_worker_error
from pipelines.runners.local import choose_runner
from schemas.errors import ExtremisError, InputError, RoomError, StorageError
from tests.command import PROCESSES, ROOT, environment
from tests.pipelines.runners.work import EVERYTHING, crash, die, everything, fail, slow, staying


def run_on(flags: Iterable[str], function: Callable[..., Any], *elements: Any) -> None:
    flow = Flow()
    flow.create("Create", ["x"]).map("Work", function, *elements)
    with choose_runner(list(flags)) as runner:
        runner.run(flow)


def test_a_workers_error_comes_back_as_it_was(flags: tuple[str, ...]) -> None:
    with pytest.raises(StorageError) as caught:
        run_on(flags, fail)
    assert str(caught.value) == "could not write x: [disk full]\nfree some space."


@pytest.mark.parametrize("kind", [ExtremisError, StorageError])
@pytest.mark.parametrize("step", ["", " [while running 'Answer']"])
def test_a_workers_error_is_found_in_what_an_engine_says(kind: type[ExtremisError], step: str) -> None:
    name = f"{kind.__module__}.{kind.__qualname__}"
    text = (
        "java.util.concurrent.ExecutionException: Error received from SDK harness: Traceback (most recent call last):\n"
        f'  File "check.py", line 1, in answer\n    raise\n{name}: no room here.{step}\n\n'
        "\tat java.base/java.util.concurrent.CompletableFuture.get(CompletableFuture.java:396)\nCaused by: x\n"
    )
    error = find_worker_error(RuntimeError(text))
    assert (type(error), str(error)) == (kind, "no room here.")


def test_a_bug_is_not_dressed_up(flags: tuple[str, ...]) -> None:
    with pytest.raises(Exception, match="ours to mend") as caught:
        run_on(flags, crash)
    assert not isinstance(caught.value, ExtremisError)
    assert find_worker_error(caught.value) is None


@pytest.mark.parametrize("flags", ["two processes"], indirect=True)
def test_a_worker_that_is_killed_is_said_to_be(flags: tuple[str, ...]) -> None:
    with pytest.raises(RoomError, match=r"worker.*out of memory"):
        run_on(flags, die)


def require_everything(folder: Path) -> None:
    written = {
        name: sorted(path.read_text() for path in (folder / name).iterdir()) for name in ("lines", "sum", "keyed")
    }
    residues = [[n for n in EVERYTHING if n % 7 == key] for key in range(7)]
    expected = [f"{key}: {own} {[str(n) if n % 2 else None for n in own]} of 20" for key, own in enumerate(residues)]
    assert written["lines"] == sorted([*expected, "7: [] [] of 20"])
    assert written["sum"] == ["400"]
    assert written["keyed"] == sorted(
        ["'text': ['1', '4'] []", "(1, 'a'): ['2'] []", "None: ['3'] []", "b'bytes': ['5'] []"]
    )


def test_everything_our_flows_are_made_of_gives_the_same(flags: tuple[str, ...], tmp_path: Path) -> None:
    with choose_runner(flags) as runner:
        runner.run(everything(tmp_path))
    require_everything(tmp_path)


def test_beam_runs_them_too(tmp_path: Path) -> None:
    """As engines get it: through Beam's portable form and coders."""
    runner = BeamRunner(["--runner=FnApiRunner"])
    runner.run(everything(tmp_path))
    require_everything(tmp_path)
    flow = Flow()
    flow.create("Create", ["x"]).map("Fail", fail)
    with pytest.raises(StorageError, match=r"^could not write x: \[disk full\]\nfree some space\.$"):
        runner.run(flow)


@pytest.mark.parametrize("flags", ["two processes"], indirect=True)
def test_when_a_run_fails_nothing_of_it_is_at_work_any_more(flags: tuple[str, ...], tmp_path: Path) -> None:
    flow = Flow()
    flow.create("Numbers", range(4)).map("Slow", slow, tmp_path)
    with pytest.raises(InputError, match="the first one fails"), choose_runner(flags) as runner:
        runner.run(flow)
    names = {path.name for path in tmp_path.iterdir()}
    time.sleep(1.5)
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.slow
def test_worker_processes_say_nothing_and_end_with_a_killed_run(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from pipelines.runners.local import choose_runner
from tests.command import PROCESSES
from tests.pipelines.runners.work import staying
with choose_runner(PROCESSES) as runner:
    runner.run(staying(Path({str(tmp_path)!r}), float(sys.argv[1])))
"""
    start = [sys.executable, "-c", program]
    env = environment({"PYTHONPATH": str(ROOT)})
    done = subprocess.run([*start, "0"], capture_output=True, text=True, env=env, cwd=ROOT, check=True)
    assert "INFO" not in done.stderr, done.stderr
    for path in tmp_path.iterdir():
        path.unlink()
    launching = subprocess.Popen([*start, "60"], env=env, cwd=ROOT)
    limit = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2:
        assert time.monotonic() < limit
        assert launching.poll() is None
        time.sleep(0.05)
    launching.kill()
    launching.wait()
    workers = {int(path.read_text()) for path in tmp_path.iterdir()}
    assert launching.pid not in workers
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < limit, "a worker outlived the run"
        time.sleep(0.05)


def test_worker_processes_live_through_several_flows(tmp_path: Path) -> None:
    pids = []
    with choose_runner(PROCESSES) as runner:
        for number in range(3):
            runner.run(staying(tmp_path / str(number), 0.2))
            pids.append({int(path.read_text()) for path in (tmp_path / str(number)).iterdir()})
    assert len(pids[0]) == 2
    assert os.getpid() not in pids[0]
    assert pids[0] == pids[1] == pids[2]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids[0])


@pytest.mark.parametrize(
    "name",
    [
        "DirectRunner",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("SwitchingDirectRunner", "FnApiRunner")),
    ],
)
def test_beams_names_for_a_local_runner_mean_this_machine_with_its_options(name: str, tmp_path: Path) -> None:
    def processes(*flags: str) -> set[int]:
        folder = tmp_path / "".join(flags)
        with choose_runner([f"--runner={name}", *flags]) as runner:
            runner.run(staying(folder, 0.2))
        return {int(path.read_text()) for path in folder.iterdir()}

    assert processes() == processes("--direct_num_workers=2") == {os.getpid()}
    assert processes("--direct_num_workers=2", "--direct_running_mode=multi_threading") == {os.getpid()}
    two = processes("--direct_num_workers=2", "--direct_running_mode=multi_processing")
    each = processes("--direct_num_workers=0", "--direct_running_mode=multi_processing")  # a process a core
    assert len(two) == 2
    assert each
    assert os.getpid() not in two | each


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--direct_num_worker=2"],
            r"unknown Beam option '--direct_num_worker=2'\. Did you mean --direct_num_workers\?",
        ),
        (["--runner=NoSuchRunner"], "cannot use the Beam runner 'NoSuchRunner'"),
        (
            ["--runner=BundleBasedDirectRunner"],
            r"cannot use the Beam runner 'BundleBasedDirectRunner'.* DirectRunner, ",
        ),
        (["--runner=apache_beam.runners.portability.kafka_streams_runner.KafkaStreamsRunner"], "cannot use the Beam"),
        (["--direct_num_workers=many"], "Beam options .*direct_num_workers.*many"),
        (
            ["--runner=DataflowRunner", "--template_location=gs://b/t"],
            "--template_location: a command runs several jobs",
        ),
    ],
)
def test_wrong_options_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        choose_runner(flags)


def test_nothing_is_left_in_the_folder_for_temporary_files(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StorageError):
        run_on(flags, fail)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("beam")]
