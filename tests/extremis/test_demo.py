"""The demo on a few rows: its lines show each stage of the loop, and what to type next."""

import re
import shutil
from pathlib import Path

import pytest

from extremis import using
from tests.command import ROOT, call, sets

STAGES = (
    "1/4 shard ",
    "2/4 train ",
    r"epoch 0: dumps [\d,]+ embeddings and [\d,]+ label vectors, for table 2\n",
    r"epoch 2: joins table 2 to [\d,]+ rows\n",
    r"epoch 2 \(3 of 3\) [^\n]* table 2, recall \d\.\d\d, 2 epochs old ",
    "3/4 fuse",
    "4/4 evaluate",
    "this run[^\n]*±",
    "extremis report [^\n]*\n[^\n]*extremis export [^\n]*extremis predict [^\n]*\n[^\n]*extremis shard [^\n]*\n$",
)


def test_the_demos_lines(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tate = shutil.copytree(raw, tmp_path / "tate")
    shutil.copy(ROOT / "examples" / "tate" / "recipe.toml", tate)
    monkeypatch.setattr(using, "_example", lambda: str(tate))
    demo = call("demo", tmp_path / "demo", *sets("data.holdout=0.1", "train.epochs=3"))
    assert demo.status == 0, demo.err
    assert re.search("(?s)" + ".*".join(STAGES), demo.err + demo.out), demo.err + demo.out
    assert len((demo.err + demo.out).splitlines()) < 50
