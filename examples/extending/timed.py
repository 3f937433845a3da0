"""Runs flows in this process, and prints the seconds of each stage to standard error."""

import sys
import time
from collections.abc import Sequence

from pipelines.flow import MAIN, Elements, Flow, Output, by_tag, group_by_key
from pipelines.progress import Progress, Watch


class TimedRunner:
    far = False

    def __init__(self, flags: Sequence[str]) -> None:
        """Take no options except --runner."""

    def __enter__(self) -> "TimedRunner":
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing: there are no workers."""

    def check(self, reads: Sequence[str], folder: str, say: Progress) -> None:
        """Check nothing: this process reads the inputs itself."""

    def run(self, flow: Flow, watch: Watch | None = None) -> None:
        made: dict[Output, Elements] = {}
        for number, stage in enumerate(flow.stages):
            began = time.perf_counter()
            elements = [element for output in stage.reads for element in made[output]]
            if stage.given is not None:
                outputs = {MAIN: list(stage.given)}
            elif stage.work is None:
                outputs = {MAIN: group_by_key(elements)}
            else:
                sides = {n: dict(pair for part in parts for pair in made[part]) for n, parts in stage.sides.items()}
                outputs = by_tag(stage.with_sides(sides)(elements), stage.tags)
            made |= {Output(number, tag): some for tag, some in outputs.items()}
            print(f"{time.perf_counter() - began:7.2f} s  {stage.name}", file=sys.stderr)
