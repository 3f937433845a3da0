"""Stored data: Arrow schemas, manifests, layout of paths, atomic publishing."""

import functools
import os
from pathlib import Path

VERSION = "0.1.0"  # of this code; setup.cfg reads it here
PAD = -1  # fills places without a label in arrays of label ids
LABEL_TEXTS = "labels"  # name of the source of label texts, also in a mix of sources
UNKNOWN = "unknown"  # a commit that nobody recorded


def code_version() -> str:
    """Return the version of Extremis."""
    return VERSION


@functools.cache
def commit() -> str:
    """Return the commit of this code, with `+dirty` if files have changed since; UNKNOWN without a wheel or git.

    The build writes it into the wheel (setup.py); in a checkout, the first call asks git.
    """
    try:
        from schemas._commit import COMMIT
    except ImportError:
        return _ask_git(Path(__file__).resolve().parents[1])
    return str(COMMIT)


def _ask_git(root: Path) -> str:
    import subprocess  # help and a wheel need none

    if not (root / ".git").exists():  # a repository around an installation has commits of another project
        return UNKNOWN
    place = {"GIT_DIR": str(root / ".git"), "GIT_WORK_TREE": str(root), "GIT_OPTIONAL_LOCKS": "0"}
    command = ["git", "describe", "--always", "--dirty=+dirty", "--abbrev=12", "--exclude=*"]
    try:
        told = subprocess.run(
            command, env={**os.environ, **place}, cwd=root, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
    return told.stdout.strip()
