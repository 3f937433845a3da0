"""The wheel of this checkout."""

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

from tests.command import ROOT


def build_wheel(folder: Path) -> Path:
    """Build the wheel below `folder`, from what an installation needs: no leftovers of an earlier build."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    source, out = folder / "source", folder / "dist"
    source.mkdir()
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    packages = {name.split(".")[0] for name in setup["options"]["packages"].split()}
    for name in (*packages, *setup["options"]["package_dir"].split()[2::3]):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", out, source]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = out.glob("*.whl")
    return wheel
