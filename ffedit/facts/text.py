"""Words and numbers on one line, fit to be shown, whoever wrote them.

Characters that cannot be seen are shown by their number: control characters, lone surrogates, and those that turn the
direction of the text around them; but not those that join letters of some scripts and emoji.
"""

from __future__ import annotations

JOINERS = "\u200c\u200d"
NAMED = {"\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    """`text` on one line, without characters that cannot be seen."""
    return "".join(c if c.isprintable() or c in JOINERS else NAMED.get(c, f"⟨U+{ord(c):04X}⟩") for c in text)


def counted(many: int, what: str) -> str:
    """A number of things: "1 fact", "3 facts"."""
    return f"{many} {what}{'' if many == 1 else 's'}"


def number(value: float) -> str:
    """Two decimals; one digit where two decimals would show nothing of it."""
    size = abs(value)
    shown = f"{size:.1g}" if 0 < size < 0.005 else f"{size:.2f}"
    return f"−{shown}" if value < 0 else shown


def token(text: str) -> str:
    """A token as it can be shown on one line: without leading space, control characters escaped."""
    shown = text.strip(" ") or "␣"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def quoted(text: str, most: int = 30) -> str:
    """Text on one line, in quotation marks, cut if it is long."""
    shown = token(text)
    return f"“{shown if len(shown) <= most else shown[: most - 1] + '…'}”"
