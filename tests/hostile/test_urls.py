"""URLs that lead nowhere, or carry secrets: one message, whatever the command."""

from pathlib import Path

import pytest

from schemas.errors import ExtremisError
from schemas.manifest import open_manifest
from tests.hostile.outcome import SECRET, check_message, listing, run

# Bad spelling, or nothing that can be opened: the user's fault, status 2.
WRONG = [
    "nosuch://bucket/x",
    "://x",
    "s3:/",
    "simplecache::nosuch://x",
    "memory://nothing",
    "file:///nowhere/at/all",
    "/nowhere",
    "/dev/null",
    "/dev/null/x",
    "/etc/passwd",
    "/proc/self/mem",
    "",
    " ",
    "\n",
    "\0",
    "a\0b",
    f"s3://KEY:{SECRET}@bucket/x",
    f"s3://KEY:{SECRET}/with/slashes@bucket/x",
    f"s3://{SECRET}@bucket",
    f"gs://{SECRET}@bucket",
    f"s3a://KEY:{SECRET}@bucket",
    f"simplecache::s3://KEY:{SECRET}@bucket",
]
# A server that is not reached, status 3, or one of the above.
AWAY = [
    "http://",
    "http://127.0.0.1:port/x",
    "http://127.0.0.1:99999/x",
    "http://[::1/x",
    "http://127.0.0.1:9/x",
    "https://127.0.0.1:9/x",
    f"http://user:{SECRET}@127.0.0.1:9/x",
    f"http://user:{SECRET}/x@127.0.0.1:9/x",
    f"http://127.0.0.1:9/x?token={SECRET}",
    f"http://127.0.0.1:9/x?X-Amz-Signature={SECRET}&a=b",
    "ftp://127.0.0.1:9/x",
    f"ftp://user:{SECRET}@127.0.0.1:9/x",
    "ftp://",
    "ftp://127.0.0.1:port/x",
    "sftp://127.0.0.1:9/x",
    f"sftp://user:{SECRET}@127.0.0.1:9/x",
    "zip://x",
    "zip://x::/dev/null",
    "tar://x::/dev/null",
    "s3://\0",
    "x" * 5000,
    "/" + "x/" * 3000,
    "../" * 200,
    "\ud800",
    "github://a:b@c/d",
    "data:text/plain,x",
    "reference://x",
]


@pytest.fixture(autouse=True)
def one_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schemas.storage.ATTEMPTS", 1)


def test_a_url_that_leads_nowhere() -> None:
    for url in (*WRONG, *AWAY):
        with pytest.raises(ExtremisError) as refused:
            open_manifest(url)
        check_message(f"error: {refused.value}")
        assert refused.value.exit_status == 2 or url in AWAY, ascii(url)


@pytest.mark.parametrize("command", ["inspect", "shard", "train", "predict", "evaluate", "report"])
def test_a_command_tells_of_it(command: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for url in ("nosuch://bucket/x", f"http://user:{SECRET}@127.0.0.1:9/x", f"s3://KEY:{SECRET}@bucket/x", "\0", ""):
        arguments = {
            "inspect": (url,),
            "shard": (url, out),
            "predict": (url, tmp_path / "texts.txt", out / "x.jsonl"),
            "evaluate": (url, tmp_path / "run"),
            "report": (url, "--out", out / "report.html"),
            "train": ("random", url, out),
        }
        run(command, *arguments[command], status=2 if url in WRONG else (2, 3))
    assert listing(tmp_path) == []
