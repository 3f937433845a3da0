"""The wheel of this checkout."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

from tests.command import ROOT


def build_wheel(folder: Path) -> Path:
    """Build the wheel below `folder` as a release does: of a source archive, without leftovers of other builds."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    source, out = folder / "source", folder / "dist"
    source.mkdir()
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    packages = {name.split(".")[0] for name in setup["options"]["packages"].split()}
    for name in (*packages, *setup["options"]["package_dir"].split()[2::3]):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", out], cwd=source, check=True, timeout=300)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, *out.iterdir()]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = out.glob("*.whl")
    return wheel
