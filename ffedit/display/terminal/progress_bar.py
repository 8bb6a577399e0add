"""Progress callback as bars on standard error that disappear at the end; or as lines if that is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bars, TaskID, TextColumn, TimeRemainingColumn

from ffedit.display.terminal.console import PlainConsole
from ffedit.display.terminal.tables import duration
from ffedit.progress import Progress, silent

INTERVAL = 10.0  # seconds, at least, before and between lines


@contextmanager
def progress_bars(quiet: bool = False, console: Console | None = None) -> Iterator[Progress]:
    """Yield a callback that shows one bar per stage until the block ends; nothing if `quiet`."""
    console = console or PlainConsole(stderr=True)
    if quiet or not console.is_terminal:
        yield silent if quiet else _lines(console)
        return
    bars = Bars(
        TextColumn("{task.description:<12}", style="dim", markup=False),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
        console=console,
        transient=True,
        redirect_stdout=False,
    )
    tasks: dict[str, TaskID] = {}
    with bars:

        def advance(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield advance


def _lines(console: Console) -> Progress:
    """Return a callback that prints the time left after `INTERVAL`, then each time the elapsed time doubles.

    The elapsed time is that of the outermost stage, as of the facts of a benchmark, whose line ends with the inner one.
    """
    last = time.monotonic()
    going: dict[str, _Stage] = {}  # the oldest first

    def advance(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done >= total:
            going.pop(stage, None)
            return
        if stage in going and done < going[stage].done:  # less done than before: the stage begins anew
            del going[stage]
        current = going.setdefault(stage, _Stage(stage, now, first=done))
        current.done, current.total = done, total
        outer = next((other for other in going.values() if other.done), current)
        if now - last >= max(INTERVAL, last - outer.begun):
            line = outer.line(now) if outer is current else f"{outer.line(now)}: {current.line(now)}"
            console.print(line, soft_wrap=True, markup=False, highlight=False)
            last = now

    return advance


@dataclass
class _Stage:
    """A stage that is not finished yet."""

    name: str
    begun: float  # time of its first call, s
    first: int  # steps done by then
    done: int = 0  # steps done by now
    total: int = 0

    def line(self, now: float) -> str:
        """Return its name and steps, and the time left where some were done since it began."""
        steps = self.done - self.first
        left = f", {duration((now - self.begun) * (self.total - self.done) / steps)} left" if steps else ""
        return f"{self.name} {self.done}/{self.total}{left}"
