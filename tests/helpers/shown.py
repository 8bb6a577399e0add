"""What a renderable looks like in a terminal of some width."""

from __future__ import annotations

import io
from typing import Any

from rich.cells import cell_len
from rich.console import Console, RenderableType


def shown(renderable: RenderableType, width: int = 80, **kwargs: Any) -> str:
    """The text as a pipe gets it; no line may be wider than the console."""
    file = io.StringIO()
    Console(file=file, width=width, **kwargs).print(renderable)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    if "force_terminal" not in kwargs:
        assert "\x1b" not in file.getvalue()
        assert all(cell_len(line) <= width for line in lines), lines
    return "\n".join(lines)


def words(renderable: RenderableType) -> str:
    """The same on one line."""
    return " ".join(shown(renderable).split())
