"""What workers do in tests of runners, and the flows of it, in a module that a worker process loads in a moment."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pipelines.flow import Collection, Flow, Tagged, flatten
from schemas.errors import InputError, StorageError


def fail(element: str) -> None:
    raise StorageError(f"could not write {element}: [disk full]\nfree some space.")


def crash(element: str) -> None:
    raise ZeroDivisionError("ours to mend")


def die(element: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def number(elements: Iterable[int]) -> Iterator[Any]:
    """n to (n % 7, n); also the odd ones, and one sign for each bundle at its end."""
    for element in elements:
        yield element % 7, element
        if element % 2:
            yield Tagged("odd", (element, str(element)))
    yield 7, -1


def describe(element: tuple[Any, Any], odd: dict[int, str]) -> Iterator[str]:
    """(key, values) to a line, with the side input in it."""
    key, values = element
    numbers = sorted(value for value in values if value >= 0)
    yield f"{key}: {numbers} {[odd.get(n) for n in numbers]} of {len(odd)}"


def write(element: Any, folder: Path) -> None:
    """Every line to a file of its own in a folder: what was carried out, wherever it was."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / f"{hash(str(element)) & 0xFFFFFFFF}").write_text(str(element))


def total(elements: Iterable[tuple[int, str]]) -> Iterator[tuple[int, int]]:
    yield 0, sum(element for element, _ in elements)


def whole(element: tuple[int, Iterable[int]]) -> int:
    return sum(element[1])


def sizes(element: tuple[Any, Any]) -> str:
    key, groups = element
    return f"{key!r}: {sorted(map(str, groups['odd']))} {sorted(map(str, groups['none']))}"


EVERYTHING = list(range(40))


def everything(folder: Path) -> Flow:
    """Tagged outputs, a side input, an empty collection, several sinks, keys of every kind, sums."""
    flow = Flow()
    made = flow.create("Numbers", EVERYTHING).split("Number", ["odd"], number, partitions=True)
    none: Collection = flow.create("None", [])
    lines = flatten([made["main"], none]).group("By residue").flat_map("Describe", describe, made["odd"])
    lines.map("Lines", write, folder / "lines")
    made["odd"].map_partitions("Sum", total).group("Sums").map("Whole", whole).map("Write sum", write, folder / "sum")
    keyed = flow.create("Keys", [("text", 1), ((1, "a"), 2), (None, 3), ("text", 4), (b"bytes", 5)])
    flow.join("Join", {"odd": keyed, "none": none}).map("Sizes", sizes).map("Keyed", write, folder / "keyed")
    return flow


def slow(element: int, folder: Path) -> None:
    """Element 0 fails as soon as another is at work; that takes a while, and leaves a mark at its end.

    Where all elements come to one worker, which happens while the other is slow to start, none is at work beside it.
    """
    (folder / f"start-{element}").touch()
    if element == 0:
        limit = time.monotonic() + 10
        while len(list(folder.iterdir())) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
        raise InputError("the first one fails.")
    time.sleep(1.0)
    (folder / f"end-{element}").touch()


def staying(folder: Path, seconds: float) -> Flow:
    flow = Flow()
    flow.create("Numbers", range(4)).map("Stay", stay, folder, seconds)
    return flow


def stay(element: int, folder: Path, seconds: float) -> None:
    """Note in which process the element is, and stay there for some seconds."""
    folder.mkdir(exist_ok=True)
    (folder / str(element)).write_text(str(os.getpid()))
    time.sleep(seconds)
