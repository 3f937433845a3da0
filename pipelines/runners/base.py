"""What every runner of flows does."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext

from pipelines.flow import Flow
from pipelines.progress import Count, Progress, Watch


class Runner:
    """Runner of flows. Use it in a `with` block, so that its workers stop after the last flow.

    far: whether each flow is a remote job, which takes seconds to start.
    """

    far = False

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the workers that the runner has started."""

    def check(self, reads: Sequence[str], folder: str, say: Progress) -> None:
        """Ask remote workers whether they can read `reads` and write below `folder`. Raises ExtremisError."""

    def run(self, flow: Flow, watch: Watch | None = None) -> None:
        """Run `flow` to the end while `watch` shows the progress. Re-raises a worker's error unchanged."""
        with watch.watching() if watch is not None else nullcontext() as settle:
            counts = self._run(flow)
            if settle is not None:
                settle(counts)

    def _run(self, flow: Flow) -> Mapping[str, Count]:
        """Run `flow`. Return the counts of all flows so far; empty if the runner does not count."""
        raise NotImplementedError
