"""Terminal as ffedit writes to it: text stays text, whatever a file, a model or its name says.

Brackets are no markup, and control characters, which would move the cursor, set the title or make links, are shown by
their code points, as are characters that change the direction of the text around them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from ffedit.facts.text import visible


class PlainConsole(Console):
    """Console whose only control characters are its own; options are those of rich's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, "highlight": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments that a renderable consists of, each with its invisible characters visible."""
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment("\n".join(map(visible, segment.text.split("\n"))), segment.style)


def error_line(message: str) -> Text:
    """Render an error message on one line; print it with `soft_wrap=True` so that it stays one."""
    return Text.assemble(("error: ", "bold red"), " ".join(message.split()))


def next_commands(*commands: str) -> Text:
    """Render commands to type next, each on a line that is not wrapped, to be copied."""
    text = Text("Next:", style="bold", no_wrap=True, overflow="ignore")
    for command in commands:
        text.append(f"\n  {command}", style="not bold cyan")
    return text
