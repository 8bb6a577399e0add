"""Text of any source and script: mentions of a name as a whole word, and words and numbers fit to be displayed.

Invisible characters are shown by their number: control characters, lone surrogates, and those that change the
direction of the text around them; but not those that join letters of some scripts and emoji.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

# Scripts that write words without spaces (Thai, Lao, Tibetan, Burmese, Khmer, Chinese, Japanese) or attach
# particles to names (Korean): there, the neighbouring character does not tell where a word ends.
_UNSPACED = re.compile(
    "[\u0e00-\u0fff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u2e80-\u9fff\ua960-\ua97f\uac00-\ud7ff"
    "\uf900-\ufaff\uff66-\uffdc\U0001b000-\U0001b16f\U00020000-\U0003ffff]"
)
JOINERS = "\u200c\u200d"
NAMED = {"\n": "⏎", "\t": "⇥"}


def visible(text: str) -> str:
    """Return `text` on one line, with invisible characters replaced by visible ones."""
    return "".join(c if c.isprintable() or c in JOINERS else NAMED.get(c, f"⟨U+{ord(c):04X}⟩") for c in text)


def plain(text: str) -> str:
    """Return `text` on one line of Markdown that shows it as it is: no link, HTML, code or cell of a table."""
    return re.sub(r"([\\`<>|&]|\](?=[\[(:]))", r"\\\1", visible(" ".join(text.split())))


def counted(many: int, what: str) -> str:
    """Format a number of things: "1 fact", "3 facts"."""
    return f"{many} {what}{'' if many == 1 else 's'}"


def number(value: float) -> str:
    """Format with two decimals; with one digit where two decimals would show zero."""
    size = abs(value)
    shown = f"{size:.1g}" if 0 < size < 0.005 else f"{size:.2f}"
    return f"−{shown}" if value < 0 else shown


def token(text: str) -> str:
    """Format a token on one line, without the spaces around it; a token of spaces only is "␣"."""
    return visible(text.strip(" ") or "␣")


def quoted(text: str, most: int = 30) -> str:
    """Put text on one line, in quotation marks, cut if it is long."""
    shown = token(text)
    return f"“{shown if len(shown) <= most else shown[: most - 1] + '…'}”"


def change(subject: str, previous: str | None, target: str | None) -> str:
    """Say what a fact changes: "Eiffel Tower: Paris → Rome"; long names are cut."""
    short = [text if len(text) <= 60 else f"{text[:59]}…" for text in (subject, previous or "", target or "")]
    return f"{short[0]}: {short[1]} → {short[2]}" if previous else f"{short[0]} → {short[2]}"


def occurrences(text: str, subject: str) -> Iterator[tuple[int, int]]:
    """Yield spans (start, end) of `subject` in `text` as a whole word: "Rome" is not in "Romeo"."""
    start = text.find(subject)
    while start >= 0:
        end = start + len(subject)
        before, after = text[start - 1 : start], text[end : end + 1]
        whole = not _one_word(before, subject[0]) and not _one_word(after, subject[-1])
        if whole:
            yield start, end
        start = text.find(subject, end if whole else start + 1)


def _one_word(neighbour: str, edge: str) -> bool:
    """Return True if a character beside the subject continues the word that the subject's edge belongs to."""
    return all(
        c != "" and not _UNSPACED.match(c) and (c.isalnum() or c == "_" or unicodedata.category(c)[0] == "M")
        for c in (neighbour, edge)
    )
