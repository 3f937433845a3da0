"""What engines say, as they say it, and the message that comes of it."""

import pytest

from pipelines.runners.engines import explain, failure, first_cause, python_cause
from schemas.errors import ExtremisError, InputError

NETWORK = (
    "java.io.IOException: Insufficient number of network buffers: required 512, but only 80 available. The total "
    "number of network buffers is currently set to 2048 of 32768 bytes each. You can increase this number by "
    "setting the configuration keys"
)
DIRECT = (
    "Caused by: java.lang.OutOfMemoryError: Cannot reserve 4194304 bytes of direct buffer memory (allocated: 264, "
    "limit: 268435456)"
)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        # twice 2048 + 512 - 80 buffers of 32 KiB
        (NETWORK, ("512", "80", "taskmanager.memory.network.min and .max to 155mb")),
        (DIRECT, ("4194304", "256mb", "taskmanager.memory.task.off-heap.size")),
        ("java.lang.OutOfMemoryError: Java heap space", ("Java heap space", "task.heap.size", "spark.executor.memory")),
        (
            "NoResourceAvailableException: Could not acquire the minimum required resources.",
            ("no free slot", "numberOfTaskSlots"),
        ),
        ("java.util.concurrent.TimeoutException: Timeout has occurred: 5000 ms", ("no free slot", "--parallelism")),
        ('Cannot run program "docker": error=2, No such file or directory', ("no Docker", "extremis-worker")),
        (
            'java.io.IOException: Cannot run program "/opt/x": error=2, No such file or directory',
            ("cannot start /opt/x (No such file or directory)", "bin/extremis-worker"),
        ),
        ("java.io.IOException: error=2, No such file or directory", ("start its workers (No such file", "PROCESS")),
        ("java.lang.IllegalStateException: Process died with exit code 3", ("ended with status 3",)),
        (
            "java.lang.ClassNotFoundException: org.apache.flink.api.java.ExecutionEnvironment",
            ("lacks the class org.apache.flink.api.java.ExecutionEnvironment", "version"),
        ),
        ("java.io.FileNotFoundException: /tmp/beam-artifact-staging/1 (x)", ("artifacts", "--artifacts-dir")),
        ("TaskManager with id 10.0.0.1:4-a is no longer reachable.", ("lost the TaskManager 10.0.0.1:4-a", "restart")),
        ("java.io.IOException: Multiplexer hanging up", ("worker process ended", "restart-strategy")),
        ("java.lang.IllegalStateException: call is closed", ("worker process ended", "restart-strategy")),
        (
            "SparkException: Only one SparkContext should be running in this JVM (see SPARK-2243).",
            ("one job at a time",),
        ),
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
    assert python_cause(text) == "ZeroDivisionError: ours"
    assert python_cause("java.lang.IllegalStateException: x") is None


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (NETWORK, 2),
        ("java.lang.IllegalStateException: Process died with exit code 3", 2),
        ("NoResourceAvailableException: Could not acquire the minimum required resources.", 2),
        (DIRECT, 1),
        ("java.io.IOException: Multiplexer hanging up", 1),
        ("java.io.IOException: the moon", 1),
    ],
)
def test_what_the_user_can_mend_before_work_begins_is_status_2(text: str, status: int) -> None:
    assert explain(text).exit_status == status


def test_another_beam_is_no_fault_of_ours() -> None:
    """Beam says so on a worker, by an error of Python's."""
    sdk = "beam:version:sdk_base:apache/beam_python3"
    text = (
        "java.lang.RuntimeException: Error received from SDK harness: Traceback (most recent call last):\n"
        "RuntimeError: Pipeline construction environment and pipeline runtime environment are not compatible. "
        f"Submission environment: {sdk}.11_sdk:2.77.0. Runtime environment: {sdk}.10_sdk:2.70.0.\n\tat org.apache\n"
    )
    error = failure(text)
    assert isinstance(error, InputError)
    assert "a worker has beam_python3.10_sdk:2.70.0; the launching process has beam_python3.11_sdk:2.77.0" in str(error)
    assert isinstance(failure("Traceback (most recent call last):\nZeroDivisionError: ours\n"), RuntimeError)


def test_a_service_that_is_not_reached_is_no_job_server() -> None:
    text = "HTTPSConnectionPool(host='storage.googleapis.com', port=443): Max retries exceeded: Connection refused"
    error = failure(text, service=True)
    assert isinstance(error, ExtremisError)
    assert "Dataflow refused the job, ended the job, or cannot be reached: HTTPSConnectionPool" in str(error)
    assert isinstance(failure("Traceback (most recent call last):\nKeyError: ours\n", service=True), RuntimeError)
