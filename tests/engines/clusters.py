"""Clusters on this machine, as plain processes on free ports that end with the block: Flink's and Spark's."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.engines.pieces import FLINK, SPARK

WORKERS = 2
_START_SECONDS = 240
# Clusters that live for minutes: a slim compiler and collector leave the processor to the work.
_JAVA = ("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")

_FLINK_CONFIG = """\
jobmanager.rpc.address: localhost
jobmanager.rpc.port: {rpc}
jobmanager.bind-host: localhost
jobmanager.memory.process.size: 1024m
taskmanager.bind-host: localhost
taskmanager.host: localhost
taskmanager.numberOfTaskSlots: 1
taskmanager.memory.process.size: {memory}m
taskmanager.memory.managed.fraction: 0.2
taskmanager.memory.network.min: {network}m
taskmanager.memory.network.max: {network}m
parallelism.default: 1
rest.address: localhost
rest.bind-address: localhost
rest.port: {rest}
slot.request.timeout: 5000
heartbeat.interval: 1000
heartbeat.timeout: 60000
heartbeat.rpc-failure-threshold: 1
pekko.ask.timeout: 60 s
pekko.startup-timeout: 60 s
restart-strategy.type: fixed-delay
restart-strategy.fixed-delay.attempts: {attempts}
restart-strategy.fixed-delay.delay: 2 s
"""
_LOG = """\
rootLogger.level = INFO
rootLogger.appenderRef.c.ref = C
appender.c.name = C
appender.c.type = CONSOLE
appender.c.layout.type = PatternLayout
appender.c.layout.pattern = %d{HH:mm:ss} %-5p %c{1} - %m%n
"""


@dataclass
class Cluster:
    """A cluster that runs: what Beam is told of its job server, its log files, and its processes by name.

    by_name: what Beam is told to start a job server of its own.
    """

    name: str
    endpoints: tuple[str, ...]
    by_name: tuple[str, ...]
    folder: Path
    processes: dict[str, subprocess.Popen] = field(default_factory=dict)
    commands: dict[str, Sequence[str]] = field(default_factory=dict)
    page: int = 0  # Flink's port for questions

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start a process of the cluster, or start it again; it writes to a log of its name."""
        env = {
            **os.environ,
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_HOME": str(SPARK.folder),
            "SPARK_SCALA_VERSION": "2.12",
        }
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=self.folder)
        self.commands[name] = command

    def replace(self, name: str) -> None:
        """Kill a process of the cluster with -9, and start another in its place."""
        self.processes[name].kill()
        self.processes[name].wait()
        self.start(name, self.commands[name])

    def stop(self) -> None:
        """Stop all processes, the last one first."""
        for process in reversed(self.processes.values()):
            _stop(process)

    def log(self) -> str:
        """Return the ends of all logs."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))


@contextmanager
def flink(
    folder: Path, memory: int = 1536, network: int = 256, attempts: int = 20, settings: str = ""
) -> Iterator[Cluster]:
    """Start a JobManager, TaskManagers of one slot and `memory` MiB (`network` of them buffers), and the job server.

    Lost work is done again, `attempts` times. settings: further lines of Flink's configuration.
    """
    rpc, rest = free_ports(2)
    conf = folder / "conf"
    conf.mkdir(parents=True)
    sizes = {"memory": memory, "network": network, "attempts": attempts}
    (conf / "config.yaml").write_text(_FLINK_CONFIG.format(rpc=rpc, rest=rest, **sizes) + settings)
    (conf / "log4j.properties").write_text(_LOG)
    classpath = f"{FLINK.folder / 'lib'}/*:{FLINK.job_server}"  # Beam's jar, too, so that no job brings it
    base = [*_JAVA, f"-Dlog4j.configurationFile=file:{conf}/log4j.properties", *_open(_FLINK_OPENS), "-cp", classpath]
    java, manager_options = _task_manager_sizes(conf, classpath)
    entry, manager = "runtime.entrypoint.StandaloneSessionClusterEntrypoint", "runtime.taskexecutor.TaskManagerRunner"
    with ExitStack() as stack:
        master = f"--flink_master=localhost:{rest}"
        jar = str(unstaged([FLINK.job_server], folder) / FLINK.job_server.name)
        by_name = ("--runner=FlinkRunner", master, f"--flink_job_server_jar={jar}")
        cluster = Cluster("flink", (), by_name, folder, page=rest)
        stack.callback(cluster.stop)
        start = cluster.start
        job_manager = [*base, "-Xmx400m", f"org.apache.flink.{entry}", "--configDir", str(conf)]
        start("jobmanager", [*job_manager, "--executionMode", "cluster"])
        for number in range(WORKERS):
            own = [*base, *java, f"org.apache.flink.{manager}", "--configDir", str(conf), *manager_options]
            start(f"taskmanager-{number}", own)
        cluster.endpoints = (*serve_jobs(cluster, "job-server", f"localhost:{rest}"), master)
        _wait(cluster, lambda: _overview(rest).get("taskmanagers") == WORKERS)
        yield cluster


def serve_jobs(cluster: Cluster, name: str, master: str) -> tuple[str, ...]:
    """Start a job server beside a cluster of Flink for the JobManager at `master`; what Beam is told of it."""
    jobs, artifacts = free_ports(2)
    jar = cluster.by_name[-1].partition("=")[2]
    java = ["-Xmx512m", "-jar", jar]
    cluster.start(name, _job_server(java, jobs, artifacts, cluster.folder, ["--flink-master", master]))
    _wait(cluster, lambda: listens(jobs))
    return _endpoints(jobs, artifacts)


@contextmanager
def spark(folder: Path, memory: int = 1200) -> Iterator[Cluster]:
    """Start a master, workers of one core and an executor of `memory` MiB each, and the job server."""
    master, page, jobs, artifacts = free_ports(4)
    folder.mkdir(parents=True)
    jars = unstaged([*(SPARK.folder / "jars").iterdir(), SPARK.job_server], folder)
    classpath = f"{SPARK.folder / 'jars'}/*"
    opens = _open(_SPARK_OPENS)
    url = f"spark://127.0.0.1:{master}"
    base = [*_JAVA, *opens, "-cp", classpath]
    with ExitStack() as stack:
        cluster = Cluster("spark", _endpoints(jobs, artifacts), (), folder)
        stack.callback(cluster.stop)
        start = cluster.start
        place = ["--host", "127.0.0.1", "--port", str(master), "--webui-port", str(page)]
        start("master", [*base, "-Xmx256m", "org.apache.spark.deploy.master.Master", *place])
        _wait(cluster, lambda: listens(master))
        for number in range(WORKERS):
            size = ["--host", "127.0.0.1", "--cores", "1", "--memory", f"{memory + 500}m", "--webui-port", "0"]
            work = ["--work-dir", str(folder / f"work-{number}"), url]
            start(f"worker-{number}", [*base, "-Xmx256m", "org.apache.spark.deploy.worker.Worker", *size, *work])
        settings = {
            "executor.extraClassPath": str(SPARK.job_server),
            "executor.memory": f"{memory}m",
            "default.parallelism": str(WORKERS),
            "executor.extraJavaOptions": " ".join([*_JAVA[1:], *opens]),
            "ui.enabled": "false",
        }
        java = ["-Xmx1g", *(f"-Dspark.{name}={value}" for name, value in settings.items())]
        runnable = write_runnable(jars / SPARK.job_server.name, SPARK.main)
        cluster.by_name = (
            "--runner=SparkRunner",
            f"--spark_master_url={url}",
            f"--spark_job_server_jar={runnable}",
            *(f"--job_server_jvm_property={each}" for each in (*opens, *java)),
        )
        command = [*opens, *java, "-jar", str(runnable)]
        start("job-server", _job_server(command, jobs, artifacts, folder, [f"--spark-master-url={url}"]))
        _wait(cluster, lambda: listens(jobs))
        yield cluster


CLUSTERS = {"flink": flink, "spark": spark}


def children(pid: int) -> list[int]:
    """Return the processes below `pid`, nearest first."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    below, level = [], [pid]
    while level:
        level = [child for child, parent in parents.items() if parent in level]
        below += level
    return below


def started(cluster: Cluster, word: str) -> list[int]:
    """Return the processes that the cluster's have started with `word` in their command lines."""
    pids = []
    for process in cluster.processes.values():
        for pid in children(process.pid):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if word.encode() in line:
                pids.append(pid)
    return pids


def python_workers(cluster: Cluster) -> list[int]:
    """Return the Python workers of the cluster."""
    return started(cluster, "--provision_endpoint")


_FLINK_OPENS = {
    "java": "lang net io nio text time util lang.reflect util.concurrent util.concurrent.atomic util.concurrent.locks",
    "sun": "nio.ch",
}
_SPARK_OPENS = {
    "java": "lang lang.invoke lang.reflect io net nio util util.concurrent util.concurrent.atomic",
    "sun": "nio.ch nio.cs security.action util.calendar",
}


def _open(packages: dict[str, str]) -> list[str]:
    names = [f"{root}.{name}" for root, some in packages.items() for name in some.split()]
    return [f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in names]


def _task_manager_sizes(conf: Path, classpath: str) -> tuple[list[str], list[str]]:
    """Return options of Java and of the TaskManager that Flink derives from its configuration."""
    tool = "org.apache.flink.runtime.util.bash.BashJavaUtils"
    command = [*_JAVA, "-cp", f"{FLINK.folder / 'bin'}/bash-java-utils.jar:{classpath}", tool, "GET_TM_RESOURCE_PARAMS"]
    done = subprocess.run(
        [*command, str(conf), "", "--configDir", str(conf)], capture_output=True, text=True, check=True
    )
    mark = "BASH_JAVA_UTILS_EXEC_RESULT:"
    java, manager = (line.removeprefix(mark).split() for line in done.stdout.splitlines() if line.startswith(mark))
    return java, manager


def unstaged(jars: Iterable[Path], folder: Path) -> Path:
    """Link jars to where Beam stages none of them with a job, as it does with all that a job server is started from.

    It leaves out paths with `gradle/wrapper` in them.
    """
    place = folder / "gradle" / "wrapper"
    place.mkdir(parents=True, exist_ok=True)
    for jar in jars:
        try:
            os.link(jar, place / jar.name)
        except OSError:  # another disk
            shutil.copyfile(jar, place / jar.name)
    return place


def write_runnable(first: Path, main: str) -> Path:
    """Write a jar that `java -jar` runs with the jar `first`, and then those beside it."""
    names = " ".join([first.name, *sorted(path.name for path in first.parent.iterdir() if path != first)])
    line = f"Class-Path: {names}"
    wrapped = "\r\n ".join(line[at : at + 70] for at in range(0, len(line), 70))  # lines of a manifest are short
    runnable = first.with_name("runnable.jar")
    with zipfile.ZipFile(runnable, "w") as jar:
        jar.writestr("META-INF/MANIFEST.MF", f"Manifest-Version: 1.0\r\nMain-Class: {main}\r\n{wrapped}\r\n\r\n")
    return runnable


def _job_server(java: Sequence[str], jobs: int, artifacts: int, folder: Path, master: Sequence[str]) -> list[str]:
    ports = ["--job-port", str(jobs), "--artifact-port", str(artifacts), "--expansion-port", "-1"]
    return [*_JAVA, *java, *master, *ports, "--artifacts-dir", str(folder / "artifacts")]


def _endpoints(jobs: int, artifacts: int) -> tuple[str, ...]:
    return (
        "--runner=PortableRunner",
        f"--job_endpoint=localhost:{jobs}",
        f"--artifact_endpoint=localhost:{artifacts}",
    )


def _stop(process: subprocess.Popen) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(cluster: Cluster, ready: Callable[[], bool]) -> None:
    limit = time.monotonic() + _START_SECONDS
    while not ready():
        ended = [name for name, process in cluster.processes.items() if process.poll() is not None]
        assert not ended, f"{ended} ended\n{cluster.log()}"
        assert time.monotonic() < limit, f"no cluster\n{cluster.log()}"
        time.sleep(0.3)


def running_jobs(cluster: Cluster) -> int:
    """Return how many jobs run on a Flink cluster."""
    return _overview(cluster.page)["jobs-running"]


def jobs_left(cluster: Cluster) -> list[str]:
    """Return the states of jobs that a Flink cluster has not ended."""
    states = [job["state"] for job in _ask(cluster.page, "jobs/overview")["jobs"]]
    return [state for state in states if state not in ("FINISHED", "FAILED", "CANCELED")]


def vertices(cluster: Cluster) -> list[int]:
    """Return the vertices of each job that a Flink cluster remembers, in the order of their starts."""
    jobs = sorted(_ask(cluster.page, "jobs/overview")["jobs"], key=lambda job: job["start-time"])
    return [len(_ask(cluster.page, f"jobs/{job['jid']}")["vertices"]) for job in jobs]


def _overview(rest: int) -> dict[str, int]:
    """Return Flink's own counts; none while it does not answer."""
    try:
        return _ask(rest, "overview")
    except (OSError, ValueError):
        return {}


def _ask(rest: int, path: str) -> Any:
    with urllib.request.urlopen(f"http://localhost:{rest}/{path}", timeout=20) as answer:
        return json.load(answer)


def listens(port: int) -> bool:
    """Tell whether a process of this machine listens on `port`."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
