"""What a trainer has dumped into a run, and for when what is made from it is meant."""

from schemas import storage
from schemas.layout import RunLayout, parse_number


def dump_epochs(run: str) -> list[int]:
    """Epochs that have a dump, complete or not, oldest first."""
    numbers = (parse_number(name) for name in storage.list_names(RunLayout(run).dumps))
    return sorted(number for number in numbers if number is not None)


def say_use(use_from: int | None) -> str:
    """For the end of a line: the first epoch that trains on a table."""
    return "" if use_from is None else f", for use from epoch {use_from}"
