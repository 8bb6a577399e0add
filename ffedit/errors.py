"""The errors that ffedit raises on purpose.

Every message is one line that says what was found, what was expected and what to do. The command line shows
an `FFEditError` as that line and never as a traceback.
"""

from textwrap import shorten


def brief(error: BaseException) -> str:
    """Shorten the message of another library's error to one readable line, or return the name of its class."""
    return shorten(str(error), 200, placeholder=" …") or type(error).__name__


class FFEditError(Exception):
    """A mistake in the input of ffedit; the base class of all errors that ffedit raises on purpose."""


class FactError(FFEditError):
    """A fact, or a file of facts, that cannot be used."""


class ModelError(FFEditError):
    """A model or tokenizer that cannot be read, traced or edited."""


class EditError(FFEditError):
    """An edit that cannot be computed, applied, saved or read."""


class RequirementError(FFEditError):
    """An edit that did not take, or that misses a `--require` or a guardrail of `--strict`."""


class CheckError(FFEditError):
    """A failed internal check of ffedit: the result must not be used."""
