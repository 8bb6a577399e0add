"""Search for mentions of a name in a text, as a whole word, in any script."""

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
