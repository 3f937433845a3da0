"""Make a table: return an existing table, or build a table with flows in a temporary location and publish it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.common.flow import Collection, Flow
from pipelines.common.progress import Progress, Watch
from pipelines.common.summary import Summary, read_summary, write_sum
from pipelines.runners.runner import Runner, choose_runner
from schemas.layout import staging
from schemas.manifest import Manifest
from schemas.owners.build import Build, building, clean_up
from schemas.sizes import require_room
from schemas.storage import join

REMEDY = "Give another OUT, or remove the existing table first."


@dataclass(frozen=True)
class Job:
    """Job that makes one output, with the location of the output, the runner of flows, and the display of steps."""

    build: Build
    runner: Runner
    watch: Watch

    def run(self, name: str, steps: Mapping[str, int | None], wire: Callable[[Flow], Collection]) -> Summary:
        """Run the flow that `wire(flow)` builds, and return the sum of its summaries. `steps`: see `Watch.expect`."""
        flow, url = Flow(), join(self.watch.staging, f"{name.replace(' ', '-')}.json")
        write_sum(wire(flow), url)
        self.watch.expect(steps)
        self.runner.run(flow, self.watch)
        return read_summary(url)

    def run_step(self, step: str, rows: int | None, elements: Iterable[Any], *work: Any) -> Summary:
        """Run one step over `rows` rows. work: a function from element to Summary, and its other arguments."""
        return self.run(step, {step: rows}, lambda flow: flow.create(f"Elements of {step}", elements).map(step, *work))


def make_table(
    out: str,
    doing: str,
    find: Callable[[], Manifest | None],
    make: Callable[[Job], Manifest],
    beam_options: Sequence[str],
    say: Progress,
    *,
    needs: Mapping[str, int],
    remedy: str = "Choose another location.",
    urls: Sequence[str] = (),
    reads: Sequence[str] = (),
    in_phases: bool = False,
) -> Manifest:
    """Return the table that `find` finds at `out`, or otherwise the table that `make` publishes at `out`.

    `needs`: bytes that the table needs, by use. `urls`: URLs that the job uses. `reads`: URLs that workers must be able
    to read. Raises RoomError with a message that ends with `remedy`, ClaimedError, StorageError, and the errors of
    `find` and `make`.
    """
    if (finished := find()) is not None:
        clean_up(out, doing)
        return finished
    require_room(out, needs, remedy)
    with choose_runner(beam_options, urls) as runner, building(out, doing, say, in_phases) as build:
        if (finished := find()) is not None:  # the previous owner of the claim may have made the table
            return finished
        job = Job(build, runner, Watch(staging(build.url), say))
        runner.check(reads, build.url, say)
        manifest = make(job)
        job.watch.summarize()
        return manifest
