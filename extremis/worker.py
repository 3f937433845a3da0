"""`extremis-worker`: checks that `pipelines` belongs to Extremis, then runs the program of `pipelines.runners.boot`."""

from pipelines.runners.boot import main as main
