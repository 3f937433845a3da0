"""A local server that speaks S3, as a process of its own, and a network in front of it that can fail."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest

from tests.faults import Proxy, proxy


@contextmanager
def serve(log: Path) -> Iterator[int]:
    """The port of a moto server that runs until the block ends; it writes to `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            _wait_for(port, server)
            yield port
        finally:
            server.kill()
            server.wait()


@contextmanager
def reached_through_proxy(server: tuple[str, int]) -> Iterator[Proxy]:
    """A proxy before `server`, by which this process reaches s3:// as a user would: by environment variables."""
    s3fs = pytest.importorskip("s3fs")
    with proxy(server) as between, pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("AWS_ENDPOINT_URL", between.url),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
            ("AWS_MAX_ATTEMPTS", "1"),  # botocore's own retries would hide how often ours have to help
        ):
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield between
        s3fs.S3FileSystem.clear_instance_cache()


def client(server: tuple[str, int]) -> "boto3.client":
    """A client that knows nothing of fsspec, and goes past the proxy."""
    return boto3.client(
        "s3",
        endpoint_url=f"http://{server[0]}:{server[1]}",
        aws_access_key_id="key",
        aws_secret_access_key="secret",
        region_name="us-east-1",
    )


def put(server: tuple[str, int], bucket: str, folder: Path, prefix: str) -> None:
    """Copy the files below `folder` to keys that begin with `prefix`."""
    s3 = client(server)
    for path in folder.rglob("*"):
        if path.is_file():
            s3.put_object(Bucket=bucket, Key=prefix + str(path.relative_to(folder)), Body=path.read_bytes())


def _wait_for(port: int, server: subprocess.Popen) -> None:
    limit = time.monotonic() + 60
    while True:
        assert server.poll() is None, "moto_server ended"
        assert time.monotonic() < limit, "moto_server does not answer"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
