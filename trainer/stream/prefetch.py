"""Prefetching: threads work ahead, and items come in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


# Pieces that give items, in any threads; and what ends the work once they have.
Opened = tuple[list[Callable[[], list[T]]], Callable[[], None]]


@dataclass(frozen=True)
class Work(Generic[T]):
    """Work that `tasks` prepare, in any threads and order, before it is opened."""

    tasks: list[Callable[[], None]]
    open: Callable[[], Opened[T]]


def in_line(works: Iterator[Work[T]]) -> Generator[T, None, None]:
    """Yield the items of `works`; all work is done here, when it is asked for."""
    for work in works:
        for task in work.tasks:
            task()
        pieces, close = work.open()
        for piece in pieces:
            yield from piece()
        close()


def by_threads(pool: Executor, works: Iterator[Work[T]], depth: int) -> Generator[T, None, None]:
    """Yield the same items: the pool works on up to `depth` pieces ahead, and meanwhile prepares the next of `works`.

    Tasks of the next one are handed out between the pieces of this one, so that neither waits for all of the other.
    """
    pieces: deque[tuple[Future[list[T]], Callable[[], None] | None]] = deque()

    def finish() -> list[T]:
        future, close = pieces.popleft()
        items = future.result()
        if close is not None:
            close()
        return items

    current = next(works, None)
    preparing = [pool.submit(task) for task in current.tasks] if current is not None else []
    while current is not None:
        for future in preparing:
            future.result()
        todo, close = current.open()
        following = next(works, None)
        tasks = deque(following.tasks if following is not None else [])
        preparing = []
        for number, piece in enumerate(todo, 1):
            pieces.append((pool.submit(piece), close if number == len(todo) else None))
            share = -(-len(tasks) // (len(todo) - number + 1))
            preparing += [pool.submit(tasks.popleft()) for _ in range(share)]
            if len(pieces) > depth:
                yield from finish()
        preparing += [pool.submit(task) for task in tasks]
        current = following
    while pieces:
        yield from finish()
