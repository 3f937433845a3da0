"""What a launcher does before an engine gets anything: places, endpoints, the exchange."""

import socket
from pathlib import Path

import pytest
from apache_beam.options import pipeline_options as options

from pipelines.runners.beam import BeamRunner
from pipelines.runners.engines import StartOptions, require_job_server
from pipelines.runners.local import choose_runner, for_workers
from pipelines.runners.worker import OPTION, Question, answer, compare_versions, versions
from schemas import storage
from schemas.errors import InputError
from tests.pipelines.runners.test_runner import run_on
from tests.pipelines.runners.work import fail

OTHER = "Extremis 9.9, Beam 2.1.0, Python 3.99"
ENGINE = ("--runner=PortableRunner", "--job_endpoint=localhost:9")


def test_paths_are_absolute_for_workers_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    assert for_workers(ENGINE, "raw/*.jsonl") == str(tmp_path / "raw/*.jsonl")
    assert for_workers(ENGINE, "~/raw") == "/home/me/raw"
    for url in ("s3://bucket/raw", "memory://raw", "simplecache::s3://bucket/raw"):
        assert for_workers(ENGINE, url) == url
    assert for_workers((), "raw") == "raw"


def test_a_job_server_that_is_not_there_is_named() -> None:
    def require(*flags: str) -> None:
        require_job_server(options.PipelineOptions(flags).view_as(options.PortableOptions))

    with pytest.raises(InputError, match=r"no job server at --job_endpoint=localhost:9: Connection refused\."):
        require(*ENGINE)
    with pytest.raises(InputError, match=r"--job_endpoint=localhost: expected host and port"):
        require("--job_endpoint=localhost")
    with socket.create_server(("127.0.0.1", 0)) as server:
        require(f"--job_endpoint=127.0.0.1:{server.getsockname()[1]}")
    with pytest.raises(InputError, match="needs the address of a job server: --job_endpoint"):
        choose_runner(["--runner=PortableRunner"])


def test_nothing_is_asked_where_workers_are_ours(tmp_path: Path) -> None:
    choose_runner(["--start_timeout=5"]).check([], str(tmp_path / "check"), lambda line: pytest.fail(line))
    for flags, seconds in (["--start_timeout=5"], 5), (["--start-timeout=5"], 5), ([], 60):
        assert options.PipelineOptions(flags).view_as(StartOptions).start_timeout == seconds


def question(folder: Path, stated: str, *reads: Path) -> Question:
    storage.write_bytes(str(folder / "launcher.json"), b"{}")
    return Question(folder.name, stated, tuple(map(str, reads)), str(folder), 0.0)


def test_a_worker_answers_once(tmp_path: Path) -> None:
    asked = question(tmp_path / "asked-once", versions())
    answer(asked)
    answer(asked)
    assert len(list((tmp_path / "asked-once").iterdir())) == 2
    said: list[str] = []
    asked.summarize(said.append)
    assert said[0].startswith("1 worker answered, the last after ")


def test_a_worker_names_itself_and_what_it_lacks(tmp_path: Path) -> None:
    """To the engine, and where the launching process looks."""
    host = socket.gethostname()
    other = question(tmp_path / "versions", OTHER)
    absent = question(tmp_path / "absent-input", versions(), tmp_path / "absent")
    for asked, said in (
        (other, rf"{host}, process \d+ has Extremis .*Beam 2\.1\.0, Python 3\.99"),
        (absent, rf"{host}.* cannot see the file {tmp_path}/absent.*shared file system"),
    ):
        with pytest.raises(InputError, match=said):
            answer(asked)
        with pytest.raises(InputError, match=said):
            asked.answers()


def test_a_worker_compares_versions_before_beam_does(tmp_path: Path) -> None:
    """By the options that its runner gives it."""
    compare_versions({})
    same, other = (question(tmp_path / name, stated) for name, stated in (("same", versions()), ("other", OTHER)))
    compare_versions({f"beam:option:{OPTION}:v1": str(same)})
    assert not same.answers()
    with pytest.raises(InputError, match=r"has Extremis .*the launching process has .*Beam 2\.1\.0"):
        compare_versions({f"beam:option:{OPTION}:v1": str(other)})
    with pytest.raises(InputError, match=r"Install the same versions"):
        other.answers()


def test_an_engine_s_jobs_ask_pip_for_nothing() -> None:
    debug = BeamRunner(ENGINE).pipeline().options.view_as(options.DebugOptions)
    assert debug.lookup_experiment("disable_logging_submission_environment")


@pytest.mark.parametrize(("flags", "millis"), [((), "500"), (("--environment_cache_millis=0",), "0")])
def test_a_worker_is_kept_between_stages_of_a_job(flags: tuple[str, ...], millis: str) -> None:
    portable = BeamRunner([*ENGINE, *flags]).pipeline().options.view_as(options.PortableOptions)
    assert portable.environment_cache_millis == millis


def test_a_program_that_is_not_there_names_its_option(tmp_path: Path) -> None:
    for place in (str(tmp_path / "absent"), "https://127.0.0.1:9/prism.zip"):
        with pytest.raises(InputError, match=r"cannot start a job server for PrismRunner: .*--prism_location=PATH"):
            run_on(["--runner=PrismRunner", f"--prism_location={place}"], fail)
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho no such machine; exit 3\n")
    with pytest.raises(
        InputError, match=r"the job server for PrismRunner did not start .*: no such machine.* Build Prism"
    ):
        run_on(["--runner=PrismRunner", f"--prism_location={program}"], fail)
