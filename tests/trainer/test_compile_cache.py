"""Compiled code has a folder, even for a user who can write neither to the installation nor to a home."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.command import ROOT

USER = 65534
# The interpreter may be in the home of root.
BECOME = f"setpriv --reuid {USER} --clear-groups --inh-caps +dac_read_search --ambient-caps +dac_read_search".split()


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can become another user")
@pytest.mark.parametrize("taken", [False, True])
def test_a_user_without_a_home_compiles_into_a_folder_of_their_own(taken: bool) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o1777)
        expected = Path(temporary) / f"extremis-numba-{USER}"
        if taken:
            expected.mkdir()
        program = "import scoring.solver, os; print(os.environ['NUMBA_CACHE_DIR'])"
        absent = ("HOME", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME")
        env = {name: value for name, value in os.environ.items() if name not in absent} | {"TMPDIR": temporary}
        done = subprocess.run(
            [*BECOME, sys.executable, "-c", program], capture_output=True, text=True, env=env, cwd=ROOT, check=False
        )
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.strip())
        assert (folder == expected) is not taken
        assert (folder.stat().st_uid, folder.stat().st_mode & 0o777) == (USER, 0o700)
        assert any(folder.iterdir())
