"""Errors that ffedit raises on purpose: one line that says what was found, what was expected and what to do.

The command line shows an `FFEditError` as that line and never as a traceback.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from numbers import Integral
from warnings import warn


def meant(name: object, known: Iterable[object]) -> str:
    """Return which of `known` is spelled like `name`, as a question in brackets; an empty string if none is."""
    alike = get_close_matches(str(name), map(str, known), 1)
    return f" (did you mean {alike[0]}?)" if alike else ""


def choices(name: object, known: Iterable[object]) -> str:
    """List `known` in the refusal of `name`, with the one that is `meant`."""
    names = list(map(str, known))
    return ", ".join(names) + meant(name, names)


def _shorten(text: str, length: int) -> str:
    """Return a text on one line, cut to `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 2].rstrip()} …"


def brief(error: BaseException) -> str:
    """Shorten the message of another library's error to one readable line, or return the name of its class."""
    message = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return _shorten(message, 200) or type(error).__name__


def warn_renamed(old: str, new: str) -> None:
    """Warn the caller of the caller that `old` is now called `new`."""
    warn(f"{old} is now called {new}; the old name goes with the next release", DeprecationWarning, stacklevel=3)


class FFEditError(Exception):
    """A mistake in the input of ffedit; the base class of all errors that ffedit raises on purpose."""

    @classmethod
    def require(cls, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
        """Raise this error unless `value` is of one of `kinds`; `expected` is the end of its message."""
        if not isinstance(value, kinds):
            shown = f"{_shorten(repr(value), 60)} ({type(value).__name__})"
            raise cls(f"found {shown} where {expected}")

    @classmethod
    def whole(cls, name: str, value: object, least: int) -> int:
        """Return `value` as an int; raise this error unless it is a whole number of at least `least`."""
        if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
            raise cls(f"{name} is {_shorten(repr(value), 60)}; a whole number of at least {least} was expected")
        return int(value)

    @classmethod
    def unless(cls, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
        """Call `require`, which this was called until 0.2.0."""
        warn_renamed(f"{cls.__name__}.unless", f"{cls.__name__}.require")
        cls.require(value, kinds, expected)


class FactError(FFEditError):
    """Fact, or file of facts, that cannot be used; `kind` names the kind of mistake in a few words."""

    def __init__(self, message: str, kind: str = "no fact that can be used") -> None:
        super().__init__(message)
        self.kind = kind


class ModelError(FFEditError):
    """A model or tokenizer that cannot be read, traced or edited."""


class EditError(FFEditError):
    """An edit that cannot be computed, applied, saved or read."""


class ProcessError(FFEditError):
    """Another process of the same run has ended, which implies nothing about the edit that both worked on."""


class RequirementError(FFEditError):
    """An edit that did not take, or that misses a `--require` or a guardrail of `--strict`."""


class CheckError(FFEditError):
    """A failed internal check of ffedit: the result must not be used."""
