"""`extremis-worker`: checks that `pipelines` is ours, then runs the program of `pipelines.runners.boot`."""

from pipelines.runners.boot import main as main
