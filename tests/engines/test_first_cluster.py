"""The section of docs/runners.md on a first cluster, typed as it stands."""

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import ROOT, environment, extremis
from tests.engines import pieces
from tests.engines.conftest import SMALL, files, install
from tests.engines.worker import SECONDS

pytestmark = pytest.mark.engine

PAGE = (ROOT / "docs" / "runners.md").read_text()


def test_a_first_cluster(raw: Path, sharded: Path, tmp_path: Path) -> None:
    """Its options are printed; the command reads a small part of Tate."""
    install(pieces.FLINK)
    section = PAGE.partition("### Your first cluster on one machine\n")[2].partition("\n## ")[0]
    start = re.findall(r"^    \.venv/bin/python (-m tests\.engines flink)$", section, re.MULTILINE)
    assert len(start) == 1, section
    command = [sys.executable, *shlex.split(start[0])]
    cluster = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), cwd=ROOT, text=True)
    try:
        assert cluster.stdout is not None
        program, name, source, data, *options = shlex.split(cluster.stdout.readline())
        shown = rf"^    {program} {name} {source} {data} -- --runner=PortableRunner --job_endpoint=localhost:\d+ "
        assert re.search(shown, section, re.MULTILINE), section
        extremis(name, raw, tmp_path / data, *SMALL, *options, timeout=SECONDS)
        assert files(tmp_path / data) == files(sharded)
    finally:
        cluster.send_signal(signal.SIGINT)
        assert cluster.wait(SECONDS) == 0
