"""Text that nobody vouches for, made fit to be shown.

Characters that cannot be seen are shown by their number: control characters, lone surrogates, and those that turn the
direction of the text around them; but not those that join letters of some scripts and emoji.
"""

from __future__ import annotations

JOINERS = "\u200c\u200d"
NAMED = {"\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    """`text` on one line, without characters that cannot be seen."""
    return "".join(c if c.isprintable() or c in JOINERS else NAMED.get(c, f"⟨U+{ord(c):04X}⟩") for c in text)
