"""What an installation brings: one version, hints, recipes, the page's files, and no more than an extra asks for."""

import configparser
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from schemas.manifest import code_version

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def setup() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def test_the_version_is_said_in_one_place(setup: configparser.ConfigParser) -> None:
    version = setup["metadata"]["version"]
    assert code_version() == version
    pattern = re.compile(rf"version\s*=\s*['\"]?{re.escape(version)}\b")
    said = [path.name for path in (*ROOT.glob("*.toml"), *ROOT.glob("*.cfg")) if pattern.search(path.read_text())]
    assert said == ["setup.cfg"]
    assert not [path for path in ROOT.glob("*/__init__.py") if "__version__" in path.read_text()]


def test_every_package_is_named_and_ships_its_hints(setup: configparser.ConfigParser) -> None:
    named = set(setup["options"]["packages"].split())
    roots = {name.split(".")[0] for name in named}
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for root in roots for path in (ROOT / root).rglob("__init__.py")
    }
    assert named == found
    for root in roots - {"recipes"}:
        assert (ROOT / root / "py.typed").exists()
        assert "py.typed" in setup["options.package_data"][root]


def test_every_file_that_is_no_module_is_package_data(setup: configparser.ConfigParser) -> None:
    """In the wheel is what setup.cfg names: nothing that code reads beside itself may be missing there."""
    data = {name: patterns.replace(",", " ").split() for name, patterns in setup["options.package_data"].items()}
    for root in {name.split(".")[0] for name in setup["options"]["packages"].split()}:
        for path in (ROOT / root).rglob("*"):
            if path.is_file() and path.suffix != ".py" and "__pycache__" not in path.parts and path.suffix != ".pyc":
                package = ".".join(path.parent.relative_to(ROOT).parts)
                assert any(path.match(pattern) for pattern in data.get(package, [])), path


def test_extras_keep_the_sides_apart(setup: configparser.ConfigParser) -> None:
    extras = setup["options.extras_require"]
    names = {extra: {re.split(r"[<>=\[;]", line)[0] for line in extras[extra].split("\n") if line} for extra in extras}
    assert not names["trainer"] & {"apache-beam", "dask", "distributed"}
    assert not names["pipelines"] & {"torch", "transformers", "tensorboard"}
    assert {"jinja2", "plotly"} <= names["report"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "absent", "works"),
    [
        ("trainer", "apache_beam", "import trainer.loop, trainer.stream, extremis.cli"),
        ("pipelines", "torch", "import pipelines.shard, pipelines.mine, extremis.cli"),
    ],
)
def test_a_clean_environment_gets_its_side_alone(extra: str, absent: str, works: str, tmp_path: Path) -> None:
    """A wheel, installed with one extra into an environment of its own; recipes are in it."""
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    assert {"recipes/astra.toml", "extremis/report/page.html", "trainer/py.typed"} <= set(inside)
    assert not [name for name in inside if name.startswith(("tests/", "benchmarks/"))]
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", f"{wheel}[{extra}]"]
    if subprocess.run(install, timeout=1500, check=False).returncode:
        pytest.skip("the packages cannot be had here")
    code = (
        f"import importlib.util as u; assert u.find_spec({absent!r}) is None; {works}; "
        "from trainer.config import load_recipe; print(load_recipe('astra').method)"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=300, check=False)
    assert done.stdout.strip() == "astra", done.stderr
    said = subprocess.run(
        [python, "-m", "extremis", "--version"], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert code_version() in said.stdout
