"""Stored data: Arrow schemas, manifests, layout of paths, atomic publishing."""

import functools
from pathlib import Path

VERSION = "0.2.0"  # of this code; setup.cfg reads it here
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

        return str(COMMIT)
    except ImportError:
        import subprocess  # help and a wheel need none
    root = Path(__file__).resolve().parents[1]  # not a repository around it, which has commits of another project
    command = ["git", "--git-dir", str(root / ".git"), "--work-tree", str(root), "--no-optional-locks", "describe"]
    options = ["--always", "--dirty=+dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run([*command, *options], capture_output=True, text=True, timeout=10, check=True).stdout[:-1]
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN
