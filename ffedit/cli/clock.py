"""Timing of the stages of a command."""

from __future__ import annotations

import time


class Clock:
    """A stopwatch for the stages of a command, which starts when it is created.

    Attributes:
        seconds: duration by stage, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        """Record the time since the last lap as that of `stage`."""
        now = time.perf_counter()
        self.seconds[stage] = round(now - self._last, 3)
        self._last = now
