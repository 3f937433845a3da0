"""Prism, Beam's runner for one machine, of the Beam that is installed: built by Go once."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import apache_beam
import pytest

from tests.engines.pieces import HOME

_MODULE = f"github.com/apache/beam/sdks/v2/go/cmd/prism@v{apache_beam.__version__}"
_BUILD_SECONDS = 900


def program() -> Path:
    """Return Prism; skip, with the reason, where it is not there and cannot be built: minutes, once."""
    place = HOME / f"prism-{apache_beam.__version__}" / "prism"
    if place.exists():
        return place
    if shutil.which("go") is None:
        pytest.skip(f"Prism needs Go, which is not here, or a program {place}")
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME) as making:
        env = {**os.environ, "GOBIN": making}
        command = ["go", "install", _MODULE]
        try:
            subprocess.run(command, env=env, check=True, timeout=_BUILD_SECONDS, capture_output=True, text=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(f"{' '.join(command)}: {str(error.stderr or error)[-300:]}")
        place.parent.mkdir(exist_ok=True)
        Path(making, "prism").rename(place)
    return place
