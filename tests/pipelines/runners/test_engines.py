"""What a launcher does before an engine gets anything; what engines say, as they say it, and the message of it."""

import socket
from pathlib import Path

import pytest
from apache_beam.options import pipeline_options as options

from pipelines.runners.beam import BeamRunner
from pipelines.runners.engines import StartOptions, explain, failure, first_cause, require_job_server
from pipelines.runners.local import choose_runner, for_workers
from schemas.errors import InputError, PeerError
from tests.pipelines.runners.test_runner import run_on
from tests.pipelines.runners.work import fail

ENGINE = ("--runner=PortableRunner", "--job_endpoint=localhost:9")
NETWORK = (
    "java.io.IOException: Insufficient number of network buffers: required 512, but only 80 available. The total "
    "number of network buffers is currently set to 2048 of 32768 bytes each. You can increase this number by "
    "setting the configuration keys"
)
DIRECT = (
    "Caused by: java.lang.OutOfMemoryError: Cannot reserve 4194304 bytes of direct buffer memory (allocated: 264, "
    "limit: 268435456)"
)


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

    with pytest.raises(PeerError, match=r"no job server at --job_endpoint=localhost:9: Connection refused\."):
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (NETWORK, ("512", "80", "taskmanager.memory.network.min and .max to 256mb")),
        (DIRECT, ("4194304 bytes of direct buffer memory", ".off-heap.size")),
        ("java.lang.OutOfMemoryError: Java heap space", ("Java heap space", "task.heap.size", "spark.executor.memory")),
        ("java.lang.OutOfMemoryError: Metaspace", ("Java's classes", "taskmanager.memory.jvm-metaspace.size")),
        (
            "NoResourceAvailableException: Could not acquire the minimum required resources.",
            ("no free slot", "numberOfTaskSlots"),
        ),
        ("java.util.concurrent.TimeoutException: Timeout has occurred: 5000 ms", ("no free slot", "--parallelism")),
        ('Cannot run program "docker": error=2, No such file or directory', ("No such file", "needs Docker")),
        (
            'java.io.IOException: Cannot run program "/opt/x": error=13, Permission denied',
            ("cannot start its workers (Permission denied)", "bin/extremis-worker"),
        ),
        ("java.io.IOException: error=2, No such file or directory", ("start its workers (No such file", "PROCESS")),
        ("java.lang.IllegalStateException: Process died with exit code 3", ("ended with status 3",)),
        (
            "java.lang.ClassNotFoundException: org.apache.flink.api.java.ExecutionEnvironment",
            ("lacks the class org.apache.flink.api.java.ExecutionEnvironment", "version"),
        ),
        ("TaskManager with id 10.0.0.1:4-a is no longer reachable.", ("lost 10.0.0.1:4-a", "restart")),
        ("java.io.IOException: Multiplexer hanging up", ("worker process ended", "restart-strategy")),
        ("java.lang.IllegalStateException: call is closed", ("worker process ended", "restart-strategy")),
        (
            "java.net.ConnectException: Connection refused (Connection refused)",
            ("cannot reach the master", "--flink_master=HOST:PORT"),
        ),
        ("ExecutorLostFailure (executor 1 exited caused by", ("lost executor 1", "spark.executor.memory")),
    ],
)
def test_a_known_failure_says_what_to_set(text: str, words: tuple[str, ...]) -> None:
    message = str(explain(f"org.apache.flink.Failed: somewhere\n\tat a.b.C\n{text}\n\tat d.e.F"))
    assert "\n" not in message
    assert "\tat" not in message
    for word in words:
        assert word in message


def test_an_unknown_failure_is_its_innermost_cause_on_one_line() -> None:
    text = (
        "java.lang.RuntimeException: outer\n\tat a.B\nCaused by: java.io.IOException: the moon\n\tat c.D\n\t... 3 more"
    )
    assert first_cause(text) == "java.io.IOException: the moon"
    assert str(explain(text)).startswith("the engine failed: java.io.IOException: the moon. ")
    assert first_cause("Pipeline Job-1 failed in state FAILED: java.io.IOException: x") == "java.io.IOException: x"
    assert first_cause("") == "the engine gives no reason"


def test_the_fault_of_a_worker_is_its_own_last_line() -> None:
    text = (
        "java.lang.RuntimeException: Error received from SDK harness for instruction 4: "
        "Traceback (most recent call last):\n"
        '  File "x.py", line 3, in process\n    raise ZeroDivisionError("ours")\n'
        "ZeroDivisionError: ours [while running 'Fail']\n\tat org.apache.beam.X\n"
    )
    for service in (False, True):
        fault = failure(text, service)
        assert (type(fault), str(fault)) == (RuntimeError, "on a worker: ZeroDivisionError: ours")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (NETWORK, 2),
        ("java.lang.IllegalStateException: Process died with exit code 3", 2),
        ("java.lang.IllegalStateException: Process died with exit code 137", 3),
        ("NoResourceAvailableException: Could not acquire the minimum required resources.", 3),
        ("java.net.ConnectException: Connection refused (Connection refused)", 3),
        (DIRECT, 6),
        ("java.io.IOException: Multiplexer hanging up", 3),
        ("java.io.IOException: the moon", 3),
    ],
)
def test_what_lasts_is_status_2_and_what_may_pass_another(text: str, status: int) -> None:
    assert explain(text).exit_status == status


def test_a_service_that_is_not_reached_is_no_job_server() -> None:
    text = "HTTPSConnectionPool(host='storage.googleapis.com', port=443): Max retries exceeded: Connection refused"
    error = failure(text, service=True)
    assert isinstance(error, PeerError)
    assert "Dataflow refused the job, ended the job, or cannot be reached: HTTPSConnectionPool" in str(error)
