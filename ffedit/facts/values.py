"""Values of a record's fields: one text or several in many forms, objects of facts, and prompts' slots.

A value may be text, a list, a list of lists of aliases, or an object that holds a text ({"str": …}, {"value": …,
"aliases": […]}) or a prompt.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, TypeAlias

from ffedit.errors import FactError, meant
from ffedit.facts.fact import SLOT, show
from ffedit.facts.synonyms import CLOSED, SCALARS, TEXT_NAMES, normal, role_of

Record: TypeAlias = Mapping[str, Any]
Path: TypeAlias = tuple[str, ...]

DEEPEST = 8  # levels of nested objects that are read
# Marks of other tools for the subject, and for the object at the end of a prompt (LAMA).
SLOTS = re.compile(r"\{(?:subject|entity|0)\}|\[(?:X|subject)\]|<subject>|%s")
OBJECT_SLOT = re.compile(r"\s*(?:\[Y\]|\[MASK\]|<mask>|_{3,})\s*[.?!]?\s*$", re.I)
OBJECT = re.compile(r"\[Y\]|\[MASK\]|<mask>")
# A special token behind an object, or in its place.
SPECIAL = re.compile(r"\s*(?:<\|[^|<>]*\|>|</?s>|<(?:eos|bos|pad|unk|end_of_turn)>|\[(?:EOS|SEP|PAD|UNK)\])$", re.I)
# Objects that end in one of these words, a single letter or a word with a stop inside keep their stop; so do sentences.
ABBREVIATED = frozenset(["inc", "ltd", "co", "corp", "jr", "sr", "st", "bros", "etc", "dept", "univ"])
MOST_WORDS = 4
STOPS = (".", "。")


def entries(record: Record, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the fields of a record with their paths; objects are read field by field, except those that are a value."""
    for key, value in record.items():
        path = (*above, *filter(None, str(key).split("."))) or (str(key),)
        role = role_of(path)
        opens = isinstance(value, Mapping) and normal(str(key)) not in CLOSED and len(path) < DEEPEST
        if role is not None and not (opens and role[0] in SCALARS and not any(name in value for name in TEXT_NAMES)):
            yield path, value
        elif opens and value:
            yield from entries(value, path)
        else:
            yield path, value


def roles_of(record: Record) -> set[str]:
    """Return the roles of the fields of a record."""
    return {role[0] for path, _ in entries(record) if (role := role_of(path)) is not None}


def at(record: Record, path: str) -> Any:
    """Return the value at a dotted path; a number leads into a list. Raises FactError where it is missing."""
    if path in record:
        return record[path]
    value: Any = record
    for step in path.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, (list, tuple)) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            names = [".".join(field) for field, _ in entries(record)]
            raise FactError(f"there is no field {path!r}{meant(path, names)}", kind="a missing field")
    return value


def texts_of(value: Any) -> tuple[Any, ...]:
    """Flatten a value into its texts, without empty text, null and NaN; values of other types stay as they are."""
    if value is None or is_blank(value) or (isinstance(value, float) and math.isnan(value)):
        return ()
    if isinstance(value, (list, tuple)):
        return tuple(text for item in value for text in texts_of(item))
    if isinstance(value, Mapping):
        name = key_of(value, ("prompt",)) or next((name for name in TEXT_NAMES if name in value), None)
        return (*texts_of(None if name is None else value[name]), *texts_of(value.get("aliases")))
    return (value,)


def is_blank(value: Any) -> bool:
    """Return whether a value is text of white space only, or empty."""
    return isinstance(value, str) and not value.strip()


def key_of(value: Record, roles: Collection[str]) -> Any:
    """Return the first name in an object that has one of `roles` and holds texts; None if there is none."""
    return next(
        (key for key, item in value.items() if (role := role_of((str(key),))) and role[0] in roles and _is_plain(item)),
        None,
    )


def _is_plain(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) else (value,)
    return all(not isinstance(item, Mapping) or any(name in item for name in TEXT_NAMES) for item in items)


def with_slot(prompt: Any) -> Any:
    """Write {} for other marks of the subject, and drop a mark of the object; FactError if that is not at the end."""
    if not isinstance(prompt, str):
        return prompt
    text = OBJECT_SLOT.sub("", SLOTS.sub(SLOT, prompt))
    if OBJECT.search(text):
        raise FactError(
            f"prompt {show(prompt)} has words after the mark for the object; end it where the object begins",
            kind="an object before the prompt's end",
        )
    return text


def bare(name: str, prompt: str) -> str:
    """Return an object's name without special tokens and the full stop behind it, unless the stop is part of it."""
    text = name.strip()
    while special := SPECIAL.search(text):
        text = text[: special.start()].rstrip()
    words = text[:-1].split()
    if not text.endswith(STOPS) or not words or len(words) > MOST_WORDS or prompt.rstrip().endswith(STOPS):
        return text
    part_of_name = words[-1].casefold() in ABBREVIATED or len(words[-1]) == 1 or any("." in word for word in words)
    return text if part_of_name else text[:-1].rstrip()
