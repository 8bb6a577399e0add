"""How a page writes text and numbers."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from ffedit.facts.text import visible

MOST = 160


def finished(value: Any) -> Any:
    """What a template puts out for a value: markup as it is, all other text visible."""
    return value if isinstance(value, Markup | int | float) else visible(str(value))


def bare(text: str) -> str:
    """A token without the space that most begin with; a space alone is shown as one."""
    return text.strip(" ") or "␣"


def percent(change: float) -> str:
    """A relative change."""
    return f"{change:+.0%}".replace("-", "−") if abs(change) >= 0.005 else "0%"


def tenths(share: float) -> str:
    """A share that may be negative, or more than the whole."""
    return f"{share:.1%}".replace("-", "−")


def end(text: str, most: int = MOST) -> str:
    """The last characters of a long text, from the beginning of a word where one is near."""
    if len(text) <= most:
        return text.lstrip(" ")
    cut = text[1 - most :]
    _, space, rest = cut[:20].partition(" ")
    return f"…{rest + cut[20:] if space else cut}"


def start(text: str, most: int = MOST) -> str:
    """The first characters of a long text."""
    return text if len(text) <= most else f"{text[: most - 1]}…"
