"""Engines made of pinned pieces: Flink's and Spark's jars from PyPI, Beam's runners from Maven, one job server of them.

Beam's ready-made job servers are not on Maven Central for every version; a jar of a runner and all that it depends on
is one. Needs Java 17 and Maven. What is made is kept, by its versions, in the folder that EXTREMIS_ENGINES names.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.command import ROOT

HOME = Path(os.environ.get("EXTREMIS_ENGINES") or ROOT / "build" / "engines")
RUNNER = "2.70.0"  # Beam's runners in Java
_DOWNLOAD_SECONDS = 900
JOB_SERVICE = "2.65.0"  # the newest beam-runners-java-job-service on Maven Central


@dataclass(frozen=True)
class Pieces:
    """Pieces of an engine: a source distribution on PyPI whose `folders` are kept, and Maven artifacts by version.

    `left_out`: beginnings of jars that the job server finds beside itself. `main` is its class.
    """

    name: str
    version: str
    sdist: str
    folders: tuple[str, ...]
    artifacts: tuple[tuple[str, str, str], ...]
    main: str
    left_out: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return HOME / f"{self.name}-{self.version}-beam-{RUNNER}"

    @property
    def job_server(self) -> Path:
        return self.folder / "job-server.jar"


FLINK = Pieces(
    "flink",
    "1.19.3",
    "apache-flink-libraries",
    ("bin", "lib"),
    (("org.apache.beam", "beam-runners-flink-1.19", RUNNER), ("org.slf4j", "slf4j-simple", "2.0.16")),
    "org.apache.beam.runners.flink.FlinkJobServerDriver",
)
SPARK = Pieces(
    "spark",
    "3.5.3",
    "pyspark",
    ("jars",),
    (("org.apache.beam", "beam-runners-spark-3", RUNNER),),
    "org.apache.beam.runners.spark.SparkJobServerDriver",
    ("spark-", "scala-", "hadoop-", "slf4j-"),
)
PIECES = {pieces.name: pieces for pieces in (FLINK, SPARK)}


def missing_tools() -> list[str]:
    """Return the programs that engines need and this machine has not."""
    return [name for name in ("java", "mvn") if shutil.which(name) is None]


def install(pieces: Pieces) -> None:
    """Download and build what is not there yet: a few minutes, once."""
    if pieces.job_server.exists():
        return
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME) as making:
        folder = Path(making) / "made"
        folder.mkdir()
        _download(pieces, Path(making), folder)
        (folder / "pom.xml").write_text(_pom(pieces.artifacts))
        command = ["mvn", "-q", "-B", "dependency:build-classpath", "-Dmdep.outputFile=classpath"]
        subprocess.run(command, cwd=folder, check=True, timeout=_DOWNLOAD_SECONDS)
        jars = [Path(name) for name in (folder / "classpath").read_text().strip().split(":")]
        kept = [jar for jar in jars if not jar.name.startswith(pieces.left_out or ("\0",))]
        merge_jars(kept, folder / pieces.job_server.name, pieces.main)
        folder.rename(pieces.folder)


def merge_jars(jars: Iterable[Path], out: Path, main: str) -> None:
    """Write one jar that `java -jar` runs: the first of files of one name, the lines of all registers of services."""
    seen = {"META-INF/MANIFEST.MF"}
    services: dict[str, list[str]] = {}
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as merged:
        merged.writestr(
            "META-INF/MANIFEST.MF", f"Manifest-Version: 1.0\r\nMain-Class: {main}\r\nMulti-Release: true\r\n\r\n"
        )
        for jar in jars:
            with zipfile.ZipFile(jar) as source:
                for name in source.namelist():
                    if name.startswith("META-INF/services/") and not name.endswith("/"):
                        services.setdefault(name, []).append(source.read(name).decode())
                    elif name not in seen and not _belongs_to_one_jar(name):
                        seen.add(name)
                        merged.writestr(name, source.read(name))
        for name, texts in services.items():
            merged.writestr(name, "\n".join(texts) + "\n")


def _belongs_to_one_jar(name: str) -> bool:
    signature = name.startswith("META-INF/") and name.upper().endswith((".SF", ".RSA", ".DSA"))
    return signature or name.endswith(("/", "module-info.class"))


def _download(pieces: Pieces, making: Path, folder: Path) -> None:
    name = f"{pieces.sdist}=={pieces.version}"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-d",
        str(making),
        name,
    ]
    subprocess.run(command, check=True, timeout=_DOWNLOAD_SECONDS)
    (sdist,) = making.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        for member in archive:
            parts = Path(member.name).parts  # <name>/deps/<folder>/<file>
            if len(parts) > 3 and parts[1] == "deps" and parts[2] in pieces.folders and member.isfile():
                member.name = str(Path(*parts[2:]))
                archive.extract(member, folder, filter="data")
    sdist.unlink()


def _pom(artifacts: Sequence[tuple[str, str, str]]) -> str:
    def dependency(group: str, name: str, version: str) -> str:
        parts = {"groupId": group, "artifactId": name, "version": version}
        return f"<dependency>{''.join(f'<{tag}>{text}</{tag}>' for tag, text in parts.items())}</dependency>"

    managed = dependency("org.apache.beam", "beam-runners-java-job-service", JOB_SERVICE)
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>engines</groupId><artifactId>engine</artifactId><version>1</version>"
        f"<dependencyManagement><dependencies>{managed}</dependencies></dependencyManagement>"
        f"<dependencies>{''.join(dependency(*each) for each in artifacts)}</dependencies></project>\n"
    )
