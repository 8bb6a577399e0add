"""The one progress callback as bars on standard error, gone when the work is done.

Nothing at all is written when quiet, or when standard error is no terminal: a log file is no place for a bar.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from ffedit.progress import Progress, silent


@contextmanager
def progress_bars(quiet: bool = False, console: Console | None = None) -> Iterator[Progress]:
    """A callback that shows one bar per stage for the length of a block. Print results after the block.

    What a stage says after a colon ("memit: efficacy 0.98") may change while its bar goes on.

    Args:
        quiet: show nothing.
        console: where; standard error by default.
    """
    console = console or Console(stderr=True)
    if quiet or not console.is_terminal:
        yield silent
        return
    bars = Bars(
        TextColumn("{task.description:<12}", style="dim"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        transient=True,
        redirect_stdout=False,
    )
    tasks: dict[str, TaskID] = {}
    with bars:

        def advance(stage: str, done: int, total: int) -> None:
            name = stage.partition(":")[0]
            if name not in tasks:
                tasks[name] = bars.add_task(stage, total=total)
            bars.update(tasks[name], description=stage, completed=done, total=total)

        yield advance
