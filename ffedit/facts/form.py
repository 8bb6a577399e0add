"""Forms: types that JSON from elsewhere must have, checked before anything is read from it.

A form is a tuple of types; `[form]` is a list of values of that form; `{EVERY: form}` is an object whose values all
have it; `{"name": form}` is an object whose entry `name` has it, if there is one; `{"name!": form}` also requires the
entry; `Maybe(form)` also allows null. Entries that a form does not name may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ffedit.facts.fact import show

Form: TypeAlias = Any
EVERY = "*"
MOST_BITS = 1000  # of a whole number; float64 overflows at 1024
TEXT, INTEGER, NUMBER, YES_OR_NO, OBJECT = (str,), (int,), (int, float), (bool,), (Mapping,)
NAMES = {TEXT: "text", INTEGER: "a whole number", NUMBER: "a number", YES_OR_NO: "true or false", OBJECT: "an object"}


@dataclass(frozen=True)
class Maybe:
    """Form of a value that has another form, or is null."""

    form: Form


def check_form(value: Any, form: Form, name: str = "it") -> None:
    """Raise a ValueError that names the first value without the form expected of it."""
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
                for key, item in value.items():
                    check_form(item, inner, f"{name}.{key}")
            elif plain in value:
                check_form(value[plain], inner, f"{name}.{plain}")
            elif plain != field:
                raise ValueError(f"{name} has no {plain}")
    else:
        _check_type(value, form, name, NAMES[form])


def _check_type(value: Any, kinds: tuple[type, ...], name: str, expected: str) -> None:
    """Raise a ValueError for a value of another type. true and false are no numbers, nor is one beyond float64."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ValueError(f"{name} is {show(value)}; {expected} was expected")
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        raise ValueError(f"{name} is a number of {value.bit_length()} bits")
