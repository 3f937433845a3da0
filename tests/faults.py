"""Proxy between a client and an HTTP server that injects the faults of networks and stores."""

import contextlib
import http.client
import os
import random
import re
import signal
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# refused: answered with 500 unseen; lost: carried out, and answered with 500 all the same; slow: the body comes in two
# parts; reset: the connection is reset in the middle of the body; dropped: closed without an answer.
KINDS = ("refused", "lost", "slow", "reset", "dropped")
# Of the content of a GET alone. flipped: a bit is another, and no checksum of the store tells; shortened: the body
# stops early, as its length says; stale: a listing is that of an earlier request of the same prefix.
LIES = ("flipped", "shortened", "stale")
# Headers by which a client would notice.
_EXPIRED = b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>'
_DENIED = b'<?xml version="1.0"?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>'
_TELLING = ("etag", "content-md5", "x-amz-checksum-")
_ERROR = b'<?xml version="1.0"?><Error><Code>InternalError</Code><Message>An internal error.</Message></Error>'
_HOP = ("connection", "transfer-encoding", "keep-alive")


@dataclass
class Faults:
    """Faults to inject: into a share of the requests, drawn from `seed`; and into all from the `down_after`-th on.

    LIES befall a GET whose path matches `lies_about`, and not the first `lies_after` of those: a listing, or the body
    of an object of more than a byte. At most `lies` of them are told. `most_at_once`: requests under way at a time.
    `token`: a request with another session token is answered as by S3 after the token's end; "": each is denied.
    """

    share: float = 0.0
    seed: int = 0
    down_after: int | None = None
    kinds: tuple[str, ...] = KINDS
    lies_about: str = ""
    lies_after: int = 0
    lies: int | None = None
    slow_seconds: float = 0.2
    delay_seconds: float = 0.0  # before every answer
    token: str | None = None
    requests: int = 0
    most_at_once: int = 0
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)
        self._lock = threading.Lock()
        self._now = 0
        self._listed: dict[str, bytes] = {}
        self.about: list[str] = []  # paths of the answers that were lies
        self.refused: list[str] = []  # methods of the requests that had no right

    def lie(self, path: str, kind: str, content: bytes) -> bytes:
        """Return the answer to a GET of `path` as a lie of `kind`; the true one where that does not fit."""
        listing = "list-type=" in path
        with self._lock:
            earlier = self._listed.setdefault(path, content) if listing else content
            if (
                kind not in LIES
                or listing != (kind == "stale")
                or len(content) < 2
                or not re.search(self.lies_about, path)
            ):
                return content
            self.lies_after -= 1
            if self.lies_after >= 0 or (self.lies is not None and len(self.about) >= self.lies):
                return content
            lie = earlier
            if kind == "flipped":
                place = self._draw.randrange(len(content))
                lie = content[:place] + bytes([content[place] ^ 1 << self._draw.randrange(8)]) + content[place + 1 :]
            elif kind == "shortened":
                lie = content[: self._draw.randrange(1, len(content))]
            if lie != content:
                self.done[kind] += 1
                self.about.append(path)
            return lie

    @contextmanager
    def delay(self) -> Iterator[None]:
        """Count requests under way, and delay each of them."""
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            time.sleep(self.delay_seconds)
            yield
        finally:
            with self._lock:
                self._now -= 1

    def next(self) -> str | None:
        """Draw the fault of the next request: one of KINDS, or None."""
        with self._lock:
            self.requests += 1
            kind = self._draw.choice(self.kinds) if self._draw.random() < self.share else None
            if self.down_after is not None and self.requests > self.down_after:
                kind = self._draw.choice(("refused", "dropped"))
            if kind in KINDS:
                self.done[kind] += 1
            return kind


class Proxy(ThreadingHTTPServer):
    """Proxy that passes requests on to `upstream` (host, port), except for its `faults`, which may be replaced."""

    daemon_threads = True

    def __init__(self, upstream: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream
        self.faults = Faults()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @contextmanager
    def failing(self, faults: Faults) -> Iterator[Faults]:
        """Inject `faults` until the block ends."""
        self.faults = faults
        try:
            yield faults
        finally:
            self.faults = Faults()

    def handle_error(self, *_: object) -> None:
        """Ignore a client that went away."""


@contextmanager
def proxy(upstream: tuple[str, int]) -> Iterator[Proxy]:
    """Run a proxy until the block ends."""
    with Proxy(upstream) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Stop a process until the block ends, as a machine that is suspended does; one that has ended is left alone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        faults = self.server.faults
        with faults.delay():
            self._serve_as(faults.next(), body)

    def _serve_as(self, fault: str | None, body: bytes) -> None:
        token = self.server.faults.token
        if token is not None and (not token or self.headers.get("x-amz-security-token") != token):
            self.server.faults.refused.append("LIST" if "list-type=" in self.path else self.command)
            self._answer(400 if token else 403, [("Content-Type", "application/xml")], _EXPIRED if token else _DENIED)
            return
        if fault == "refused":
            self._answer(500, [("Content-Type", "application/xml")], _ERROR)
            return
        if fault == "dropped":
            self._reset()
            return
        status, headers, content = self._pass_on(body)
        if fault == "lost":
            self._answer(500, [("Content-Type", "application/xml")], _ERROR)
            return
        faults = self.server.faults
        if self.command == "GET" and status in (200, 206) and set(faults.kinds) & set(LIES):
            content = faults.lie(self.path, fault or "", content)
            headers = [(name, value) for name, value in headers if not name.lower().startswith(_TELLING)]
        self._answer(status, headers, content, fault)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def log_message(self, *_: object) -> None: ...

    def _pass_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.server.upstream, timeout=60)
        with contextlib.closing(connection):
            headers = {name: value for name, value in self.headers.items() if name.lower() not in (*_HOP, "expect")}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, fault: str | None = None) -> None:
        self.send_response_only(status)
        fields = {name.lower(): value for name, value in headers}
        length = fields.pop("content-length", str(len(content))) if self.command == "HEAD" else str(len(content))
        for name, value in fields.items():
            if name not in (*_HOP, "content-length"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault in ("slow", "reset"):
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            if fault == "reset":
                self._reset()
                return
            time.sleep(self.server.faults.slow_seconds)
            content = content[len(content) // 2 :]
        self.wfile.write(content)

    def _reset(self) -> None:
        """End the connection with RST instead of FIN."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
