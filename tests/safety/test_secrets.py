"""Credentials that a URL carries are in no message, manifest, config or report."""

import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as some

from extremis.console import say
from schemas.errors import ExtremisError, InputError, StorageError, TableError, has_credentials, redact
from tests.builders import build_data
from tests.command import ROOT, call, environment, refused, sets

SECRET = "hunter2"
AZURE = "abfss://container@account.dfs.core.windows.net/x"
PLACE = f"memory://user:{SECRET}@host"
SAFE = some.text("abcdefgh0123456789-._~%+=", min_size=1, max_size=20)


@given(SAFE, SAFE)
def test_user_and_password_go_whatever_they_are(user: str, password: str) -> None:
    text = f"could not read ftp://{user}:{password}@host/a/b: refused"
    assert redact(text) == "could not read ftp://***@host/a/b: refused"


@pytest.mark.parametrize(
    "name", ["X-Amz-Signature", "X-Amz-Security-Token", "sig", "token", "AWSAccessKeyId", "api_key"]
)
def test_signatures_and_tokens_of_a_query_go(name: str) -> None:
    assert redact(f"GET https://h/p?a=1&{name}={SECRET}&b=2 failed") == f"GET https://h/p?a=1&{name}=***&b=2 failed"


SLASHED = some.text("abc0/+=", min_size=4, max_size=20).map(lambda text: f"s{text}")


@given(SAFE, SLASHED)
def test_a_password_with_slashes_goes(user: str, password: str) -> None:
    for scheme in ("s3", "ftp", "gs"):
        said = redact(f"could not read {scheme}://{user}:{password}@host/a/b: refused")
        assert said == f"could not read {scheme}://***@host/a/b: refused"


@pytest.mark.parametrize(
    "place",
    [
        f"s3://KEY:{SECRET}@bucket/x",
        f"s3://KEY:{SECRET}/ab/cd@bucket/x",
        f"s3a://KEY:{SECRET}/ab",
        f"s3://{SECRET}@bucket",
        f"S3://{SECRET}@bucket",
        f"gs://{SECRET}@bucket/x",
        f"gcs://a:{SECRET}@bucket",
        f"simplecache::s3://KEY:{SECRET}@bucket/x",
    ],
)
def test_credentials_of_a_bucket_are_refused_and_not_said(place: str, tmp_path: Path) -> None:
    for arguments in (
        ("shard", place, tmp_path / "data"),
        ("shard", tmp_path, place),
        ("inspect", place),
        ("train", "random", place, tmp_path / "run"),
        ("run", "random", tmp_path, place),
        ("export", place, place, place),
        ("predict", place, place, "out.jsonl"),
    ):
        done = call(*arguments)
        if "input form" not in done.err and "no table" not in done.err:
            refused(done, "the URL contains credentials", "AWS_ACCESS_KEY_ID")
        assert done.status == 2
        assert SECRET not in done.out + done.err


def test_an_access_point_and_a_port_are_no_credentials() -> None:
    for place in (
        "s3://arn:aws:s3:eu-west-1:123:accesspoint/name/key",
        "http://host:8080/a@v1",
        "s3://b/key@v1:2",
        AZURE,
    ):
        assert redact(place) == place
        assert not has_credentials(place)


@given(some.text())
def test_other_texts_stay(text: str) -> None:
    if "://" not in text:
        assert redact(text) == text
    assert redact("s3://bucket/key@v1: mail a@b.c") == "s3://bucket/key@v1: mail a@b.c"


@pytest.mark.parametrize("kind", [ExtremisError, InputError, TableError, StorageError])
def test_no_error_holds_them(kind: type[ExtremisError], capsys: pytest.CaptureFixture[str]) -> None:
    error = kind(f"{PLACE}/x: gone")
    assert SECRET not in str(error) + repr(error)
    say(f"{PLACE}/x")
    assert SECRET not in capsys.readouterr().err


def test_a_whole_run_leaves_them_nowhere() -> None:
    """Train, evaluate, inspect and report on a prefix with a password; then look at every byte that was written."""
    data, run = f"{PLACE}/data", f"{PLACE}/run"
    build_data(data, labels=20)
    said = ""
    for arguments in (
        ("train", "random", data, run, *sets("order.batch=16", "train.epochs=1", "negatives.hard=0"), "--json"),
        ("evaluate", data, run, "--json"),
        ("inspect", data, "--rows", "0", "--json"),
        ("inspect", run, "--verify", "--json"),
        ("report", run, "--json"),
        ("inspect", f"{PLACE}/nothing"),
        ("train", "random", data, run),
    ):
        done = call(*arguments)
        assert "Traceback" not in done.err, done.err
        said += done.out + done.err
    assert SECRET not in said
    assert "***@host" in said
    files = {name: content.getvalue() for name, content in fsspec.filesystem("memory").store.items() if "/run/" in name}
    assert any(name.endswith("report.html") for name in files)
    assert any(name.endswith("config.toml") for name in files)
    assert [name for name, content in files.items() if SECRET.encode() in content] == []


def test_options_of_the_store_are_not_said(tmp_path: Path) -> None:
    """fsspec takes credentials from the environment; a store that cannot be reached is named without them."""
    env = environment(
        {"FSSPEC_S3_KEY": "someone", "FSSPEC_S3_SECRET": SECRET, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    )
    env |= {"AWS_MAX_ATTEMPTS": "1"}
    command = [sys.executable, "-m", "extremis", "inspect", "s3://bucket/data"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert "s3://bucket/data" in done.stderr
    assert SECRET not in done.stdout + done.stderr
