"""Name the token at which a fact's key is read and its value is written.

ROME reads the key at the subject's last token. Many models recall a fact at another token: in "Eiffel Tower" the city
comes with "iffel", while "Tower" belongs to every tower. So a token is named by ROME's term for it, by its number among
the subject's tokens, or by the word of the subject that ends with it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeAlias

from ffedit.errors import EditError, FactError
from ffedit.facts.fact import show
from ffedit.facts.text import counted, occurrences

# "subject_last", "subject_first", "last" (the prompt's), a number (from 0, or from −1 at the subject's end), or a word.
FactToken: TypeAlias = str | int
# ROME's parameter names.
NAMED = ("subject_last", "subject_first", "last")
NUMBER = re.compile(r"[+-]?[0-9]{1,9}")
KINDS = f"{', '.join(NAMED)}, the number of one of the subject's tokens or a word of the subject"


def as_fact_token(token: object) -> str:
    """Return a fact token as text, its only form in configurations and on disk; EditError for anything else."""
    text = str(token) if type(token) in (str, int) else ""
    if not text.strip():
        raise EditError(f"key.fact_token is {token!r}; {KINDS} was expected")
    return text.strip()


def index_of(token: FactToken, subject: str, ends: Sequence[int]) -> int:
    """Return the index of a fact token among the tokens of a subject.

    Text that spells a number counts as that number. Of a word that occurs more than once, the first is taken.

    Args:
        token: any fact token but "last", which is a token of the prompt.
        subject: text of the subject.
        ends: for each token of the subject, the number of the subject's characters up to the token's end.

    Raises:
        FactError: the subject has no such token.
    """
    count, text = len(ends), str(token)
    if text in NAMED:
        return 0 if text == "subject_first" else count - 1
    if NUMBER.fullmatch(text):
        number = int(text)
        if not -count <= number < count:
            raise FactError(
                f"fact token {number} was asked for, but the subject {show(subject)} has {counted(count, 'token')}; "
                f"a number from 0 to {count - 1}, or from -{count} to -1, was expected"
            )
        return number % count
    end = _word_end(text, subject)
    return next((i for i, reached in enumerate(ends) if reached >= end), count - 1)


def check_word(token: FactToken, subject: str) -> None:
    """Raise FactError for a word that the subject lacks. This needs no tokenizer, so any number passes."""
    if str(token) not in NAMED and not NUMBER.fullmatch(str(token)):
        _word_end(str(token), subject)


def _word_end(word: str, subject: str) -> int:
    span = next(occurrences(subject, word), None)
    if span is None:
        raise FactError(f"fact token {show(word)} is not a word of the subject {show(subject)}; {KINDS} was expected")
    return span[1]
