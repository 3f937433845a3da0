"""One law for every runner that runs here: the same results, and a worker's error as the worker raised it."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.pvalue import AsDict, AsIter, TaggedOutput

from pipelines.runners.processes import keeping_workers
from pipelines.runners.runner import make_pipeline, run, unwrap
from schemas.errors import ExtremisError, InputError, StorageError
from tests.command import PROCESSES, ROOT, environment


class Fail(beam.DoFn):
    def process(self, element: str) -> None:
        raise StorageError(f"could not write {element}: [disk full]\nfree some space.")


class FailSetup(beam.DoFn):
    def setup(self) -> None:
        raise InputError("no tokenizer here.")

    def process(self, element: str) -> None: ...


class Crash(beam.DoFn):
    def process(self, element: str) -> None:
        raise ZeroDivisionError("ours to mend")


class Die(beam.DoFn):
    def process(self, element: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def run_on(flags: Iterable[str], fn: beam.DoFn) -> None:
    pipeline = make_pipeline(list(flags))
    pipeline | "Create" >> beam.Create(["x"]) | "Fail" >> beam.ParDo(fn)
    run(pipeline)


def test_a_workers_error_comes_back_as_it_was(flags: tuple[str, ...]) -> None:
    with pytest.raises(StorageError) as caught:
        run_on(flags, Fail())
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
    error = unwrap(RuntimeError(text))
    assert (type(error), str(error)) == (kind, "no room here.")


@pytest.mark.parametrize("name", ["DirectRunner", "FnApiRunner"])
def test_the_runner_in_this_process_has_its_usual_names(name: str) -> None:
    with pytest.raises(StorageError):
        run_on([f"--runner={name}"], Fail())


def test_an_error_of_setup_comes_back(flags: tuple[str, ...]) -> None:
    with pytest.raises(InputError, match=r"^no tokenizer here\.$"):
        run_on(flags, FailSetup())


def test_a_bug_is_not_dressed_up(flags: tuple[str, ...]) -> None:
    with pytest.raises(Exception, match="ours to mend") as caught:
        run_on(flags, Crash())
    assert not isinstance(caught.value, ExtremisError)
    assert unwrap(caught.value) is None


@pytest.mark.parametrize("flags", ["two processes", pytest.param("dask", marks=pytest.mark.slow)], indirect=True)
def test_a_worker_that_is_killed_is_said_to_be(flags: tuple[str, ...]) -> None:
    with pytest.raises(ExtremisError, match=r"worker.*out of memory"):
        run_on(flags, Die())


class Number(beam.DoFn):
    """n to (n % 7, n); also the odd ones, and one sign for each bundle at its end."""

    def process(self, element: int) -> Iterator[Any]:
        yield element % 7, element
        if element % 2:
            yield TaggedOutput("odd", (element, str(element)))

    def finish_bundle(self) -> Iterator[Any]:
        yield beam.transforms.window.GlobalWindows.windowed_value((7, -1))


class Describe(beam.DoFn):
    """(key, values) to a line, with both side inputs in it."""

    def process(self, element: tuple[Any, Any], odd: dict[int, str], every: Iterable[Any]) -> Iterator[str]:
        key, values = element
        numbers = sorted(value for value in values if value >= 0)
        yield f"{key}: {numbers} {[odd.get(n) for n in numbers]} of {sum(1 for _ in every)}"


class Sink(beam.DoFn):
    """Every line to a file of its own in a folder: what was carried out, wherever it was."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def process(self, element: str) -> None:
        self._folder.mkdir(exist_ok=True, parents=True)
        (self._folder / f"{hash(str(element)) & 0xFFFFFFFF}").write_text(str(element))


class Total(beam.CombineFn):
    def create_accumulator(self) -> int:
        return 0

    def add_input(self, accumulator: int, element: int) -> int:
        return accumulator + element

    def merge_accumulators(self, accumulators: Iterable[int]) -> int:
        return sum(accumulators)

    def extract_output(self, accumulator: int) -> int:
        return accumulator


class ValueOf(beam.DoFn):
    def process(self, element: tuple[Any, Any]) -> Iterator[Any]:
        yield element[0]


class Sizes(beam.DoFn):
    def process(self, element: tuple[Any, Any]) -> Iterator[str]:
        key, groups = element
        yield f"{key!r}: {sorted(map(str, groups['odd']))} {sorted(map(str, groups['none']))}"


def test_everything_our_pipelines_are_made_of_gives_the_same(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Tagged outputs, side inputs, an empty collection, several sinks, keys of every kind, combining with a default."""
    numbers = list(range(40))
    pipeline = make_pipeline(list(flags))
    made = pipeline | beam.Create(numbers) | beam.ParDo(Number()).with_outputs("odd", main="main")
    none = pipeline | "None" >> beam.Create([], reshuffle=False)
    lines = (
        (made["main"], none)
        | beam.Flatten()
        | beam.GroupByKey()
        | "Describe" >> beam.ParDo(Describe(), odd=AsDict(made["odd"]), every=AsIter(made["odd"]))
    )
    lines | "Lines" >> beam.ParDo(Sink(tmp_path / "lines"))
    odd = made["odd"] | beam.ParDo(ValueOf())
    odd | "Sum" >> beam.CombineGlobally(Total()) | "Write sum" >> beam.ParDo(Sink(tmp_path / "sum"))
    none | "Sum of none" >> beam.CombineGlobally(Total()) | "Write none" >> beam.ParDo(Sink(tmp_path / "none"))
    keyed = pipeline | "Keys" >> beam.Create([("text", 1), ((1, "a"), 2), (None, 3), ("text", 4), (b"bytes", 5)])
    (
        {"odd": keyed, "none": none}
        | beam.CoGroupByKey()
        | beam.ParDo(Sizes())
        | "Keyed" >> beam.ParDo(Sink(tmp_path / "keyed"))
    )
    run(pipeline)
    written = {
        name: sorted(path.read_text() for path in (tmp_path / name).iterdir())
        for name in ("lines", "sum", "none", "keyed")
    }
    residues = [[n for n in numbers if n % 7 == key] for key in range(7)]
    expected = [f"{key}: {own} {[str(n) if n % 2 else None for n in own]} of 20" for key, own in enumerate(residues)]
    assert written["lines"] == sorted([*expected, "7: [] [] of 20"])
    assert written["sum"] == ["400"]
    assert written["none"] == ["0"]
    assert written["keyed"] == sorted(
        ["'text': ['1', '4'] []", "(1, 'a'): ['2'] []", "None: ['3'] []", "b'bytes': ['5'] []"]
    )


class Slow(beam.DoFn):
    """Element 0 fails as soon as another is at work; that takes a while, and leaves a mark at its end.

    Where all elements come to one worker, which happens while the other is slow to start, none is at work beside it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def process(self, element: int) -> None:
        (self._folder / f"start-{element}").touch()
        if element == 0:
            limit = time.monotonic() + 10
            while len(list(self._folder.iterdir())) < 2 and time.monotonic() < limit:
                time.sleep(0.01)
            raise InputError("the first one fails.")
        time.sleep(1.0)
        (self._folder / f"end-{element}").touch()


@pytest.mark.parametrize("flags", ["two processes", "dask"], indirect=True)
def test_when_a_run_fails_nothing_of_it_is_at_work_any_more(flags: tuple[str, ...], tmp_path: Path) -> None:
    pipeline = make_pipeline(list(flags))
    pipeline | beam.Create(range(4)) | beam.ParDo(Slow(tmp_path))
    with pytest.raises(InputError, match="the first one fails"):
        run(pipeline)
    names = {path.name for path in tmp_path.iterdir()}
    time.sleep(1.5)
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.slow
def test_worker_processes_say_nothing_and_end_with_a_killed_run(tmp_path: Path) -> None:
    program = f"""
import apache_beam as beam, sys
from pathlib import Path
from pipelines.runners.runner import make_pipeline, run
from tests.command import PROCESSES
from tests.pipelines.runners.test_runner import Pids
if __name__ == "__main__":
    pipeline = make_pipeline(PROCESSES)
    pipeline | beam.Create(range(4)) | beam.ParDo(Pids(Path({str(tmp_path)!r}), float(sys.argv[1])))
    run(pipeline)
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


def test_worker_processes_live_through_several_pipelines(tmp_path: Path) -> None:
    pids = []
    with keeping_workers():
        for number in range(3):
            pipeline = make_pipeline(PROCESSES)
            pipeline | beam.Create(range(4)) | beam.ParDo(Pids(tmp_path / str(number), 0.2))
            run(pipeline)
            pids.append({int(path.read_text()) for path in (tmp_path / str(number)).iterdir()})
    assert len(pids[0]) == 2
    assert os.getpid() not in pids[0]
    assert pids[0] == pids[1] == pids[2]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids[0])


class Pids(beam.DoFn):
    """Notes in which process each element is, and stays there for some seconds."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds

    def process(self, element: int) -> None:
        self._folder.mkdir(exist_ok=True)
        (self._folder / str(element)).write_text(str(os.getpid()))
        time.sleep(self._seconds)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--direct_num_worker=2"],
            r"unknown Beam option '--direct_num_worker=2'\. Did you mean --direct_num_workers\?",
        ),
        (["--runner=NoSuchRunner"], "cannot use the Beam runner 'NoSuchRunner'"),
        (["--direct_num_workers=many"], "Beam options .*direct_num_workers.*many"),
        (
            ["--runner=DaskRunner", "--dask_client_adress=x"],
            r"unknown Beam option .* Did you mean --dask_client_address\?",
        ),
    ],
)
def test_wrong_options_are_refused(flags: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_pipeline(flags)


def test_a_scheduler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    dask_runner = pytest.importorskip("pipelines.runners.dask_runner")
    monkeypatch.setattr(dask_runner, "_CONNECT_SECONDS", 1)
    with pytest.raises(ExtremisError, match=r"the Dask scheduler tcp://127\.0\.0\.1:9 cannot be used"):
        run_on(["--runner=DaskRunner", "--dask_client_address=tcp://127.0.0.1:9"], Fail())


def test_nothing_is_left_in_the_folder_for_temporary_files(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StorageError):
        run_on(flags, Fail())
    assert not [name for name in os.listdir(tmp_path) if name.startswith("beam")]


def test_a_size_of_dask_partitions_is_refused() -> None:
    pytest.importorskip("distributed")
    with pytest.raises(InputError, match="dask_npartitions"):
        run_on(["--runner=DaskRunner", "--dask_partition_size=9"], Fail())
