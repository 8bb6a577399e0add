"""Forms: what JSON in a file of somebody else's has to look like, checked before anything is read from it.

A form is a tuple of types; `[form]` is a list of values of that form; `{EVERY: form}` an object whose values all have
it; `{"name": form}` an object in which the entry `name`, where there is one, has it, and has to be there where the name
ends in `!`; `Maybe(form)` allows null besides. Entries that a form does not name are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ffedit.facts.fact import show

Form: TypeAlias = Any
EVERY = "*"
MOST_BITS = 1000  # of a whole number: float64 reaches 1024
TEXT, INTEGER, NUMBER, YES_OR_NO, OBJECT = (str,), (int,), (int, float), (bool,), (Mapping,)
NAMES = {TEXT: "text", INTEGER: "a whole number", NUMBER: "a number", YES_OR_NO: "true or false", OBJECT: "an object"}


@dataclass(frozen=True)
class Maybe:
    """Form of a value that has another form, or is null."""

    form: Form


def check_form(value: Any, form: Form, name: str = "it") -> None:
    """Raise a ValueError that names the first value that has not its form."""
    if isinstance(form, Maybe):
        if value is not None:
            check_form(value, form.form, name)
    elif isinstance(form, list):
        _check_type(value, (list, tuple), name, "a list")
        for i, item in enumerate(value):
            check_form(item, form[0], f"{name}[{i}]")
    elif isinstance(form, Mapping):
        _check_type(value, OBJECT, name, NAMES[OBJECT])
        for field, inner in form.items():
            plain = field.removesuffix("!")
            if field == EVERY:
                for each, item in value.items():
                    check_form(item, inner, f"{name}.{each}")
            elif plain in value:
                check_form(value[plain], inner, f"{name}.{plain}")
            elif plain != field:
                raise ValueError(f"{name} has no {plain}")
    else:
        _check_type(value, form, name, NAMES[form])


def _check_type(value: Any, kinds: tuple[type, ...], name: str, expected: str) -> None:
    """Raise a ValueError where a value is of another type; a truth value is no number, nor is one beyond float64."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{name} is {show(value)}; {expected} was expected")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"{name} is a number of {value.bit_length()} bits")
