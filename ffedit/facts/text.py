"""Words and numbers on one line, fit to be displayed, from any source.

Invisible characters are shown by their number: control characters, lone surrogates, and those that change the
direction of the text around them; but not those that join letters of some scripts and emoji.
"""

from __future__ import annotations

JOINERS = "\u200c\u200d"
NAMED = {"\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    """Return `text` on one line, with invisible characters replaced by visible ones."""
    return "".join(c if c.isprintable() or c in JOINERS else NAMED.get(c, f"⟨U+{ord(c):04X}⟩") for c in text)


def counted(many: int, what: str) -> str:
    """Format a number of things: "1 fact", "3 facts"."""
    return f"{many} {what}{'' if many == 1 else 's'}"


def number(value: float) -> str:
    """Format with two decimals; with one digit where two decimals would show zero."""
    size = abs(value)
    shown = f"{size:.1g}" if 0 < size < 0.005 else f"{size:.2f}"
    return f"−{shown}" if value < 0 else shown


def token(text: str) -> str:
    """Format a token on one line: without leading space, control characters escaped."""
    shown = text.strip(" ") or "␣"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def quoted(text: str, most: int = 30) -> str:
    """Put text on one line, in quotation marks, cut if it is long."""
    shown = token(text)
    return f"“{shown if len(shown) <= most else shown[: most - 1] + '…'}”"
