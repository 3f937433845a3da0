"""Credentials that expire during a run, on a server of S3, are read anew; a HEAD's bare refusal is explained."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from schemas import storage
from schemas.errors import AccessError
from tests.faults import Faults, Proxy

s3fs = pytest.importorskip("s3fs")

BUCKET = "patience"
URL = f"s3://{BUCKET}/x"
REQUESTS = {
    "HEAD": lambda: storage.exists(URL),
    "GET": lambda: storage.read_bytes(URL),
    "PUT": lambda: storage.write_bytes(URL, b"content"),
    "LIST": lambda: storage.list_names(f"s3://{BUCKET}"),
    "DELETE": lambda: storage.remove(f"s3://{BUCKET}/none"),
}


@pytest.fixture
def token(
    store: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """Yield a file of credentials, as a sidecar keeps it; the session token in it is `one`."""
    if "versitygw" in request.node.name:
        pytest.skip("versitygw refuses all session tokens")
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setattr(storage, "_pause", lambda cancelled, seconds: cancelled.wait(0.01))
    s3fs.S3FileSystem.clear_instance_cache()
    renew(file, "one")
    storage.write_bytes(URL, b"content")
    yield file
    s3fs.S3FileSystem.clear_instance_cache()


def renew(file: Path, token: str) -> None:
    file.write_text(f"[default]\naws_access_key_id=key\naws_secret_access_key=secret\naws_session_token={token}\n")


@pytest.mark.parametrize("method", REQUESTS)
def test_credentials_that_expired_are_read_anew(method: str, store: Proxy, token: Path) -> None:
    with store.failing(Faults(token="two")) as faults:
        renew(token, "two")
        REQUESTS[method]()
        refused = list(faults.refused)
        assert 1 <= len(refused) <= 3  # botocore, too, asks about a HEAD
        assert refused.count("LIST") == (refused[0] in ("HEAD", "LIST"))
        storage.write_bytes(URL, b"content")  # the client is the new one now
        assert faults.refused == refused


def test_many_readers_read_credentials_anew_once(store: Proxy, token: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    connected = []
    connect = s3fs.S3FileSystem.connect
    monkeypatch.setattr(s3fs.S3FileSystem, "connect", lambda fs, **words: connected.append(fs) or connect(fs, **words))
    with store.failing(Faults(token="two")), ThreadPoolExecutor(8) as pool:
        renew(token, "two")
        assert {*pool.map(lambda _: storage.read_bytes(URL), range(40))} == {b"content"}
    assert 1 <= len(connected) <= 3


def test_a_token_that_is_never_renewed_is_a_lack_of_permission(store: Proxy, token: Path) -> None:
    with (
        store.failing(Faults(token="two")),
        pytest.raises(AccessError, match=r"after 5 attempt\(s\): The token has ex"),
    ):
        storage.exists(URL)


@pytest.mark.parametrize("method", REQUESTS)
def test_what_is_denied_is_asked_once_and_a_head_explained_by_a_list(method: str, store: Proxy, token: Path) -> None:
    with store.failing(Faults(token="")) as faults:
        with pytest.raises(AccessError, match=r"after 1 attempt\(s\): Access Denied; .*permission; a store takes"):
            REQUESTS[method]()
        assert faults.refused in ([method], ["HEAD", "LIST"])
