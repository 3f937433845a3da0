"""URLs that lead nowhere, or carry secrets: one message, whatever the command."""

from pathlib import Path

import pytest

from tests.hostile.outcome import SECRET, listing, run

URLS: dict[str, tuple[int, ...]] = {
    # bad spelling, or nothing that can be opened: 2; a server that is not reached: 1
    "nosuch://bucket/x": (2,),
    "://x": (2,),
    "s3:/": (2,),
    "http://": (1, 2),
    "http://127.0.0.1:port/x": (1, 2),
    "http://127.0.0.1:99999/x": (1, 2),
    "http://[::1/x": (1, 2),
    "http://127.0.0.1:9/x": (1, 2),
    "https://127.0.0.1:9/x": (1, 2),
    f"http://user:{SECRET}@127.0.0.1:9/x": (1, 2),
    f"http://user:{SECRET}/x@127.0.0.1:9/x": (1, 2),
    f"http://127.0.0.1:9/x?token={SECRET}": (1, 2),
    f"http://127.0.0.1:9/x?X-Amz-Signature={SECRET}&a=b": (1, 2),
    "ftp://127.0.0.1:9/x": (1, 2),
    f"ftp://user:{SECRET}@127.0.0.1:9/x": (1, 2),
    "ftp://": (1, 2),
    "ftp://127.0.0.1:port/x": (1, 2),
    "sftp://127.0.0.1:9/x": (1, 2),
    f"sftp://user:{SECRET}@127.0.0.1:9/x": (1, 2),
    "zip://x": (1, 2),
    "zip://x::/dev/null": (1, 2),
    "tar://x::/dev/null": (1, 2),
    "simplecache::nosuch://x": (2,),
    "memory://nothing": (2,),
    "file:///nowhere/at/all": (2,),
    "/nowhere": (2,),
    "/dev/null": (2,),
    "/dev/null/x": (2,),
    "/etc/passwd": (2,),
    "/proc/self/mem": (2,),
    "": (2,),
    " ": (2,),
    "\n": (2,),
    "\0": (2,),
    "a\0b": (2,),
    "s3://\0": (1, 2),
    "x" * 5000: (1, 2),
    "/" + "x/" * 3000: (1, 2),
    "../" * 200: (1, 2),
    "\ud800": (1, 2),
    "github://a:b@c/d": (1, 2),
    "data:text/plain,x": (1, 2),
    "reference://x": (1, 2),
    f"s3://KEY:{SECRET}@bucket/x": (2,),
    f"s3://KEY:{SECRET}/with/slashes@bucket/x": (2,),
    f"s3://{SECRET}@bucket": (2,),
    f"gs://{SECRET}@bucket": (2,),
    f"s3a://KEY:{SECRET}@bucket": (2,),
    f"simplecache::s3://KEY:{SECRET}@bucket": (2,),
}


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("predict", "evaluate", "report")]


@pytest.mark.parametrize("command", ["inspect", "shard", "train", *OTHERS])
@pytest.mark.parametrize("url", URLS, ids=[ascii(url)[:30] for url in URLS])
def test_a_url_that_leads_nowhere(url: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("schemas.storage.ATTEMPTS", 1)
    out = tmp_path / "out"
    arguments = {
        "inspect": (url,),
        "shard": (url, out),
        "predict": (url, tmp_path / "texts.txt", out / "x.jsonl"),
        "evaluate": (url, tmp_path / "run"),
        "report": (url, "--out", out / "report.html"),
        "train": ("random", url, out),
    }
    run(command, *arguments[command], status=URLS[url])
    assert listing(tmp_path) == []
