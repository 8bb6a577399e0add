"""What can go wrong, in the words of the person it went wrong for.

Every message is one line that says what was found, what was expected and what to do. The command line shows
an `FFEditError` as that line and never as a traceback.
"""

from textwrap import shorten


def brief(error: BaseException) -> str:
    """What an error of another library says, on one line that can be read."""
    return shorten(str(error), 200, placeholder=" …") or type(error).__name__


class FFEditError(Exception):
    """A mistake in what ffedit was given; the base of all errors that ffedit raises on purpose."""


class FactError(FFEditError):
    """A fact, or a file of facts, that cannot be used."""


class ModelError(FFEditError):
    """A model or tokenizer that cannot be read, traced or edited."""


class EditError(FFEditError):
    """An edit that cannot be computed, applied, saved or read."""


class RequirementError(FFEditError):
    """A `--require` that the edit does not meet, or that could not be measured."""


class CheckError(FFEditError):
    """A check of ffedit's own failed: its result must not be used."""
