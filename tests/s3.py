"""Local servers that speak S3, as processes of their own, and a network in front of one that can fail."""

import asyncio
import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import boto3
import pytest

from tests.command import ROOT
from tests.faults import Proxy, proxy

# A real server: it stores files, and answers in parallel. It refuses an object `x` beside `x/y`, and segments of a key
# of more than 255 bytes, as its disk does.
VERSITYGW = "github.com/versity/versitygw/cmd/versitygw", "v1.8.0"
READER = "reader"  # versitygw's other account, which may read where a bucket's policy says so


@contextmanager
def serve(log: Path, kind: str = "moto") -> Iterator[int]:
    """The port of a moto server, or of versitygw, that runs until the block ends; it writes to `log`, and beside it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    if kind == "moto":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    else:
        objects, accounts = log.with_name("objects"), log.with_name("accounts")
        objects.mkdir()
        accounts.mkdir()
        reader = {"access": READER, "secret": "secret", "role": "user"}
        (accounts / "users.json").write_text(json.dumps({"accessAccounts": {READER: reader}}))
        account = ["--access", "key", "--secret", "secret", "--iam-dir", str(accounts), "--quiet"]
        command = [_versitygw(), *account, "--port", f"127.0.0.1:{port}", "posix", str(objects)]
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            _wait_for(port, server)
            yield port
        finally:
            server.kill()
            server.wait()


def _versitygw() -> str:
    """Return the path of versitygw, which Go installs once into this checkout; skip the test where it cannot."""
    if (found := shutil.which("versitygw")) is not None:
        return found
    module, version = VERSITYGW
    folder = ROOT / ".cache" / f"versitygw-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:  # of other processes of this run of tests
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / "versitygw").exists():
            return str(folder / "versitygw")
        if shutil.which("go") is None:
            pytest.skip("no Go here to install versitygw with")
        command, env = ["go", "install", f"{module}@{version}"], {**os.environ, "GOBIN": str(folder)}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"versitygw cannot be installed: {done.stderr.strip()[-200:]}")
    return str(folder / "versitygw")


def variables(url: str, account: str = "key") -> dict[str, str]:
    """Return the environment variables by which the user of an account reaches a store at `url`."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": account,
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }


@contextmanager
def reached(url: str, account: str = "key") -> Iterator[None]:
    """This process reaches s3:// at `url` as a user would: by environment variables."""
    s3fs = pytest.importorskip("s3fs")
    with pytest.MonkeyPatch.context() as patch:
        # botocore's own retries would hide how often ours have to help
        for name, value in {**variables(url, account), "AWS_MAX_ATTEMPTS": "1"}.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        yield
        s3fs.S3FileSystem.clear_instance_cache()


@contextmanager
def reached_through_proxy(server: tuple[str, int]) -> Iterator[Proxy]:
    """A proxy before `server`, by which this process reaches s3://."""
    brief = types.SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 20)})
    with proxy(server) as between, pytest.MonkeyPatch.context() as patch, reached(between.url):
        patch.setattr("s3fs.core.asyncio", brief)  # its pauses between two attempts
        yield between


class Bucket:
    """A bucket of the server as its owner sees it: by a client that knows nothing of fsspec, past any proxy."""

    def __init__(self, server: tuple[str, int], name: str) -> None:
        self.name = name
        self._client = boto3.client(
            "s3",
            endpoint_url=f"http://{server[0]}:{server[1]}",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
            region_name="us-east-1",
        )
        self._client.create_bucket(Bucket=name)

    def keys(self, prefix: str) -> list[str]:
        """List the keys that begin with `prefix`, without it."""
        return [*self.stamps(prefix)]

    def stamps(self, prefix: str) -> dict[str, str]:
        """Return the ETag of each of `keys`."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        entries = [entry for page in pages for entry in page.get("Contents", [])]
        return {entry["Key"].removeprefix(prefix): entry["ETag"] for entry in entries}

    def read(self, key: str) -> bytes:
        return self._client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def objects(self, prefix: str) -> dict[str, bytes]:
        """Return the content of each of `keys`."""
        return {key: self.read(prefix + key) for key in self.keys(prefix)}

    def get_folder(self, prefix: str, folder: Path) -> None:
        """Copy the objects whose keys begin with `prefix` to files below `folder`."""
        for key, body in self.objects(prefix).items():
            (folder / key).parent.mkdir(parents=True, exist_ok=True)
            (folder / key).write_bytes(body)

    def put(self, key: str, body: bytes) -> None:
        self._client.put_object(Bucket=self.name, Key=key, Body=body)

    def put_folder(self, folder: Path, prefix: str) -> None:
        """Copy the files below `folder` to keys that begin with `prefix`."""
        for path in folder.rglob("*"):
            if path.is_file():
                self.put(prefix + str(path.relative_to(folder)), path.read_bytes())

    def let_read(self) -> None:
        """Let READER read and list this bucket."""
        rights = {"s3:GetObject": f"arn:aws:s3:::{self.name}/*", "s3:ListBucket": f"arn:aws:s3:::{self.name}"}
        allowed = {"Effect": "Allow", "Principal": {"AWS": [READER]}}
        stated = [{**allowed, "Action": [right], "Resource": [on]} for right, on in rights.items()]
        policy = {"Version": "2012-10-17", "Statement": stated}
        self._client.put_bucket_policy(Bucket=self.name, Policy=json.dumps(policy))

    def remove(self, key: str) -> None:
        self._client.delete_object(Bucket=self.name, Key=key)


def _wait_for(port: int, server: subprocess.Popen) -> None:
    limit = time.monotonic() + 60
    while True:
        assert server.poll() is None, "the server ended"
        assert time.monotonic() < limit, "the server does not answer"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
