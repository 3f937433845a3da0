"""Writes a run's numbers as CSV for a spreadsheet: step, name, value."""

import csv
from collections.abc import Mapping

from trainer.tracking import RunFacts, Watcher


class CsvLog(Watcher):
    """Writes numbers to the file that the option names, in the folder of the run."""

    def __init__(self, facts: RunFacts, name: str) -> None:
        self._place = facts.folder / name

    def start(self, step: int, identity: str | None) -> None:
        self._file = self._place.open("a" if step else "w", newline="")

    def flush(self) -> None:
        self._file.flush()

    def close(self, finished: bool) -> None:
        self._file.close()

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        csv.writer(self._file).writerows([step, name, value] for name, value in numbers.items())
