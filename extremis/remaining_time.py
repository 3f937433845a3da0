"""Estimation of the remaining time of a command with several phases."""

import math
import time
from collections.abc import Callable

_KNOWN = 0.1  # share of a phase after which its own pace gives the estimate


class RemainingTime:
    """Estimates the remaining time of all phases. `limit`: limit in seconds for all phases together."""

    def __init__(self, limit: float = math.inf) -> None:
        self._began = self._phase_began = time.monotonic()
        self._limit, self._expected = limit, 0.0
        self._after: Callable[[float], float] = lambda own: 0.0
        self._first = 0.0, 0.0

    def begin(self, expected: float, after: Callable[[float], float]) -> None:
        """Begin a phase of `expected` seconds (0: unknown); `after`: seconds of later phases, given this phase's."""
        self._phase_began, self._expected, self._after = time.monotonic(), expected, after
        self._first = 0.0, 0.0  # share at the first call, and the seconds before it: the set-up

    def __call__(self, share: float = 0.0) -> str:
        """Return a text such as "about 2 min left", for a finished fraction `share` of the phase.

        Returns "" while nothing is known, also after the expected time of a phase without a known pace.
        """
        spent = time.monotonic() - self._phase_began
        if share and not self._first[0]:
            self._first = share, spent
        paced = share - self._first[0]
        if paced >= _KNOWN:
            own = spent + (spent - self._first[1]) / paced * (1 - share)
        elif spent < self._expected:
            own = self._expected
        else:
            return ""
        left, of_limit = own - spent + self._after(own), self._limit - (time.monotonic() - self._began)
        left = max(min(left, of_limit) if of_limit > 0 else left, 1.0)
        return f"about {left:.0f} s left" if left < 100 else f"about {left / 60:.0f} min left"
