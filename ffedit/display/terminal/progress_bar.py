"""Progress callback as bars on standard error that disappear at the end; or as lines if that is no terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

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
    """Return a callback that prints the time left after `INTERVAL`, then each time the elapsed time doubles."""
    begun = last = time.monotonic()
    current, reached = "", 0

    def advance(stage: str, done: int, total: int) -> None:
        nonlocal begun, last, current, reached
        now = time.monotonic()
        if stage != current or done < reached:  # less done than before: the stage begins anew
            current, begun = stage, now
        reached = done
        if done < total and now - last >= max(INTERVAL, last - begun):
            left = f", {duration((now - begun) * (total - done) / done)} left" if now > begun and done else ""
            console.print(f"{stage} {done}/{total}{left}", soft_wrap=True, markup=False, highlight=False)
            last = now

    return advance
