"""Find a subject in real text, where it may stand in another case, inflected, or behind a particle of its language.

"Стекло" stands in "из стекла", "Anna Virta" in "Anna Virran", "ليلى" in "لليلى", "ঢাকা" in "ঢাকার". No language is
assumed: texts are compared word by word, without case, accents and forms of characters (Unicode's NFKD), and a word
matches another that begins with its stem and differs in an ending of a few letters.
"""

from __future__ import annotations

import re
import unicodedata
from difflib import SequenceMatcher
from itertools import groupby, takewhile
from math import ceil
from typing import NamedTuple, TypeAlias

# Letters of a stem: their share of a word, and the fewest. Letters that may follow a stem, and a whole word.
STEM, SHORTEST_STEM, ENDING, SUFFIX = 0.6, 3, 3, 4
# Longest particle that is written with the next word, and the scripts that do so: Hebrew and Arabic.
PARTICLE, ATTACHING = 3, re.compile("[\u0590-\u05ff\u0600-\u06ff]")
LONGEST = 200  # a longer subject is no name: it stands in its prompt as it is, or not at all

Span: TypeAlias = tuple[int, int]


class Word(NamedTuple):
    """Word of a text without case and accents; `at` has the index of the character that each letter comes from."""

    text: str
    at: tuple[int, ...]


class Match(NamedTuple):
    """Letters (start, end) of a word that may be a form of another, and the number of letters that both begin with."""

    start: int
    end: int
    common: int


def find_mention(text: str, subject: str) -> Span | None:
    """Return the characters (start, end) of the longest text that may be a form of `subject`; None for none or a tie.

    Letters of the same word before or behind the whole subject are left out; an ending behind its stem is included.
    """
    names, words = _words(subject[: LONGEST + 1]), _words(text)
    if not names or len(subject) > LONGEST:
        return None
    lengths: dict[Span, int] = {}
    for first in range(len(words) - len(names) + 1):
        run = words[first : first + len(names)]
        matched = [_match(name.text, word.text, i == 0) for i, (name, word) in enumerate(zip(names, run, strict=True))]
        matches = [match for match in matched if match is not None]
        if len(matches) == len(names):
            end = run[-1].at[matches[-1].end - 1] + 1
            end += len([*takewhile(unicodedata.combining, text[end:])])
            lengths[run[0].at[matches[0].start], end] = sum(match.common for match in matches)
    longest = [span for span, length in lengths.items() if length == max(lengths.values())]
    forms = {text[slice(*span)].casefold() for span in longest}
    return longest[0] if len(forms) == 1 else None


def nearest(text: str, subject: str) -> str | None:
    """Return the words of `text` that are most like `subject`, as many as it has; None if none are similar."""
    names, words = _words(subject[:LONGEST]), _words(text[: 10 * LONGEST])
    name = " ".join(word.text for word in names)
    runs = [words[i : i + len(names)] for i in range(len(words) - len(names) + 1)] if names else []
    ratios = [SequenceMatcher(None, name, " ".join(word.text for word in run)).ratio() for run in runs]
    best = max(range(len(runs)), key=ratios.__getitem__, default=None)
    return None if best is None or ratios[best] < 0.5 else text[runs[best][0].at[0] : runs[best][-1].at[-1] + 1]


def _words(text: str) -> list[Word]:
    folded = [
        (letter, i)
        for i, character in enumerate(text)
        for letter in unicodedata.normalize("NFKD", character.casefold())
        if not unicodedata.combining(letter)
    ]
    runs = groupby(folded, key=lambda pair: unicodedata.category(pair[0])[0] in "LNM")
    words = [[*run] for in_word, run in runs if in_word]
    return [Word("".join(letter for letter, _ in run), tuple(i for _, i in run)) for run in words]


def _match(name: str, word: str, leads: bool) -> Match | None:
    """Match `name`, or its stem with an ending, at the start of `word`; if it `leads`, also behind a particle."""
    stem = max(SHORTEST_STEM, ceil(STEM * len(name)))
    for start in range(1 + (PARTICLE if leads and ATTACHING.match(word) else 0)):
        common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(name, word[start:], strict=False))])
        rest = len(word) - start - common
        if common == len(name) and rest <= SUFFIX:
            return Match(start, start + common, common)
        if common >= stem and rest <= ENDING and start == 0:
            return Match(start, len(word), common)
    return None
