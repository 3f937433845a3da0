"""The whole loop on an object store, its miner on Flink."""

import re
from pathlib import Path

import pytest

from tests.command import ROOT, extremis, sets
from tests.engines.clusters import Cluster
from tests.engines.conftest import SMALL
from tests.engines.worker import SECONDS, process, write_worker
from tests.s3 import Bucket

pytestmark = pytest.mark.engine

BUCKET = "loop"
CHOICES = sets("order.batch=128", "train.epochs=4", "refresh.stale=wait")


def test_the_miner_on_flink(flink: Cluster, bucket: Bucket, env: dict[str, str], raw: Path, tmp_path: Path) -> None:
    """Its table is that of a miner in process."""
    worker = write_worker(tmp_path / "extremis-worker", ROOT, env=env)
    data, run, here = (f"s3://{BUCKET}/{name}" for name in ("data", "run", "here"))
    extremis("shard", raw, data, *SMALL, "--propensity", "0.55,1.5", env=env)
    done = extremis(
        "run", "astra", data, run, *CHOICES, "--json", "--", *process(flink, worker), env=env, timeout=SECONDS
    )
    assert done.json["table_versions"] == {"0": None, "1": None, "2": 2, "3": 2}
    assert re.search(r"\d workers? answered", bucket.read("run/run.log").decode())
    mined = extremis("inspect", f"{run}/negatives/epoch-0002/queries", "--verify", "--json", env=env).json
    again = extremis("mine", data, run, "--epoch", "0", "--out", here, "--json", env=env).json
    assert mined["digest"] == again["tables"]["queries"]["digest"]
