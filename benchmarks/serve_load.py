"""`extremis serve` with 1, 8 and 64 connections, and at 80 % of its peak with two switches of CURRENT: none is lost.

    python -m benchmarks.serve_load [--minutes 10] [--exports FOLDER] [--each 60] [--service FILE [OPTIONS]]

The service is a separate process. This process sends requests over loopback, each with a title of Tate. First 1, 8 and
64 connections send a request after each answer, for EACH seconds, when one connection has done so for half of this
time: the service is then warm, and has compiled its path for single texts. Then requests are due evenly at 80 % of the
rate of 64 connections, whether or not earlier requests are answered; a latency counts from the moment when a request
is due. After one third of the time and after two thirds, CURRENT switches between two exports. For comparison, the
peak of FastAPI alone is measured, with an endpoint that ignores its input and returns a constant. With two cores, the
service has the first and this process the second.

FOLDER: two exports, one of them current; by default a run of one minute on Tate is fused and exported twice. A FOLDER
that is one export, or --minutes 0, measures only the connections. FILE: another service to measure, a Python program
that takes FOLDER and --port, with its OPTIONS.
"""

import argparse
import asyncio
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import extremis
from benchmarks.common.report import report, require
from scoring.export_versions import find_current, make_current

ROOT = Path(__file__).parents[1]
TATE = ROOT / "examples" / "tate"
CONNECTIONS = 1, 8, 64
SHARE = 0.8
_PEAK_SECONDS = 10.0
_WARM_SECONDS = 3.0
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999, "max": 1.0}
_BARE = """
import signal, socket, sys, fastapi, uvicorn
signal.signal(signal.SIGTERM, lambda *_: None)
app = fastapi.FastAPI()
@app.post("/predict")
async def predict(request: fastapi.Request):
    await request.body()
    return fastapi.Response(b'{"export":""}', media_type="application/json")
listening = socket.create_server(("127.0.0.1", 0), backlog=1000)
print(f":{listening.getsockname()[1]}", file=sys.stderr, flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run([listening])
"""


class Client:
    """Connections to the service, and outcomes of requests."""

    def __init__(self, port: int, texts: Sequence[str]) -> None:
        self.port = port
        self.requests = [self._encode(text) for text in texts]
        self.outcomes: Counter[str] = Counter()  # counts by status, or by name of an error
        self.exports: Counter[str] = Counter()
        self.idle: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()

    @staticmethod
    def _encode(text: str) -> bytes:
        body = json.dumps({"texts": [text], "max_labels": 5}).encode()
        head = f"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def connect(self, connections: int) -> None:
        """Open as many more connections as there should be."""
        while self.idle.qsize() < connections:
            self.idle.put_nowait(await asyncio.open_connection("127.0.0.1", self.port))

    async def ask(self, number: int) -> float:
        """Send a request over an idle connection; return the time at the end of the answer."""
        reader, writer = await self.idle.get()
        try:
            writer.write(self.requests[number % len(self.requests)])
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
            body = await reader.readexactly(length)
            self.outcomes[head[9:12].decode()] += 1
            self.exports[body[11:].partition(b'"')[0].decode()] += 1
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            self.outcomes[type(error).__name__] += 1
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.idle.put_nowait((reader, writer))
        return time.perf_counter()

    async def closed(self, connections: int, seconds: float) -> tuple[float, dict[str, float]]:
        """Return requests per second and latencies of connections that are never idle."""
        await self.connect(connections)
        latencies = list[float]()
        began = time.perf_counter()
        end = began + seconds

        async def work(first: int) -> None:
            number = first
            while (sent := time.perf_counter()) < end:
                latencies.append(1000 * (await self.ask(number) - sent))
                number += connections

        await asyncio.gather(*(work(first) for first in range(connections)))
        return round(len(latencies) / (time.perf_counter() - began), 1), quantiles(np.array(latencies))

    async def steady(self, rate: float, seconds: float) -> np.ndarray:
        """Send `rate` requests per second; return their latencies in milliseconds, each from its due time."""
        began, tasks = time.perf_counter(), list[asyncio.Task[float]]()
        count = int(rate * seconds)
        while len(tasks) < count:
            due = min(count, int((time.perf_counter() - began) * rate) + 1)
            tasks += [asyncio.create_task(self.ask(number)) for number in range(len(tasks), due)]
            await asyncio.sleep(max(0.0, began + len(tasks) / rate - time.perf_counter()))
        ends = np.array(await asyncio.gather(*tasks))
        return 1000 * (ends - began - np.arange(count) / rate)


def quantiles(latencies: np.ndarray) -> dict[str, float]:
    return {name: round(float(np.quantile(latencies, share)), 2) for name, share in _QUANTILES.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--each", type=float, default=60.0, help="seconds for each number of connections")
    parser.add_argument("--exports", help="folder of two exports, of which one is current; or one export")
    parser.add_argument("--service", nargs=argparse.REMAINDER, default=["-m", "extremis", "serve"], help="another one")
    arguments = parser.parse_args()
    require("fastapi_offline", "uvicorn", "prometheus_client")
    if len(cores := sorted(os.sched_getaffinity(0))) > 1:
        os.sched_setaffinity(0, cores[1:2])
    with tempfile.TemporaryDirectory(prefix="extremis-benchmark-") as scratch:
        folder = Path(arguments.exports or make_exports(Path(scratch)))
        with gzip.open(TATE / "tst.json.gz", "rt", encoding="utf-8") as lines:
            texts = [json.loads(line)["title"] for line in lines]
        with serving(["-c", _BARE], cores[0]) as port:
            bare = asyncio.run(peak_of(port, texts))
        with serving([*arguments.service, str(folder), "--port", "0"], cores[0]) as port:
            figures = asyncio.run(measure(port, texts, arguments.each, 60 * arguments.minutes, folder))
    os.sched_setaffinity(0, cores)  # the report counts the cores
    lost = sum(count for outcome, count in figures["outcomes"].items() if outcome != "200")
    alone = figures["connections"]["1"]
    report(
        "a lone request is answered in 1.5 ms, and two switches of the export at 80 % of the peak lose none",
        {"minutes": arguments.minutes, "bare_peak": bare, "lost": lost} | figures,
        {"lost": lost, "alone_p50_milliseconds": alone["p50"], "alone_p99_milliseconds": alone["p99"]},
        {"lost": "<1", "alone_p50_milliseconds": "<1.5", "alone_p99_milliseconds": "<3"},
    )


async def peak_of(port: int, texts: Sequence[str]) -> float:
    """Return the peak of a service in requests per second."""
    client = Client(port, texts)
    await client.closed(CONNECTIONS[-1], _WARM_SECONDS)
    return (await client.closed(CONNECTIONS[-1], _PEAK_SECONDS))[0]


async def measure(port: int, texts: Sequence[str], each: float, seconds: float, folder: Path) -> dict[str, Any]:
    """Return latencies by number of connections; and at a share of the peak while the exports of `folder` switch."""
    client, figures = Client(port, texts), {}
    await client.closed(1, each / 2)
    for connections in CONNECTIONS:
        rate, latencies = await client.closed(connections, each)
        figures[str(connections)] = {"requests_a_second": rate, **latencies}
    if not seconds or (first := find_current(str(folder))) is None:
        return {"connections": figures, "outcomes": dict(client.outcomes)}
    (second,) = (str(path.parent) for path in folder.glob("*/_manifest.json") if path.parent != Path(first))
    client.exports.clear()

    async def switch_twice() -> None:
        for export in (second, first):
            await asyncio.sleep(seconds / 3)
            await asyncio.to_thread(make_current, export)

    switching = asyncio.create_task(switch_twice())
    latencies = quantiles(await client.steady(SHARE * figures[str(CONNECTIONS[-1])]["requests_a_second"], seconds))
    await switching
    return {
        "connections": figures,
        "switched": latencies,
        "outcomes": dict(client.outcomes),
        "answered_by": {Path(place).name: count for place, count in client.exports.items()},
    }


def make_exports(scratch: Path) -> Path:
    """Make two exports of a run on Tate, with fused scores and with the classifier's scores; the first is current."""
    data, run, exports = (str(scratch / name) for name in ("data", "run", "exports"))
    extremis.shard(str(TATE), data, progress=False)
    extremis.run("random", data, run, set={"train.epochs": 4, "data.holdout": 0.02}, progress=False)
    extremis.fuse(data, run, progress=False)
    extremis.export(data, run, f"{exports}/fused", current=True, progress=False)
    extremis.export(data, run, f"{exports}/classifier", scores="classifier", progress=False)
    return Path(exports)


@contextmanager
def serving(program: Sequence[str], core: int, root: Path = ROOT) -> Iterator[int]:
    """Start the Python service `program` of a checkout on a core; yield its port. It must exit with status 0."""
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, *program],
        stderr=subprocess.PIPE,
        text=True,
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    assert process.stderr is not None
    try:
        yield int(re.findall(r":(\d+)$", process.stderr.readline().strip())[0])
    finally:
        process.terminate()
        _, said = process.communicate(timeout=60)
        sys.stderr.write(said)
    assert process.returncode == 0, process.returncode


if __name__ == "__main__":
    main()
