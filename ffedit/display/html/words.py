"""Formatting of text and numbers in a page."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup, escape

from ffedit.facts.text import visible

MOST = 160


def finished(value: Any) -> Any:
    """Convert a value for output by a template: markup and numbers unchanged, invisible characters of text visible."""
    return value if isinstance(value, Markup | int | float) else visible(str(value))


def prose(text: str) -> Markup:
    """Format a sentence of ours: what stands between backticks is code."""
    pieces = (escape(visible(piece)) for piece in text.split("`"))
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if i % 2 else piece for i, piece in enumerate(pieces)
    )


def lines(text: str) -> Markup:
    """Format text of several lines, each with invisible characters visible."""
    return Markup("\n").join(escape(visible(line)) for line in text.split("\n"))


def bare(text: str) -> str:
    """Strip the spaces around a token; a token of spaces only becomes "␣"."""
    return text.strip(" ") or "␣"


def percent(change: float) -> str:
    """Format a relative change as a signed percentage."""
    return f"{change:+.0%}".replace("-", "−") if abs(change) >= 0.005 else "0%"


def tenths(share: float) -> str:
    """Format a share, which may be negative or above 1, in percent with one decimal."""
    return f"{share:.1%}".replace("-", "−")


def end(text: str, most: int = MOST) -> str:
    """Return the last characters of a long text, beginning at a word where one starts near the cut."""
    if len(text) <= most:
        return text.lstrip(" ")
    cut = text[1 - most :]
    _, space, rest = cut[:20].partition(" ")
    return f"…{rest + cut[20:] if space else cut}"


def start(text: str, most: int = MOST) -> str:
    """Return the first characters of a long text."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
