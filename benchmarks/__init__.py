"""Measured claims, one module per claim: `python -m benchmarks.NAME`."""

import sys
from types import TracebackType


def _name_missing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one line that names the extra of a missing module; show any other error as Python does."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None or error.name.startswith("benchmarks"):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(f"missing: {error.name}. Install it with: pip install -e '.[bench]'\n")
    sys.exit(2)


sys.excepthook = _name_missing
