"""`extremis-worker`: checks that `pipelines` is ours, then runs the program of `pipelines.runners.worker`."""

from pipelines.runners.worker import main as main
