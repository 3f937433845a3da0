"""Work done ahead by threads, handed over in order."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import Protocol, TypeVar

T = TypeVar("T")
R = TypeVar("R", covariant=True)
_NOTICE_SECONDS = 0.1  # until a full queue's writer sees that nobody reads any more


class Job(Protocol[R]):
    """Tasks that any threads may do, and what is there when all of them are done."""

    tasks: list[Callable[[], None]]

    def result(self) -> R: ...


def jobs_ahead(pool: Executor, jobs: Iterable[Job[R]], depth: int) -> Iterator[R]:
    """Results of `jobs` in order, while the pool works on the tasks of up to `depth` following ones."""
    ahead: deque[tuple[Job[R], list[Future[None]]]] = deque()

    def finish() -> R:
        job, futures = ahead.popleft()
        for future in futures:
            future.result()
        return job.result()

    for job in jobs:
        ahead.append((job, [pool.submit(task) for task in job.tasks]))
        if len(ahead) > depth:
            yield finish()
    while ahead:
        yield finish()


def in_background(items: Iterator[T], depth: int, name: str) -> Generator[T, None, None]:
    """`items`, produced by a thread `name` that runs up to `depth` items ahead and ends with this iterator.

    What `items` raises is raised here; given up early, `items` is closed in its thread before this returns.
    """
    made: queue.Queue[tuple[T | None, BaseException | None, bool]] = queue.Queue(depth)
    given_up = threading.Event()

    def put(entry: tuple[T | None, BaseException | None, bool]) -> bool:
        while not given_up.is_set():
            try:
                made.put(entry, timeout=_NOTICE_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        failure: BaseException | None = None
        try:
            for item in items:
                if not put((item, None, False)):
                    break
        except BaseException as error:
            failure = error
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()
        put((None, failure, True))

    thread = threading.Thread(target=produce, name=name, daemon=True)
    thread.start()
    try:
        while True:
            item, failure, ended = made.get()
            if failure is not None:
                raise failure
            if ended:
                return
            yield item  # type: ignore[misc]
    finally:
        given_up.set()
        thread.join()
