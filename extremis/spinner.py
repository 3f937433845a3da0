"""Spinner while a command prints nothing: on a terminal an animated line, elsewhere an occasional line."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

_TICK = 0.1
_SPINNER_AFTER = 0.3  # seconds of silence
_LINES_AFTER, _LONGEST = 5.0, 30.0  # seconds of silence before the first line, doubled after each line up to _LONGEST
_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_PLAIN_FRAMES = "|/-\\"


class _Spinner:
    """State of this process's spinner, or of its lines without a terminal. Any thread may call the methods."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Switch off the spinner, for example in a forked process."""
        self._lock = threading.RLock()
        self._text, self._began = "", 0.0
        self._last_output = self._pause = 0.0
        self._other_displays, self._shown = 0, False

    def begin(self, text: str) -> None:
        """Set the name of the current work."""
        with self._lock:
            self._text, self._began = text, time.monotonic()
            self.clear()

    def clear(self) -> None:
        """Clear the spinner to make room for a line, and restart the wait."""
        with self._lock:
            if self._shown:
                sys.stderr.write("\r\x1b[K")
                sys.stderr.flush()
                self._shown = False
            self._last_output, self._pause = time.monotonic(), _LINES_AFTER

    def count_displays(self, by: int) -> None:
        """Count other progress displays, such as bars: `by` is +1 for a new display, and -1 for a closed display."""
        with self._lock:
            self.clear()
            self._other_displays += by

    def tick(self, on_terminal: bool, print_line: Callable[[str], None], remaining: Callable[[], str] = str) -> None:
        """Show the spinner, or print a line, if it is due."""
        with self._lock:
            silent = time.monotonic() - self._last_output
            if self._other_displays or not self._text:
                return
            line = f"{self._text}, {time.monotonic() - self._began:.0f} s, {remaining()}".removesuffix(", ")
            if on_terminal and silent > _SPINNER_AFTER:
                frames = _FRAMES if "utf" in (sys.stderr.encoding or "").lower() else _PLAIN_FRAMES
                frame = frames[int(silent / _TICK) % len(frames)]
                sys.stderr.write(f"\r{frame} {line}\x1b[K")
                sys.stderr.flush()
                self._shown = True
            elif not on_terminal and silent > self._pause:
                pause = min(_LONGEST, 2 * self._pause)
                print_line(line)
                self._pause = pause


_spinner = _Spinner()
os.register_at_fork(after_in_child=_spinner.reset)
clear_spinner, show_activity = _spinner.clear, _spinner.begin


@contextlib.contextmanager
def run_spinner(
    title: str, on_terminal: bool, print_line: Callable[[str], None], remaining: Callable[[], str] = str
) -> Iterator[None]:
    """Until the block ends, show that `title` is running whenever nothing has been printed for a while.

    `print_line` prints a line; `remaining` describes the remaining time, if it is known.
    """
    over = threading.Event()

    def work() -> None:
        while not over.wait(_TICK):
            _spinner.tick(on_terminal, print_line, remaining)

    _spinner.begin(title)
    thread = threading.Thread(target=work, name="extremis-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        _spinner.begin("")


@contextlib.contextmanager
def hidden_spinner() -> Iterator[None]:
    """Show nothing until the block ends, because a bar shows progress."""
    _spinner.count_displays(1)
    try:
        yield
    finally:
        _spinner.count_displays(-1)
