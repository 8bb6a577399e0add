"""Mean scores so far, shown with the progress bar of each method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ffedit.benchmark.journal import WHOLE, Journal
from ffedit.progress import Progress

SHOWN = ("efficacy", "paraphrase", "specificity")


class Running:
    """Running means over the facts scored right after their own edit, reported through the progress callback.

    Args:
        progress: the callback.
        total: number of facts that each method is to write.
        journal: the scores of an earlier, interrupted run.
    """

    def __init__(self, progress: Progress, total: int, journal: Journal) -> None:
        self._progress, self._total = progress, total
        self._done: dict[str, int] = {}
        self._sums: dict[tuple[str, str], tuple[float, int]] = {}
        for line in journal.lines.values():
            # The facts of an incomplete group are measured and reported again.
            if line.when == "after" and line.fact != WHOLE and journal.done(line.method, line.when, line.chunk):
                self.add(line.method, [line.found])

    def add(self, method: str, found: Sequence[Mapping[str, Any]]) -> None:
        """Add facts of a method, with scores or without, and report the means."""
        self._done[method] = self._done.get(method, 0) + len(found)
        words = []
        for name in SHOWN:
            total, count = self._sums.get((method, name), (0.0, 0))
            values = [value for one in found if (value := one.get("scores", {}).get(name)) is not None]
            total, count = self._sums[method, name] = total + sum(values), count + len(values)
            if count:
                words.append(f"{name} {total / count:.2f}")
        self._progress(" ".join([f"{method}:", *words]), self._done[method], self._total)
