"""The wheel of this checkout."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

from tests.command import ROOT

SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
PACKAGES = {name.split(".")[0] for name in SETUP["options"]["packages"].split()}
TATE = "examples/tate"


def copy_source(folder: Path) -> Path:
    """Copy what an installation needs: no leftovers of an earlier build."""
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in (*PACKAGES, TATE):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def installed_files() -> set[str]:
    """Name the files that an installation has: those of the packages, the example's and the commit."""
    sources = {ROOT / name: name for name in PACKAGES} | {ROOT / TATE: "extremis/tate"}
    files = {f"{name}/{path.relative_to(root)}" for root, name in sources.items() for path in root.rglob("*.*")}
    return {name for name in files if "__pycache__" not in name} | {"schemas/_commit.py"}


def build_wheel(folder: Path) -> Path:
    """Build the wheel below `folder` as a release does: of a source archive."""
    (source := folder / "source").mkdir()
    dist = folder / "dist"
    words = [sys.executable, "setup.py", "-q", "sdist", "-d", dist]
    subprocess.run(words, cwd=copy_source(source), check=True, timeout=300)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", dist, *dist.iterdir()]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = dist.glob("*.whl")
    return wheel
