"""A cluster of this machine to try things out on: `python -m tests.engines flink`, or spark. Ctrl-C stops it."""

import shlex
import signal
import sys
import tempfile
from pathlib import Path

from tests.engines.clusters import CLUSTERS
from tests.engines.pieces import PIECES, install
from tests.engines.worker import loopback


def main(name: str) -> None:
    """Start the cluster `name`, say how it is used, and wait for Ctrl-C or SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell may have told a process behind it to ignore the first
        signal.signal(number, signal.default_int_handler)
    print("getting its pieces: a few minutes, the first time", file=sys.stderr)
    install(PIECES[name])
    with tempfile.TemporaryDirectory() as folder, CLUSTERS[name](Path(folder) / name) as cluster:
        print(f"{name} runs; its logs are in {cluster.folder}. In another terminal:\n", file=sys.stderr)
        print(shlex.join(["extremis", "shard", "examples/tate/", "data/", "--", *loopback(cluster)]), flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopping it", file=sys.stderr)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in CLUSTERS:
        sys.exit(f"python -m tests.engines {'|'.join(CLUSTERS)}")
    main(sys.argv[1])
