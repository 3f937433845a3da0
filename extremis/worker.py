"""`extremis-worker`, after the check that `pipelines` is ours: `pipelines.runners.boot` has the program."""

from pipelines.runners.boot import main as main
