"""The whole loop on an object store, its miner on Flink."""

import re
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest

from tests.command import ROOT, extremis, sets
from tests.engines.clusters import Cluster
from tests.engines.conftest import SMALL
from tests.engines.worker import SECONDS, process, write_worker
from tests.s3 import serve

pytestmark = pytest.mark.engine

CHOICES = sets("order.batch=128", "train.epochs=4", "refresh.stale=wait")


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yield the environment variables by which a store with a bucket `loop` is reached."""
    pytest.importorskip("moto")
    pytest.importorskip("s3fs")
    names = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    with serve(tmp_path / "moto.log") as port:
        url = f"http://127.0.0.1:{port}"
        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
        )
        client.create_bucket(Bucket="loop")
        yield {"AWS_ENDPOINT_URL": url, **names}


def test_the_miner_on_flink(flink: Cluster, env: dict[str, str], raw: Path, tmp_path: Path) -> None:
    """Its table is that of a miner in process."""
    worker = write_worker(tmp_path / "extremis-worker", ROOT, env=env)
    data, run, here = (f"s3://loop/{name}" for name in ("data", "run", "here"))
    extremis("shard", raw, data, *SMALL, "--propensity", "0.55,1.5", env=env)
    done = extremis(
        "run", "astra", data, run, *CHOICES, "--json", "--", *process(flink, worker), env=env, timeout=SECONDS
    )
    assert done.json["table_versions"] == {"0": None, "1": None, "2": 2, "3": 2}
    assert re.search(r"\d workers? answered", done.err)
    mined = extremis("inspect", f"{run}/negatives/epoch-0002/queries", "--verify", "--json", env=env).json
    again = extremis("mine", data, run, "--epoch", "0", "--out", here, "--json", env=env).json
    assert mined["digest"] == again["tables"]["queries"]["digest"]
