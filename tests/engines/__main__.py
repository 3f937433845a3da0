"""A cluster of this machine to try things out on: `python -m tests.engines flink`, or spark. Ctrl-C stops it."""

import shlex
import signal
import sys
import tempfile
from pathlib import Path

from tests.engines import clusters, pieces
from tests.engines.worker import loopback


def main(name: str) -> None:
    """Start the cluster `name`, say how it is used, and wait for Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print("getting its pieces: a few minutes, the first time", file=sys.stderr)
    pieces.install({"flink": pieces.FLINK, "spark": pieces.SPARK}[name])
    start = {"flink": clusters.flink, "spark": clusters.spark}[name]
    with tempfile.TemporaryDirectory() as folder, start(Path(folder) / name) as cluster:
        print(f"{name} runs; its logs are in {cluster.folder}. In another terminal:\n", file=sys.stderr)
        print(shlex.join(["extremis", "shard", "examples/tate/", "data/", "--", *loopback(cluster)]), flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopping it", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in ("flink", "spark"):
        sys.exit("python -m tests.engines flink|spark")
    main(sys.argv[1])
