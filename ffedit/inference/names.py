"""Names of all kinds, which come with ffedit, and short texts that mention one.

Some thousands of people, places, works, companies, animals, ..., a tenth of them in other scripts than the Latin one,
written for ffedit. They represent all that a model may know by a name. A mention says nothing about it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache as once
from pathlib import Path

from ffedit.facts.fact_token import FactToken
from ffedit.model.editable import Editable
from ffedit.model.tokenization import Encoded

NAMES = Path(__file__).with_name("names.txt")
# Words in front of a name.
MENTIONS = (
    "I think that",
    "The story of",
    "We talked about",
    "This is about",
    "A few words about",
    "Yesterday I heard of",
    "You may know",
)


@once
def names() -> tuple[str, ...]:
    """Return the names that come with ffedit."""
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if not line.startswith("# "))


def mention(editable: Editable, name: str, lead: str, fact_token: FactToken = "subject_last") -> Encoded:
    """Encode a text that ends with `name`, behind one of `MENTIONS`; the name is its subject."""
    text = f"{lead} {name}"
    return replace(editable.encode(text, span=(len(lead) + 1, len(text))), fact_token=fact_token)


def alike(name: str, other: str) -> bool:
    """Return True if one of two names equals the other, or whole words in it, whatever the case."""
    return stands_in(name, other) or stands_in(other, name)


def stands_in(name: str, text: str) -> bool:
    """Return True if `text` contains a name as whole words, whatever the case."""
    name, text = name.casefold(), text.casefold()
    return name in text and re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) is not None
