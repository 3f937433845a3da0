"""Contents of an installation: one version, hints, recipes, the page's files, and only what an extra asks for."""

import json
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from schemas import code_version
from tests.command import ROOT, environment
from tests.wheel import PACKAGES, SETUP, build_wheel, copy_source, installed_files


def test_the_version_is_said_in_one_place() -> None:
    assert SETUP["metadata"]["version"] == "attr: schemas.VERSION"
    pattern = re.compile(rf"version\s*=\s*['\"]?{re.escape(code_version())}\b", re.IGNORECASE)
    files = (*ROOT.glob("*.toml"), *ROOT.glob("*.cfg"), *ROOT.glob("*/__init__.py"))
    assert [path.parent.name for path in files if pattern.search(path.read_text())] == ["schemas"]
    assert not [path for path in ROOT.glob("*/__init__.py") if "__version__" in path.read_text()]
    # Commands to copy name the wheel and the images of the release.
    released = code_version().partition(".dev")[0]
    pages = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.yaml"))
    named = re.compile(r"extremis(?:_xc-|-[a-z-]+:)(\d+\.\d+\.\d+)")
    assert {version for path in pages for version in named.findall(path.read_text())} == {released}
    assert f"\n## {released}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_an_installation_has_each_file_of_each_package(tmp_path: Path) -> None:
    """Nothing that code reads beside itself may be missing, nor may hints for type checkers."""
    (source := tmp_path / "source").mkdir()
    run(sys.executable, "setup.py", "-q", "build_py", "--build-lib", tmp_path / "built", cwd=copy_source(source))
    built = {str(path.relative_to(tmp_path / "built")) for path in (tmp_path / "built").rglob("*.*")}
    assert built == installed_files()
    assert {f"{package}/py.typed" for package in PACKAGES - {"recipes"}} <= built


def test_extras_keep_the_sides_apart() -> None:
    extras = SETUP["options.extras_require"]
    names = {extra: {re.split(r"[<>=\[;]", line)[0] for line in extras[extra].split("\n") if line} for extra in extras}
    assert not names["trainer"] & {"apache-beam", "onnxscript", "tensorboard"}
    assert not names["pipelines"] & {"torch", "transformers", "tensorboard"}
    assert {"jinja2", "plotly"} <= names["report"]
    assert names["serve"] <= names["trainer"] & (names["pipelines"] | {"safetensors"})
    assert not names["serve"] & {"torch", "numba", "scipy"}


def test_no_text_tells_anyone_to_install_a_foreign_package() -> None:
    """`extremis` on PyPI is another project: hints name a checkout, the wheel or the image."""
    foreign = re.compile(r"pip install[^\n]*[ '\"]extremis(?!_xc|-xc)")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    ends = (".py", ".md", ".cfg", ".toml", ".txt", "file")
    texts = [path for path in files.split("\0") if path.endswith(ends) and not path.startswith("tests/cases/")]
    assert not [path for path in texts if foreign.search((ROOT / path).read_text())]


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_constraints_pin_each_package_once_for_a_version_of_python(version: str) -> None:
    lines = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines()]
    facts = {"python_version": version, "python_full_version": f"{version}.0"}
    valid = [line for line in lines if line.marker is None or line.marker.evaluate(facts)]
    names = [canonicalize_name(line.name) for line in valid]
    assert len(set(names)) == len(names)
    (numpy,) = (line for line in valid if line.name == "numpy")
    assert numpy.specifier.contains("2.2.6") == (version == "3.10")  # later ones need 3.11


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.slow
def test_the_wheel_of_a_source_archive_holds_what_the_checkout_has_and_runs(wheel: Path, tmp_path: Path) -> None:
    inside = zipfile.ZipFile(wheel)
    assert {name for name in inside.namelist() if ".dist-info/" not in name} == installed_files()
    (page,) = (inside.read(name).decode() for name in inside.namelist() if name.endswith("/METADATA"))
    assert re.search(r"^License-File: LICENSE$", page, re.MULTILINE)
    assert "# Extremis" in page
    assert not re.search(r"\]\((?!https?:)", page)  # a page of an index has none of our files
    site = tmp_path / "site"
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    quick = "encoder.dimension=16 encoder.hidden=0 encoder.residual=false negatives.hard=0 negatives.random=50"
    words = [word for setting in (*quick.split(), "train.epochs=1") for word in ("--set", setting)]
    demo = run(
        *(sys.executable, "-m", "extremis", "demo", "out", "--json", *words),
        cwd=tmp_path,
        env=environment({"PYTHONPATH": str(site)}),
    )
    assert "P@1" in json.loads(demo.stdout.splitlines()[-1])["metrics"]
    assert f"1/4 shard {site / 'extremis' / 'tate'} " in demo.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("extra", "absent", "works"),
    [
        ("", ("apache_beam", "torch"), "schemas.manifest, extremis.cli"),
        ("[s3,gcs]", ("apache_beam", "torch"), "s3fs, gcsfs"),
        ("[pipelines]", ("torch", "transformers"), "pipelines.shard, pipelines.mine"),
        ("[http]", ("torch", "apache_beam", "sklearn"), "scoring.predict, fastapi_offline, uvicorn, prometheus_client"),
        ("[trainer]", ("apache_beam", "plotly", "tensorboard", "onnxscript"), "trainer.loop, trainer.stream"),
        ("[serve]", ("apache_beam", "torch", "numba", "scipy"), "scoring.predict, scoring.predict"),
        ("[serve,onnx]", ("torch", "onnx", "scipy"), "scoring.predict, scoring.encoders"),
        ("[report]", ("apache_beam",), "extremis.reporting.page, jinja2, plotly"),
        ("[docs]", ("apache_beam", "torch"), "zensical, mkdocstrings"),
    ],
)
def test_a_clean_environment_gets_its_side_alone(
    wheel: Path, extra: str, absent: tuple[str, ...], works: str, tmp_path: Path
) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}{extra}"]
    if subprocess.run(install, timeout=1500, check=False).returncode:
        pytest.skip("the packages cannot be had here")
    code = f"import importlib.util as u; print(*[name for name in {absent} if u.find_spec(name)]); import {works}"
    assert not run(python, "-c", code, cwd=tmp_path).stdout.strip()
    assert code_version() in run(python, "-m", "extremis", "--version", cwd=tmp_path).stdout
    assert "astra" in run(python, "-m", "extremis", "recipes", cwd=tmp_path).stdout
    shutil.rmtree(tmp_path / "env")  # gigabytes, with torch
